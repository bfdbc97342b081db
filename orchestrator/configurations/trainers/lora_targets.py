"""Linear layers that a trainer's configuration gives adapters, by names or by a pattern."""

import re

from orchestrator.configurations.key_classes import Config, Reading

PEFT_DEFAULT = ("q_proj", "v_proj")
"""PEFT's targets for Llama, Mistral, Qwen and most others (peft/utils/constants.py)."""

LAYERS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Linear layers of a block in models of Llama's kind."""

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
BLOCKS = ("model.layers", "model.language_model.layers", "language_model.model.layers")
DEPTHS = (0, 1, 7, 19)  # blocks that a pattern must treat alike


def names_of(value: str | list[str]) -> list[str]:
    """Names, as a list or with commas between (llamafactory/hparams/finetuning_args.py:561)."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def targets_of(config: Config, key: str, reading: Reading) -> tuple[str, ...]:
    """Layers that a key names; PEFT matches a list by ends of names, and a text as a pattern."""
    value = config.get(key)
    if not value:
        return ()
    if isinstance(value, list):
        wrong = [str(name) for name in value if not PLAIN.fullmatch(str(name))]
        if wrong:
            reading.refuse(key, value, f"{wrong[0]}: a list has names of layers, not patterns")
            return ()
        return tuple(dict.fromkeys(str(name) for name in value))
    if value == "all-linear" or PLAIN.fullmatch(str(value)):
        return (str(value),)
    names = _matched(str(value))
    if not names:
        reading.refuse(key, value, "matches no layers of Llama's names in all blocks: list them")
    return names


def _matched(pattern: str) -> tuple[str, ...]:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return ()
    return next((names for blocks in BLOCKS if (names := _layers(compiled, blocks))), ())


def _layers(compiled: re.Pattern[str], blocks: str) -> tuple[str, ...]:
    """Layers that a pattern matches in every block, or none if blocks differ."""
    names: list[str] = []
    for part, layers in LAYERS.items():
        for layer in layers:
            matches = {
                bool(compiled.fullmatch(f"{blocks}.{depth}.{part}.{layer}")) for depth in DEPTHS
            }
            if len(matches) > 1:
                return ()
            names += [layer] * matches.pop()
    return tuple(names)


def fused_experts(config: Config, reading: Reading) -> tuple[str, ...]:
    """Adapters on the fused matrices of experts, which ``lora_target_parameters`` names."""
    key = "lora_target_parameters"
    names = config.get(key)
    if not names:
        return ()
    ends = {str(name).rpartition("experts.")[2] for name in names}
    if isinstance(names, list) and ends == {"gate_up_proj", "down_proj"}:
        return ("experts",)
    reading.refuse(key, names, "not simulated: name experts.gate_up_proj and experts.down_proj")
    return ()
