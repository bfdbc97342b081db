"""Configurations of LLaMA-Factory 0.9, in YAML."""

from orchestrator.configurations.key_classes import (
    ABSENT,
    Config,
    Reading,
    refused,
)
from orchestrator.configurations.layouts.several_gpus import read_training_arguments
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.llama_factory_keys import KEYS
from orchestrator.configurations.trainers.lora_targets import names_of, targets_of
from orchestrator.configurations.trainers.optimizers import optimizer_of
from orchestrator.configurations.trainers.training_length import length_of, set_aside
from orchestrator.configurations.trainers.transformers_keys import check_types
from trials.recipes.fields import REENTRANT

ATTENTION = {"auto": "sdpa", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
STAGES = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
REFUSED_STAGES = {"ppo": "generates, which is not simulated"}
PREFERENCE_LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo")
WITHOUT_REFERENCE = ("orpo", "simpo")  # hparams/finetuning_args.py:574


def derive(config: Config, reading: Reading) -> None:
    """Add the options that keys set together, and LLaMA-Factory's defaults."""
    options = reading.options
    stage = config.get("stage", "sft")
    if stage not in STAGES:
        reading.refuse("stage", stage, REFUSED_STAGES.get(stage, "is no stage of LLaMA-Factory"))
    if not config.get("do_train"):
        reading.refuse("do_train", config.get("do_train", False), "without it trains nothing")
    options |= {"defaults": "plain", "task": STAGES.get(stage, "sft"), "router_loss": False}
    if config.get("moe_aux_loss_coef"):
        options["router_loss"] = True
    _method(config, reading)
    _precision(config, reading)
    is_liger = bool(config.get("enable_liger_kernel"))
    options["liger_kernels"] = is_liger
    options["loss"] = "liger" if is_liger and options["task"] == "sft" else "full-logits"
    _weighted_loss(config, reading)
    _preference(config, reading)
    # model/model_utils/checkpointing.py:162
    is_reentrant = config.get("use_reentrant_gc", True)  # hparams/model_args.py:149
    saves = not config.get("disable_gradient_checkpointing")
    options["gradient_checkpointing"] = saves and (REENTRANT if is_reentrant else True)
    options["activation_offloading"] = False
    read_training_arguments(config, reading)
    norm = config.get("max_grad_norm", 1.0)
    options["max_grad_norm"] = norm or "none"
    _optimizer(config, reading)
    _attention(config, reading)
    options["sequence_len"] = config.get("cutoff_len", 2048)  # hparams/data_args.py:46
    options["pad_to_multiple"] = 8  # of every collator, as train/sft/workflow.py
    _packing(config, reading, is_pretraining=stage == "pt")
    length_of(
        reading,
        micro=("per_device_train_batch_size", config.get("per_device_train_batch_size", 8)),
        accumulation=("gradient_accumulation_steps", config.get("gradient_accumulation_steps", 1)),
        epochs=("num_train_epochs", config.get("num_train_epochs", 3)),
        steps=("max_steps", config.get("max_steps")),
    )
    set_aside(reading, config.get("val_size"))  # data/data_utils.py:109


def _attention(config: Config, reading: Reading) -> None:
    kernel = config.get("flash_attn", "auto")
    reading.options["attention"] = ATTENTION.get(str(kernel), "flash_attention_2")
    if kernel == "fa3":
        text = "flash_attention_2, which holds as little in memory; its speed differs"
        reading.mark("flash_attn", kernel, "assumed", text)
    elif kernel not in ATTENTION:
        reading.refuse("flash_attn", kernel, f"must be one of {', '.join(ATTENTION)}, fa3")


def _weighted_loss(config: Config, reading: Reading) -> None:
    """Loss in place of the model's own (train/sft/trainer.py:107), of which the first counts."""
    keys = [name for name in ("use_dft_loss", "use_eaft_loss") if config.get(name)]
    if reading.options["task"] != "sft" or config.get("stage") == "pt":
        for name in keys:
            reading.mark(name, config[name], "irrelevant", "read only in the stage sft")
    elif keys:
        reading.options["loss"] = keys[0].removeprefix("use_").removesuffix("_loss")


def _optimizer(config: Config, reading: Reading) -> None:
    """Optimizer in place of transformers' (train/trainer_utils.py:528)."""
    if config.get("use_muon") and config.get("loraplus_lr_ratio") is None:
        reading.options["optimizer"] = "muon"
        if "optim" in config:
            reading.mark("optim", config["optim"], "irrelevant", "use_muon replaces it")
    else:
        optimizer_of(config, "optim", reading)


def _preference(config: Config, reading: Reading) -> None:
    """Reference and dropout of LLaMA-Factory's own trainers, which take the logits of all tokens.

    Without a reference its losses are that of DPO with given log-probabilities, but for sums over
    a few numbers of each pair.
    """
    options = reading.options
    if options["task"] == "sft":
        return
    if options["task"] == "reward":
        if config.get("lora_dropout"):
            text = "not simulated in stage rm: use 0"
            reading.refuse("lora_dropout", config["lora_dropout"], text)
        return
    loss = config.get("pref_loss", "sigmoid")
    if loss not in PREFERENCE_LOSSES:
        reading.refuse("pref_loss", loss, f"must be one of {', '.join(PREFERENCE_LOSSES)}")
    elif options["task"] == "dpo" and loss in WITHOUT_REFERENCE:
        options["reference"] = "precomputed"
        reading.mark("pref_loss", loss, "used", "no reference: costs as reference precomputed")
    elif options.get("method") == "full" and not config.get("pure_bf16"):
        text = "loads the reference in bf16 beside fp32 weights, not simulated: use pure_bf16: true"
        reading.refuse("stage", config["stage"], text)
    if config.get("lora_dropout"):
        reading.mark(
            "lora_dropout", config["lora_dropout"], "irrelevant", "the trainer disables it"
        )
    if options.get("lora_dropout") is not None:
        options["lora_dropout"] = 0.0


def _method(config: Config, reading: Reading) -> None:
    options, kind = reading.options, config.get("finetuning_type", "lora")
    bits = config.get("quantization_bit")
    if kind in ("full", "freeze"):
        options["method"] = "full"
        if bits:
            reading.refuse("quantization_bit", bits, "LLaMA-Factory quantises only with lora")
        if kind == "freeze":
            _freeze(config, reading)
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora"):
            options.pop({"use_dora": "dora"}.get(name, name), None)
        return
    if kind not in ("lora", "oft"):
        reading.refuse("finetuning_type", kind, "must be one of lora, oft, freeze, full")
        return
    if config.get("use_llama_pro"):
        text = "adapters on some layers alone are not simulated: use finetuning_type: freeze"
        reading.refuse("use_llama_pro", config["use_llama_pro"], text)
    options["method"] = "qlora" if bits else "lora"
    if bits:
        _quantisation(config, reading)
    (_rotations if kind == "oft" else _rank)(config, reading)
    target = config.get("lora_target", "all")
    if target in ("all", ["all"]):
        options["lora_targets"] = ("all-linear",)
    else:
        names = names_of(target)
        options["lora_targets"] = targets_of({"lora_target": names}, "lora_target", reading)
    if config.get("additional_target"):
        options["modules_to_save"] = tuple(names_of(config["additional_target"]))


def _freeze(config: Config, reading: Reading) -> None:
    """Layers that freeze tuning trains."""
    options = reading.options
    options["trained_layers"] = config.get("freeze_trainable_layers", 2)
    options["spread_layers"] = bool(config.get("use_llama_pro"))
    modules = config.get("freeze_trainable_modules", "all")
    if modules != "all":
        reading.refuse("freeze_trainable_modules", modules, "not simulated: use all")
    if not (config.get("bf16") or config.get("fp16") or config.get("pure_bf16")):
        text = "bf16 weights beside trained ones in fp32 need autocast: use bf16: true"
        reading.refuse("bf16", config.get("bf16", ABSENT), text)


def _rank(config: Config, reading: Reading) -> None:
    options, rank = reading.options, config.get("lora_rank", 8)  # hparams/finetuning_args.py:77
    options["lora_rank"] = rank
    alpha = config.get("lora_alpha")
    options["lora_alpha"] = 2 * rank if alpha is None and isinstance(rank, int) else alpha
    options["lora_dropout"] = float(config.get("lora_dropout") or 0)


def _rotations(config: Config, reading: Reading) -> None:
    """Options of OFT, whose layers LLaMA-Factory 0.9 takes from lora_target (model/adapter.py)."""
    reading.options["oft_block_size"] = config.get("oft_block_size", 32)
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "use_dora"):
        reading.options.pop({"use_dora": "dora"}.get(name, name), None)
        if name in config:
            reading.mark(name, config[name], "irrelevant", "of LoRA, which oft replaces")
    for name in ("oft_rank", "module_dropout"):
        if config.get(name):
            reading.refuse(name, config[name], "not simulated: leave it out")
    if config.get("oft_target", "all") != "all":
        text = "ignored: LLaMA-Factory 0.9 takes the layers from lora_target"
        reading.mark("oft_target", config["oft_target"], "assumed", text)


def _quantisation(config: Config, reading: Reading) -> None:
    options, bits = reading.options, config["quantization_bit"]
    method = config.get("quantization_method", "bnb")
    if bits not in (4, 8):
        reading.refuse("quantization_bit", bits, "4 and 8 are simulated")
    options["quantisation"] = "int8" if bits == 8 else config.get("quantization_type", "nf4")
    if options["quantisation"] != "int8":
        options["double_quantisation"] = config.get("double_quantization", True)
    options["kbit_preparation"] = False
    if method == "hqq" and bits == 4:
        # 16-bit scale and zero of 64 weights (model/model_utils/quantization.py:200)
        options |= {"quantisation": "nf4", "double_quantisation": False}
        text = "NF4, as large and dequantised for each product"
        reading.mark("quantization_method", method, "assumed", text)
    elif method not in ("bnb", "bitsandbytes"):
        reading.refuse("quantization_method", method, "not simulated: use bnb, or hqq with 4 bits")


def _precision(config: Config, reading: Reading) -> None:
    """Dtypes: trained weights are cast to fp32 (model/adapter.py:313), except by pure_bf16.

    Without bf16 and fp16 there is no autocast; frozen weights then have the dtype of the model.
    PEFT makes adapters fp32 at any setting.
    """
    options, is_full = reading.options, reading.options.get("method") == "full"
    check_types(config, reading)
    if config.get("pure_bf16"):
        options["precision"] = "bf16"
        if config.get("fp16"):
            reading.refuse(
                "fp16", config["fp16"], "with pure_bf16 not simulated: remove one of them"
            )
        if config.get("bf16"):
            text = "no autocast: weights are in bf16 already, by pure_bf16"
            reading.mark("bf16", config["bf16"], "assumed", text)
    elif config.get("bf16"):
        options["precision"] = "bf16-mixed"
    elif config.get("fp16"):
        options["precision"] = "fp16"
    elif is_full:
        options["precision"] = "fp32"
    else:
        options["precision"] = "bf16"
        text = "weights in bf16, as most models have them, and no autocast: bf16 is not set"
        reading.mark("bf16", config.get("bf16", ABSENT), "assumed", text)
    if not is_full and options["precision"] == "bf16":
        options["adapter_dtype"] = "fp32"


def _packing(config: Config, reading: Reading, *, is_pretraining: bool) -> None:
    """Rows of several examples: documents one after the other, or whole examples.

    Without neat_packing attention crosses them (data/processor/pretrain.py and supervised.py).
    """
    packs = config.get("packing")
    neat = bool(config.get("neat_packing"))
    if reading.options["task"] != "sft":
        if neat:
            reading.refuse(
                "neat_packing", neat, "LLaMA-Factory packs only in the stages sft and pt"
            )
        return
    reading.options["packing"] = neat
    if not neat and (is_pretraining if packs is None else packs):
        reading.options["padding"] = "packed" if is_pretraining else "best-fit"
        text = "rows of cutoff_len tokens, in which attention crosses examples"
        reading.assume("packing", f"{text}; without data, an example is a row")


LLAMA_FACTORY = Trainer(
    name="LLaMA-Factory",
    version="0.9",
    keys=KEYS,
    unknown=refused("LLaMA-Factory 0.9 has no such key, and refuses it", idle=()),
    shapes={
        "fsdp": (str, list, bool),
        "fsdp_config": (dict,),
        "lora_dropout": (int, float),
        "max_grad_norm": (int, float),
        "additional_target": (str, list),
        "lora_target": (str, list),
        "flash_attn": (str,),
        "stage": (str,),
        "finetuning_type": (str,),
        "quantization_bit": (int,),
        "quantization_method": (str,),
        "pref_loss": (str,),
        "lora_alpha": (int,),
    },
    derive=derive,
)
