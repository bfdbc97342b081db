"""Configurations of DeepSpeed: the stage of ZeRO and its settings; others are refused by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpu_catalog.user_file import json_of
from orchestrator.configurations.configuration import ConfigurationError
from orchestrator.spec.validation_messages import mistake_text, shown
from trials.recipes.parallel import ZERO_STRATEGIES, Strategy
from trials.recipes.zero_settings import OFFLOADS, ZeroSettings, offload_of

LARGEST_BYTES = 2**20
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
WHOLE_BATCH = "train_batch_size"
BATCHES = (MICRO_BATCH, ACCUMULATION, WHOLE_BATCH)
IDLE: tuple[object, ...] = (None, False, "auto", "none", {})
STAGE_3 = "stage3_"
SAVING = ("stage3_gather_16bit_weights_on_model_save", "load_from_fp32_weights")
WEIGHT_DTYPES = ("fp16", "amp", "fp8")
OPTIMIZERS = ("AdamW", "Adam")
OFFLOADING = OFFLOADS["all"]
HOST = "cpu"
OF_AXOLOTL = "deepspeed_configs"
"""Folder of axolotl's own files, which its command fetches."""
KNOWN = frozenset(
    {
        *BATCHES,
        *WEIGHT_DTYPES,
        *("zero_optimization", "bf16", "compile", "optimizer", "scheduler", "gradient_clipping"),
        *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio"),
        *("checkpoint", "nebula", "dataloader_drop_last", "activation_checkpointing"),
        *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
        *("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "timers"),
        *("comms_logger", "comms_config", "flops_profiler", "comment", "_comment"),
    }
)
"""Keys that are read here, or that change neither the memory nor the bytes of a Trainer's step."""
KNOWN_PARTS = {
    "bf16": ("enabled", "check_grad_overflow"),
    "compile": ("disable", "backend"),  # by which accelerate compiles, if it does
}
AS_BY_DEFAULT: Mapping[str, tuple[object, ...]] = {
    "communication_data_type": ("bf16", "bfp16"),
    "data_types": ({"grad_accum_dtype": "bf16"},),
    "sequence_parallel_size": (1,),
}


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """Layout that a configuration of DeepSpeed states.

    Attributes:
        strategy: stage of ZeRO.
        zero: its settings.
        batches: examples and micro-batches by key, where it states a number.
    """

    strategy: Strategy
    zero: ZeroSettings
    batches: Mapping[str, float]


def deepspeed_named(value: object, beside: Path) -> DeepSpeedFile:
    """Layout of the key ``deepspeed`` of a trainer's configuration: a file, or its content.

    Raises:
        ConfigurationError: as for ``read_deepspeed``, or there is no such file.
    """
    if isinstance(value, str):
        return read_deepspeed(find_file(value, beside))
    return deepspeed_of(value, f"{beside}: deepspeed")


def find_file(name: str, beside: Path) -> Path:
    """Path of a file that a configuration names: from here, or from a folder above that.

    Raises:
        ConfigurationError: there is none.
    """
    here = Path(name).expanduser()
    for path in (here, *(folder / here for folder in beside.resolve().parents)):
        if path.is_file():
            return path
    remedy = "copy the trainer's file there"
    if here.parent.name == OF_AXOLOTL:
        remedy += f" (axolotl's by axolotl fetch {OF_AXOLOTL})"
    raise ConfigurationError(
        f"{beside}: deepspeed: {name}: no such file, here or beside the configuration: {remedy}, "
        "or give one by --deepspeed"
    )


def read_deepspeed(path: Path) -> DeepSpeedFile:
    """Read a file of DeepSpeed, in JSON.

    Raises:
        ConfigurationError: it cannot be read, or what it states is not simulated; a line for each.
    """
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:
            raise ConfigurationError(f"{path}: no file of DeepSpeed, or one above 1 MiB")
        content = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read as JSON: {error}") from None
    return deepspeed_of(content, str(path))


def deepspeed_of(content: Any, place: str) -> DeepSpeedFile:
    """Layout of the content of a file of DeepSpeed.

    Args:
        content: the content.
        place: name of its place in messages.

    Raises:
        ConfigurationError: as for ``read_deepspeed``.
    """
    zero = content.get("zero_optimization") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(zero, Mapping):
        raise ConfigurationError(f"{place}: must have zero_optimization, with a stage of 1 to 3")
    problems = [*_problems(content), *_problems_of_zero(zero)]
    fields = {_field(name): value for name, value in zero.items()}
    fields = {name: v for name, v in fields.items() if name in ZeroSettings.model_fields}
    fields["offload"] = offload_of(name for name in OFFLOADING if _is_on(zero.get(name)))
    settings = ZeroSettings()
    try:
        settings = ZeroSettings.model_validate(fields)
    except ValidationError as error:
        # Of a size or "auto" each is reported; the first says more.
        mistakes = {detail["loc"][0]: dict(detail) for detail in reversed(error.errors())}
        problems += [f"{name}: {mistake_text(d, ZeroSettings)}" for name, d in mistakes.items()]
    if problems:
        raise ConfigurationError("\n".join(f"{place}: {problem}" for problem in problems))
    batches = {n: content[n] for n in BATCHES if isinstance(content.get(n), (int, float))}
    return DeepSpeedFile(ZERO_STRATEGIES[zero["stage"] - 1], settings, batches)


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Keys outside ``zero_optimization`` that are not simulated, with a remedy each."""
    for name in WEIGHT_DTYPES:
        if _is_on(content.get(name)):
            yield f"{name}: DeepSpeed is simulated with weights in bf16: set bf16, and disable it"
    if content.get("zero_force_ds_cpu_optimizer", True) is not True:
        yield "zero_force_ds_cpu_optimizer: is simulated with DeepSpeed's AdamW: remove it"
    dtype = content.get("bf16")
    if isinstance(dtype, Mapping) and dtype.get("enabled") is False:
        yield "bf16: DeepSpeed is simulated with weights in bf16: enable it"
    optimizer = content.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if optimizer is not None and kind not in OPTIMIZERS:
        yield f"optimizer: type {shown(kind)} is not simulated with DeepSpeed: use AdamW"
    for name, value in _unknown(content):
        if not _is_idle(value):
            yield f"{name}: {shown(value)} is not simulated: remove it"


def _unknown(content: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Keys outside ``zero_optimization`` that are not known, and their values."""
    for name, value in content.items():
        if name in KNOWN_PARTS and isinstance(value, Mapping):
            parts = KNOWN_PARTS[name]
            yield from ((f"{name}.{part}", v) for part, v in value.items() if part not in parts)
        elif name not in KNOWN and value not in AS_BY_DEFAULT.get(name, ()):
            yield name, value


def _problems_of_zero(zero: Mapping[str, Any]) -> Iterator[str]:
    """Keys of ``zero_optimization`` that are not simulated, with a remedy each."""
    stage = zero.get("stage")
    if type(stage) is not int or stage not in (1, 2, 3):
        yield f"stage: {shown(stage)} is not simulated: use 1 to 3, or DDP without DeepSpeed"
    for name, value in zero.items():
        if name in OFFLOADING:
            yield from _problems_of_offloading(name, value)
            continue
        is_known = _field(name) in (*ZeroSettings.model_fields, *SAVING, "stage")
        if not is_known and value not in IDLE:
            yield f"{name}: {shown(value)} is not simulated: remove it"


def _problems_of_offloading(name: str, value: object) -> Iterator[str]:
    """Settings of a place for the optimizer or the weights that are not simulated, with a remedy.

    Sizes of buffers are those of disks, which are not simulated.
    """
    if not _is_on(value):
        return
    settings = value if isinstance(value, Mapping) else {}
    device = settings.get("device")
    if device != HOST:
        yield f"{name}: device {shown(device)} is not simulated: use cpu"
    if settings.get("pin_memory", True) is not True:
        yield f"{name}: is simulated with pinned memory: set pin_memory to true"
    if settings.get("ratio", 1) != 1:
        yield f"{name}: ratio {shown(settings['ratio'])} is not simulated: remove it"
    if settings.get("super_offload", False) is not False:
        yield f"{name}: super_offload is not simulated: remove it"


def _is_on(value: object) -> bool:
    """Whether a part of the file turns something on."""
    if not isinstance(value, Mapping):
        return value not in IDLE
    switch = "enabled" if "enabled" in value else "device"
    return value.get(switch) not in IDLE


def _is_idle(value: object) -> bool:
    """Whether a value turns nothing on, nor does any value in it."""
    if not isinstance(value, Mapping):
        return value in IDLE
    parts = [value["enabled"]] if "enabled" in value else value.values()
    return all(map(_is_idle, parts))


def _field(name: str) -> str:
    """Name of a setting with the prefix of stage 3, which DeepSpeed also takes without."""
    prefixed = STAGE_3 + name
    return prefixed if prefixed in (*ZeroSettings.model_fields, *SAVING) else name
