"""Optimizer that a configuration names, of transformers' Trainer or of axolotl."""

from orchestrator.configurations.key_classes import Computed, Config, Reading, shown

OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw_foreach",
    "adamw_hf": "adamw_foreach",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw": "paged_adamw_32bit",
    "adamw_torch_8bit": "torchao_adamw_8bit",
    "ao_adamw_8bit": "torchao_adamw_8bit",
    "adamw_torch_4bit": "torchao_adamw_4bit",
    "ao_adamw_4bit": "torchao_adamw_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Names of transformers' Trainer and of axolotl for the optimizers of a recipe."""
SAME_STATE = {
    "adamw_apex_fused": "adamw",
    "adopt_adamw": "adamw_foreach",
    "ao_adamw_fp8": "torchao_adamw_8bit",
    "schedule_free_adamw": "adamw_foreach",
    "schedule_free_radam": "adamw_foreach",
    "stable_adamw": "adamw_foreach",
}
"""Optimizers with two states per weight, in as many bits as those of another."""
SMALLER_STATE = (
    *("adagrad", "came_pytorch", "lion", "lion_8bit", "lion_32bit", "optimi_adamw"),
    *("paged_lion", "paged_lion_8bit", "paged_lion_32bit", "rmsprop", "rmsprop_bnb"),
    *("rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "schedule_free_sgd", "muon"),
)
"""Optimizers whose state of fp32 weights, such as adapters, is no larger than AdamW's."""


def optimizer_of(config: Config, key: str, reading: Reading) -> None:
    """Add the optimizer of a configuration, whose method is known; transformers' by default."""
    name, options = config.get(key), reading.options
    if name is None or isinstance(name, Computed):
        options.setdefault("optimizer", "adamw")  # adamw_torch_fused
    elif isinstance(name, str) and name in OPTIMIZERS:
        options["optimizer"] = OPTIMIZERS[name]
        reading.mark(key, name, "used", f"optimizer {OPTIMIZERS[name]}")
    elif isinstance(name, str) and name in SAME_STATE:
        options["optimizer"] = SAME_STATE[name]
        text = f"{SAME_STATE[name]}, whose state is as large"
        reading.mark(key, name, "assumed", text)
    elif name in SMALLER_STATE and options.get("method") != "full":
        options["optimizer"] = "adamw"
        reading.mark(key, name, "assumed", "adamw, whose state of adapters is no smaller")
    else:
        names = ", ".join(shown(word) for word in OPTIMIZERS)
        reading.refuse(key, name, f"not simulated: use one of {names}")
