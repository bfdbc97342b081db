"""Configurations of axolotl, in YAML."""

import re
from collections.abc import Iterator
from typing import Any

from orchestrator.configurations.key_classes import ABSENT, IMAGES, Config, Reading, assumed
from orchestrator.configurations.layouts.several_gpus import read_axolotl
from orchestrator.configurations.quantised_weights import (
    read_expert_kernels,
    read_format,
    read_quantised_experts,
)
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.attention_kernels import attention_of
from orchestrator.configurations.trainers.axolotl_data import read_data, read_tower
from orchestrator.configurations.trainers.axolotl_keys import KEYS, NOT_SIMULATED
from orchestrator.configurations.trainers.lora_targets import (
    PEFT_DEFAULT,
    fused_experts,
    targets_of,
)
from orchestrator.configurations.trainers.optimizers import optimizer_of
from orchestrator.configurations.trainers.training_length import length_of
from orchestrator.configurations.trainers.transformers_keys import check_types, checkpointing_of

TASKS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "orpo"}
ATTENTION_SWITCHES = {
    # axolotl/utils/schemas/enums.py:125
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
PLUGINS = {
    "axolotl.integrations.liger.LigerPlugin": "liger",
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": "cce",
}
ATTENTION_KERNELS = {name: name for name in ("eager", "sdpa", "flash_attention_2")}
LIGER_LAYERS = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
AN_ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


def derive(config: Config, reading: Reading) -> None:
    """Add the options that keys set together, and axolotl's defaults."""
    reading.options["defaults"] = "plain"  # each field is set below
    _model(config, reading)
    _task(config, reading)
    read_expert_kernels(config, reading)
    _method(config, reading)
    if config.get("gptq"):
        read_format(reading, key="gptq", value=config["gptq"], form="gptq")
    _frozen(config, reading)
    read_tower(config, reading)
    _precision(config, reading)
    _loss(config, reading)
    _attention(config, reading)
    _memory_savers(config, reading)
    _rows(config, reading)
    read_data(config, reading)
    _batches(config, reading)
    optimizer_of(config, "optimizer", reading)
    read_axolotl(config, reading)


def _model(config: Config, reading: Reading) -> None:
    base = config.get("base_model_config")
    if base is not None and base != config.get("base_model"):
        reading.options["model"] = base
    data = config.get("datasets") or config.get("pretraining_dataset")
    if data:
        name = "datasets" if config.get("datasets") else "pretraining_dataset"
        text = "not read: lengths and number of examples come from --dataset, or are assumed"
        reading.mark(name, data, "assumed", text)
    overrides = config.get("model_config") or config.get("overrides_of_model_config")
    if isinstance(overrides, dict):
        others = sorted(set(overrides) - {"output_router_logits"})
        if others:
            reading.refuse("model_config", overrides, "change the model's config.json instead")
        reading.options["router_loss"] = overrides.get("output_router_logits") is True
    else:
        reading.options["router_loss"] = False  # only the model's own setting adds it


def _task(config: Config, reading: Reading) -> None:
    rl, task = config.get("rl"), "sft"
    if rl is not None and rl is not False:
        if rl in TASKS:
            task = TASKS[rl]
            if rl == "simpo":
                text = "the step of orpo: both take the logits of pairs, and have no reference"
                reading.mark("rl", rl, "assumed", text)
        else:
            names = ", ".join(TASKS)
            reading.refuse("rl", rl, f"generates or is not simulated: simulated are {names}")
    kind = config.get("model_type") or config.get("type_of_model")
    if config.get("reward_model"):
        task = "reward"
    elif isinstance(kind, str) and ("ImageText" in kind or "ConditionalGeneration" in kind):
        reading.refuse("model_type", kind, IMAGES)
    elif isinstance(kind, str) and not ("CausalLM" in kind or kind == "AutoModel"):
        reading.refuse("model_type", kind, "only causal language models and reward models are")
    reading.options["task"] = task
    if config.get("precompute_ref_log_probs") and task in ("dpo", "kto"):
        reading.options["reference"] = "precomputed"


def _method(config: Config, reading: Reading) -> None:
    adapter = config.get("adapter") or None
    four, eight = bool(config.get("load_in_4bit")), bool(config.get("load_in_8bit"))
    if adapter not in (None, "lora", "qlora"):
        reading.refuse("adapter", adapter, "not simulated: use lora or qlora")
        return
    if adapter is None:
        reading.options["method"] = "full"
        if config.get("quantize_moe_experts"):
            name = "quantize_moe_experts"
            reading.refuse(name, config[name], "axolotl refuses it without an adapter")
        if four or eight:
            name = "load_in_4bit" if four else "load_in_8bit"
            reading.refuse(
                name, config[name], "axolotl refuses it without an adapter: add adapter: qlora"
            )
        for name in (
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "lora_target_linear",
            "lora_target_modules",
            "lora_target_parameters",
            "lora_modules_to_save",
            *LORA_KERNELS,
        ):
            if name in config:
                reading.mark(name, config[name], "irrelevant", "no adapter")
        return
    if adapter == "qlora" and not four:
        reading.refuse("adapter", adapter, "axolotl needs load_in_4bit: true with it")
    options = reading.options
    options["method"] = "qlora" if four or eight else "lora"
    if four or eight:
        # loaders/model.py:798; PEFT's preparation is undone by loaders/model.py:486.
        more = config.get("bnb_config_kwargs") or {}
        options["quantisation"] = "int8" if eight else more.get("bnb_4bit_quant_type", "nf4")
        options["kbit_preparation"] = False
        if not eight:
            options["double_quantisation"] = more.get("bnb_4bit_use_double_quant", True)
    read_quantised_experts(config, reading)
    _adapters(config, reading)


def _frozen(config: Config, reading: Reading) -> None:
    """Refuse patterns of parameters to train, which axolotl applies to adapters, too."""
    patterns = config.get("unfrozen_parameters")
    if not patterns:
        return
    text = NOT_SIMULATED
    if reading.options.get("method") != "full" and not any(map(_matches_an_adapter, patterns)):
        text = "trains nothing, since it matches no adapter and axolotl freezes the rest: remove it"
    reading.refuse("unfrozen_parameters", patterns, text)


def _matches_an_adapter(pattern: str) -> bool:
    try:  # as axolotl/utils/freeze.py:225 compiles it
        return re.match(re.sub(r"\.(?!\+)", r"\.", pattern), AN_ADAPTER) is not None
    except re.error:
        return False


def _adapters(config: Config, reading: Reading) -> None:
    options = reading.options
    rank = config.get("lora_r")
    if rank is None:
        reading.refuse("lora_r", ABSENT, "is missing: the rank of the adapters")
    options["lora_rank"] = rank
    options["lora_alpha"] = config.get("lora_alpha")
    dropout = config.get("lora_dropout") or 0.0
    if dropout and options["task"] != "sft":
        reading.mark("lora_dropout", dropout, "assumed", "0: TRL's trainer disables dropout")
        dropout = 0.0
    options["lora_dropout"] = float(dropout)
    names = targets_of(config, "lora_target_modules", reading)
    if config.get("lora_target_linear"):
        options["lora_targets"] = (
            "all-linear",
            *[n for n in names if n in ("lm_head", "embed_tokens")],
        )
    elif names:
        options["lora_targets"] = names
    else:
        options["lora_targets"] = PEFT_DEFAULT
        reading.assume("lora_target_modules", "q_proj, v_proj: PEFT's own for most models")
    options["lora_targets"] += fused_experts(config, reading)
    if config.get("lora_modules_to_save"):
        options["modules_to_save"] = tuple(config["lora_modules_to_save"])
    options["dora"] = bool(config.get("peft_use_dora"))
    if config.get("peft_autocast_adapter_dtype") is False:
        options["adapter_dtype"] = "bf16"
    if (
        options["task"] == "sft"
        and not config.get("trust_remote_code")
        and all(config.get(name) is None for name in LORA_KERNELS)
    ):
        text = "PEFT's own layers; axolotl turns on its fused kernels, which need less"
        reading.assume("lora_mlp_kernel", text)


def _precision(config: Config, reading: Reading) -> None:
    """Dtypes as ``resolve_dtype`` (utils/config/__init__.py) and the model loader set them."""
    has_adapters = reading.options.get("method") != "full"
    bf16, fp16 = _autocast_types(config, reading)
    if bf16 == "full":  # core/builders/base.py:273: no autocast
        _without_autocast(reading)
    elif bf16 or config.get("bfloat16"):
        reading.options["precision"] = "bf16-mixed" if has_adapters else "bf16"
    elif fp16:
        reading.options["precision"] = "fp16"
        if not has_adapters:
            reading.refuse("fp16", fp16, "loss scaling refuses fp16 weights: use bf16: true")
    elif config.get("float16"):
        # No autocast and no loss scaling: weights, gradients and states have the bytes of bf16.
        _without_autocast(reading)
        reading.mark("float16", config["float16"], "assumed", "bf16, which costs as much as fp16")
    elif config.get("load_in_8bit"):
        text = "without bf16 or fp16 not simulated: use bf16: true"
        reading.refuse("load_in_8bit", config["load_in_8bit"], text)
    else:
        reading.options["precision"] = "fp32"
    _without_format(config, reading)
    # loaders/model.py:470: without adapters, only flash attention or cce convert them back.
    if reading.options.get("precision") == "bf16" and not _converts_back(config):
        text = "bf16; axolotl holds embeddings, head and norms in fp32 without flash attention"
        reading.assume("dtype of embeddings", text)


def _autocast_types(config: Config, reading: Reading) -> tuple[Any, Any]:
    """Values of bf16, which is on by default and replaces fp16, and of fp16."""
    bf16, fp16 = config.get("bf16", "auto"), config.get("fp16")  # schemas/config.py:561
    if bf16 == "auto":
        text = "a GPU with bf16; others are skipped"
        reading.mark("bf16", config.get("bf16", ABSENT), "assumed", text)
        bf16 = not fp16
    if fp16 and bf16:
        reading.mark("fp16", fp16, "irrelevant", "bf16 replaces it")
    else:
        check_types(config, reading, bf16="bfloat16")  # core/builders/base.py:271
    return bf16, fp16


def _without_autocast(reading: Reading) -> None:
    reading.options["precision"] = "bf16"
    if reading.options.get("method") != "full":
        reading.options.setdefault("adapter_dtype", "fp32")


def _without_format(config: Config, reading: Reading) -> None:
    """Refuse weights of another format that are not dequantised."""
    if config.get("model_quantization_config"):
        more = config.get("model_quantization_config_kwargs") or {}
        if not more.get("dequantize"):
            name = "model_quantization_config"
            reading.refuse(name, config[name], "not simulated without dequantize: true")


def _converts_back(config: Config) -> bool:
    kernel = config.get("attn_implementation")
    flash = bool(kernel) and kernel not in ("eager", "sdpa")
    return flash or bool(config.get("flash_attention")) or "cce" in _plugins(config)


def _plugins(config: Config) -> Iterator[Any]:
    plugins = config.get("plugins") or []
    return (PLUGINS.get(name, name) for name in (plugins if isinstance(plugins, list) else []))


def _loss(config: Config, reading: Reading) -> None:
    plugins = set(_plugins(config))
    unknown = sorted(str(name) for name in plugins - set(PLUGINS.values()))
    ignored = [name for name in unknown if name.startswith(IGNORED_PLUGINS)]
    if set(unknown) - set(ignored):
        reading.refuse("plugins", config["plugins"], f"not simulated: {', '.join(unknown)}")
    options = reading.options
    options["loss"] = None if options["task"] != "sft" else "full-logits"
    if "cce" in plugins and config.get("cut_cross_entropy", True):
        options["loss"] = "cce"
    elif "liger" in plugins and config.get("liger_fused_linear_cross_entropy"):
        options["loss"] = "liger"
    layers = [bool(config.get(name)) for name in LIGER_LAYERS]
    layers[2] = layers[2] or bool(config.get("liger_swiglu"))
    is_liger = "liger" in plugins and any(layers)
    if is_liger and not all(layers):
        text = "all of RMSNorm, rotary embedding and SwiGLU by liger-kernel"
        reading.assume("some of liger's layers", text)
    options["liger_kernels"] = is_liger


IGNORED_PLUGINS = (
    "axolotl.integrations.swanlab",
    "axolotl.integrations.lm_eval",
    "axolotl.integrations.kernels",
)
"""Plugins that only log or evaluate, or whose own keys decide."""


def _attention(config: Config, reading: Reading) -> None:
    attention_of(config, ATTENTION_KERNELS, reading)
    for name, value in config.items():
        if name.endswith("_attention") and value is True:
            if name in ATTENTION_SWITCHES:
                reading.options["attention"] = ATTENTION_SWITCHES[name]
            else:
                reading.refuse(name, value, "not simulated: use flash_attention or sdp_attention")
    reading.options.setdefault("attention", "sdpa")  # transformers' own choice
    if config.get("gemma4_hybrid_attn_impl"):
        reading.options["attention"] = "sdpa"
        text = "sdpa in all layers, which needs more memory and time than FlashAttention-2 in some"
        name = "gemma4_hybrid_attn_impl"
        reading.mark(name, config[name], "assumed", text)


def _memory_savers(config: Config, reading: Reading) -> None:
    saves = config.get("gradient_checkpointing", False)  # schemas/config.py:606
    offloads = config.get("activation_offloading")
    if saves in ("offload", "offload_disk"):  # schemas/validation.py:1577
        offloads = {"offload": True, "offload_disk": "disk"}[saves]
    if offloads in ("disk", "hidden_states"):
        own = "activation_offloading"
        name = own if own in config else "gradient_checkpointing"
        reading.refuse(name, config[name], "not simulated: use activation_offloading: true")
    # core/builders/base.py:608: null leaves the default to TRL's configurations, which is on.
    is_trl = reading.options["task"] != "sft"
    saves = is_trl if saves is None else bool(saves)
    checkpoints = checkpointing_of(config, older=not is_trl)  # utils/config/__init__.py:401
    reading.options["gradient_checkpointing"] = saves and checkpoints
    reading.options["activation_offloading"] = bool(offloads)
    norm = config.get("max_grad_norm")
    reading.options["max_grad_norm"] = 1.0 if norm is None else (norm or "none")


def _rows(config: Config, reading: Reading) -> None:
    options, tokens = reading.options, config.get("sequence_len")
    if tokens is None:
        tokens = 512  # schemas/config.py:671
    packs = bool(config.get("sample_packing"))
    options["packing"] = packs
    options["group_by_length"] = bool(config.get("group_by_length")) and not packs
    options["sequence_len"] = tokens
    pads = config.get("pad_to_sequence_len")
    if pads is None:  # schemas/validation.py:233 and :249
        pads = packs or bool(config.get("reward_model"))
    options["pads_to_limit"] = bool(pads) and not packs
    if options["task"] == "sft":  # core/builders/causal.py:386
        multiple = config.get("pad_to_multiple_of") or 64
        options["pad_to_multiple"] = 1 if config.get("pad_to_sequence_len") is False else multiple
    else:
        options["pad_to_multiple"] = config.get("pad_to_multiple_of") or 1


def _batches(config: Config, reading: Reading) -> None:
    micro, whole = config.get("micro_batch_size"), config.get("batch_size")
    accumulation = config.get("gradient_accumulation_steps")
    if accumulation is None and micro and whole:
        accumulation = max(1, whole // micro)
    elif micro is None and accumulation and whole:
        micro = max(1, whole // accumulation)
    length_of(
        reading,
        micro=("micro_batch_size", 1 if micro is None else micro),
        accumulation=("gradient_accumulation_steps", accumulation or 1),
        epochs=("num_epochs", config.get("num_epochs", 1)),
        steps=("max_steps", config.get("max_steps")),
    )


SHAPES: dict[str, tuple[type, ...]] = {
    "adapter": (str, bool),
    "fsdp": (str, list, bool),
    "fsdp_config": (dict,),
    "batch_size": (int, float),
    **dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps"), (int, float)),
    "rl": (str, bool),
    "bnb_config_kwargs": (dict,),
    "lora_dropout": (int, float),
    **dict.fromkeys(("lora_modules_to_save", "lora_target_parameters"), (list,)),
    "lora_target_modules": (str, list),
    "plugins": (list,),
    "unfrozen_parameters": (list,),
    "model_config": (dict,),
    "overrides_of_model_config": (dict,),
    "model_quantization_config_kwargs": (dict,),
}

AXOLOTL = Trainer(
    name="axolotl",
    version="0.19",
    keys=KEYS,
    unknown=assumed("ignored: axolotl 0.19 has no such key"),
    shapes=SHAPES,
    derive=derive,
)
