"""Layouts of several GPUs in configurations: FSDP2 and DDP; others are refused by name."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.configurations.configuration import Configuration, ConfigurationError
from orchestrator.configurations.estimate_options import as_recipe
from orchestrator.configurations.key_classes import ABSENT, OFF, Config, Reading, is_idle, shown
from orchestrator.configurations.layouts.deepspeed import (
    ACCUMULATION,
    MICRO_BATCH,
    WHOLE_BATCH,
    DeepSpeedFile,
    deepspeed_named,
)
from trials.recipes.fields import REENTRANT
from trials.recipes.layout_support import simulates_optimizer
from trials.recipes.parallel import ZERO_STRATEGIES

OFFLOAD = "offload"
WORDS = ("full_shard", "auto_wrap", OFFLOAD, True)
"""Words of ``fsdp``: those that mean what FSDP2 does by default, that of shards on the host, and
true, which transformers 5 also takes."""
OFFLOADING = ("cpu_offload", "offload_params")
"""Names of shards on the host in ``fsdp_config``: transformers', and accelerate's."""
IDLE_COUNTS = (None, False, 0, 1)
REDUCTION = "accelerator_config"
OF_REDUCTION = "gradient_accumulation_kwargs"
EACH_BATCH = {"sync_each_batch": True}
"""Reduction of gradients after every micro-batch, in accelerate's words; so shards are simulated.

Otherwise its ``no_sync`` keeps whole gradients on every GPU until the last micro-batch of a step.
"""
LAYOUT_KEYS = (
    *("deepspeed", "fsdp", "fsdp_config", "ddp"),
    *("dp_shard_size", "dp_replicate_size"),
)


def mark_idle(config: Config, reading: Reading) -> None:
    """Say of keys that turn nothing on that they are off."""
    for name in LAYOUT_KEYS:
        if name in config and is_idle(config[name], (*OFF, 1)):
            reading.mark(name, config[name], "irrelevant", "off")
    if "fsdp_version" in config and not (config.get("fsdp") or config.get("fsdp_config")):
        reading.mark("fsdp_version", config["fsdp_version"], "irrelevant", "read only with fsdp")
    if REDUCTION in config:
        reading.mark(REDUCTION, config[REDUCTION], "irrelevant", "read only with fsdp")


def read_shards(  # noqa: PLR0913 - a configuration of FSDP and its place
    config: Config,
    reading: Reading,
    *,
    key: str,
    settings: Mapping[str, Any],
    version: object,
    offloading: Collection[str] = OFFLOADING,
) -> None:
    """Read a configuration of FSDP.

    Args:
        config: the configuration.
        reading: what was read of it so far.
        key: key that turns sharding on.
        settings: its ``fsdp_config``.
        version: version of FSDP.
        offloading: those names of shards on the host that the trainer reads.
    """
    settings = {str(name).removeprefix("fsdp_"): item for name, item in settings.items()}
    value = config[key]
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    words = words if isinstance(words, list) else []
    problem = next(_problems(words, settings, str(version), offloading), None)
    if problem is not None:
        reading.refuse(key, value, problem)
        return
    reading.options["strategy"] = "fsdp2"
    is_on_host = OFFLOAD in words or any(settings.get(name) for name in offloading)
    reading.options["shards_on_host"] = is_on_host
    text = "strategy fsdp2, offload all" if is_on_host else "strategy fsdp2"
    reading.mark(key, value, "used", text)
    if settings.get("activation_checkpointing"):
        reading.options["gradient_checkpointing"] = True
    _read_reduction(config, reading)


def _read_reduction(config: Config, reading: Reading) -> None:
    """Read whether shards reduce gradients after every micro-batch; so they are simulated."""
    value = config.get(REDUCTION)
    if reduces_each_batch(value):
        reading.mark(REDUCTION, value, "used", "gradients are reduced after every micro-batch")
    elif config.get("gradient_accumulation_steps") not in (None, 1):
        assumption = "sync_each_batch: true; without it whole gradients stay on each GPU"
        value = ABSENT if value is None else value
        reading.mark(REDUCTION, value, "assumed", f"{OF_REDUCTION}.{assumption}")


def reduces_each_batch(value: object) -> bool:
    """Whether gradients are reduced after every micro-batch by a value of ``REDUCTION``."""
    settings = value.get(OF_REDUCTION) if isinstance(value, Mapping) else None
    return isinstance(settings, Mapping) and settings.get("sync_each_batch") is True


def read_deepspeed_key(config: Config, reading: Reading) -> bool:
    """Read the key of DeepSpeed, if it turns it on; its file is read with the number of GPUs."""
    value = config.get("deepspeed")
    if is_idle(value, OFF):
        return False
    others = [name for name in LAYOUT_KEYS[1:] if not is_idle(config.get(name), (*OFF, 1))]
    if not isinstance(value, (str, Mapping)):
        reading.refuse("deepspeed", value, "must be a file of DeepSpeed, or its content")
    for name in others:
        reading.refuse(name, config[name], "excludes deepspeed: remove one of them")
    reading.options["deepspeed"] = value
    reading.mark("deepspeed", value, "used", "strategy")
    return True


def _problems(
    words: list[Any], settings: Mapping[str, Any], version: str, offloading: Collection[str]
) -> Iterator[str]:
    if version != "2":
        yield "trains on several GPUs by FSDP1, which is not simulated: set fsdp_version: 2"
    others = [word for word in words if word not in WORDS]
    if others:
        yield f"{shown(others)} on several GPUs is not simulated: use full_shard and auto_wrap"
    if any(settings.get(name) for name in set(OFFLOADING) - set(offloading)):
        yield "leaves shards of several GPUs to the host by cpu_offload alone: use that"
    if settings.get("reshard_after_forward") not in (None, True, "FULL_SHARD", "full_shard"):
        yield "only full shards on several GPUs are simulated: set reshard_after_forward: true"
    if settings.get("auto_wrap_policy") not in (None, "TRANSFORMER_BASED_WRAP"):
        yield "several GPUs gather layer by layer: set auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    if settings.get("mixed_precision_policy") not in (None, "bf16", "bfloat16"):
        yield "only bf16 on several GPUs is simulated: set mixed_precision_policy: bf16"


def read_training_arguments(config: Config, reading: Reading) -> None:
    """Read FSDP of transformers' ``TrainingArguments``, whose version is 2 by default."""
    mark_idle(config, reading)
    if read_deepspeed_key(config, reading):
        return
    settings = config.get("fsdp_config") or {}
    if config.get("fsdp"):
        version = settings.get("version", settings.get("fsdp_version", 2))
        read_shards(
            config,
            reading,
            key="fsdp",
            settings=settings,
            version=version,
            offloading=OFFLOADING[:1],  # training_args.py:2830
        )
    elif settings:
        reading.mark("fsdp_config", settings, "irrelevant", "read only with fsdp")


def read_axolotl(config: Config, reading: Reading) -> None:
    """Read the layout of a configuration of axolotl, whose FSDP has version 1 by default."""
    mark_idle(config, reading)
    if read_deepspeed_key(config, reading):
        return
    settings = config.get("fsdp_config") or {}
    shards, replicas = config.get("dp_shard_size"), config.get("dp_replicate_size")
    key = next((name for name in ("fsdp", "fsdp_config") if config.get(name)), None)
    if key is None:
        if config.get("ddp"):
            reading.options["strategy"] = "ddp"
        read_number(reading, "dp_replicate_size", replicas, "ddp")
        if shards not in IDLE_COUNTS:
            text = "trains on several GPUs only with fsdp_config: add it, with fsdp_version: 2"
            reading.refuse("dp_shard_size", shards, text)
        return
    # schemas/validation.py:922
    stated = settings.get("fsdp_version") or settings.get("version") or 1
    version = config.get("fsdp_version") or stated
    read_shards(config, reading, key=key, settings=settings, version=version)
    read_number(reading, "dp_shard_size", shards, "fsdp2")
    if replicas not in IDLE_COUNTS:
        text = "replicas of shards on several GPUs are not read: set 1, and give --nodes"
        reading.refuse("dp_replicate_size", replicas, text)


def read_number(reading: Reading, key: str, value: object, strategy: str) -> None:
    """Read the number of GPUs of a strategy; 1 and off mean nothing."""
    if value in (None, False, 0, 1):
        return
    if type(value) is not int:
        reading.refuse(key, value, "must be a whole number")
        return
    reading.options |= {"strategy": strategy, "gpus": value}
    reading.mark(key, value, "used", f"gpus {value}, strategy {strategy}")


def on_several_gpus(
    configuration: Configuration,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    counts: Collection[int],
) -> Mapping[str, Any]:
    """Options of an estimate on so many GPUs, each with the micro-batches of the file.

    A file that shards nothing trains by DDP there, as its trainer does. The effective batch is that
    of all GPUs.

    Args:
        configuration: the configuration.
        options: options of the estimate.
        given: options of the command line.
        counts: numbers of GPUs that train together.

    Returns:
        The options themselves for one GPU.

    Raises:
        ConfigurationError: the file trains on several GPUs, and their number is missing; or there
            are several numbers; or its file of DeepSpeed states other batches; or its optimizer is
            not simulated with the layout.
    """
    file = configuration.file
    layout = layout_of(configuration, given)
    stated = layout.get("strategy")
    zero = layout.get("zero")
    if max(counts) == 1 and (zero is None or zero.offload is None):
        if stated is None:
            return options
        raise ConfigurationError(
            f"{file}: trains on several GPUs by {stated}: give their number, as --gpu 8xH100-SXM, "
            "or --gpus 8"
        )
    changed = dict(options) | {"strategy": "ddp"} | layout
    if changed.get("gradient_checkpointing") == REENTRANT:
        changed["gradient_checkpointing"] = True
    changed |= precision_of(configuration, changed)
    if 1 not in counts or zero is not None:
        _check_optimizer(configuration, changed, given)
    if any(given.get(name) for name in ("effective_batch", "gradient_accumulation")):
        return changed
    if len(counts) > 1:
        numbers = ", ".join(map(str, sorted(counts)))
        raise ConfigurationError(
            f"{file}: its effective batch grows with the number of GPUs, which are {numbers}: give "
            f"one, as --gpus {max(counts)}, or --effective-batch N to compare them"
        )
    (ranks,) = counts
    if "zero" in layout:
        _check_batches(configuration, ranks)
    if changed["strategy"] == "tp":  # the GPUs of a group train on one batch
        degree = given.get("degree")
        ranks = (given.get("nodes") or 1) if degree is None else ranks // degree
    changed["effective_batch"] = options["effective_batch"] * ranks
    return changed


def _check_optimizer(
    configuration: Configuration, options: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Check that the file's optimizer is simulated with the strategy among the options.

    Raises:
        ConfigurationError: it is not; with a value of the trainer that is.
    """
    optimizer, strategy = options.get("optimizer"), options["strategy"]
    if given.get("optimizer") or not optimizer or simulates_optimizer(optimizer, strategy):
        return
    stated = {line.key: line.value for line in configuration.lines}
    key = next(name for name in ("optimizer", "optim") if name in stated)
    raise ConfigurationError(
        f"{configuration.file}: {key}: {shown(stated[key])}: not simulated with {strategy}: set "
        "adamw_torch_fused there, or add --optimizer adamw"
    )


def layout_of(configuration: Configuration, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the layout that the command line states, or else the file.

    Raises:
        ConfigurationError: its file of DeepSpeed cannot be read, or is not simulated.
    """
    if given.get("strategy") is not None:
        return {"strategy": given["strategy"]}
    if "deepspeed" in configuration.options:
        engine = _engine(configuration)
        return {"strategy": engine.strategy, "zero": engine.zero}
    stated = configuration.options.get("strategy")
    if configuration.options.get("shards_on_host") and given.get("offload") is None:
        return {"strategy": stated, "offload": "all"}
    return {} if stated is None else {"strategy": stated}


def _engine(configuration: Configuration) -> DeepSpeedFile:
    return deepspeed_named(configuration.options["deepspeed"], Path(configuration.file))


def _check_batches(configuration: Configuration, ranks: int) -> None:
    """Check that numbers in a file of DeepSpeed are those of the configuration, as trainers do.

    Raises:
        ConfigurationError: some are others; a line for each.
    """
    micro_batch, effective_batch = (
        configuration.options[name] for name in ("batch_size", "effective_batch")
    )
    own = {
        MICRO_BATCH: micro_batch,
        ACCUMULATION: effective_batch // micro_batch,
        WHOLE_BATCH: effective_batch * ranks,
    }
    others = {name: n for name, n in _engine(configuration).batches.items() if n != own[name]}
    if others:
        raise ConfigurationError(
            "\n".join(
                f"{configuration.file}: deepspeed: {name}: {shown(value)} where the configuration "
                f'comes to {own[name]}, which stops the trainer: set it to "auto"'
                for name, value in others.items()
            )
        )


def precision_of(configuration: Configuration, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the precision that the strategy among these options changes.

    DeepSpeed casts all weights to the dtype of the products. Not under autocast: accelerate leaves
    the precision to DeepSpeed.
    """
    if options["strategy"] in ZERO_STRATEGIES:
        precision = options.get("precision") or as_recipe(configuration).precision
        has_bf16 = precision in {"bf16", "bf16-mixed", "fp32-mixed-load"}
        return {"precision": "bf16", "adapter_dtype": None} if has_bf16 else {}
    is_mixed = options["strategy"] == "fsdp2" and _is_cast_up(configuration)
    return {"precision": "bf16-mixed"} if is_mixed else {}


def _is_cast_up(configuration: Configuration) -> bool:
    """Whether accelerate casts trained weights in bf16 up to fp32, as it does under autocast.

    Source: ``fsdp2_prepare_model`` of accelerate 1.15; axolotl's own does not.
    """
    options = configuration.options
    values = {line.key: line.value for line in configuration.lines}
    return (
        configuration.trainer.startswith("TRL")
        and options.get("method") == "full"
        and options.get("precision") == "bf16"
        and values.get("bf16", True) is not False
    )
