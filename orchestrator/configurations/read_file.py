"""Reading a configuration's file: its format, and the trainer that it is for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_catalog.user_file import text_of
from orchestrator.configurations.configuration import (
    Configuration,
    ConfigurationError,
    configuration_of,
)
from orchestrator.configurations.python_file import PythonFileError, python_configuration
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.axolotl import AXOLOTL
from orchestrator.configurations.trainers.llama_factory import LLAMA_FACTORY
from orchestrator.configurations.trainers.trl import TRL, TRL_IN_PYTHON
from orchestrator.spec.yaml_lines import read_yaml
from trials.recipes.parallel import ZERO_STRATEGIES
from trials.recipes.zero_settings import OFFLOADS, offload_of

TRAINERS = (AXOLOTL, LLAMA_FACTORY, TRL)
"""Trainers whose configurations are read."""

OTHER_FILES = {
    "compute_environment": "is a configuration of accelerate, which describes machines",
    "provider": "is a configuration of a cloud, which describes machines",
    "export_dir": "merges or exports weights, and trains nothing",
    "infer_backend": "runs inference, and trains nothing",
}
"""Keys of files that describe no training, and the reason."""


OF_VERSION_1 = ("model_class", "dist_config", "peft_config", "kernel_config", "quant_config")
"""Keys that stand beside ``model`` in files of LLaMA-Factory's version 1."""

FEWEST_GPUS, FSDP2 = 2, 2
OTHER_AXES = ("dp_replicate_size", "tp_size", "cp_size", "sp_size")
"""Sizes of accelerate's mesh that are 1 under FSDP2, ZeRO and DDP alone."""

OF_LLAMA_FACTORY = ("stage", "finetuning_type", "template", "cutoff_len", "do_train")
"""Keys that files of LLaMA-Factory have, and files of TRL have not."""


def read_configuration(path: Path) -> Configuration:
    """Read a configuration.

    Raises:
        ConfigurationError: the file cannot be read, or describes no training of a trainer that is
            supported.
    """
    text = text_of(path.expanduser(), lambda line: ConfigurationError(f"--config {line}"))
    return read_configuration_text(text, path)


def read_configuration_text(text: str, path: Path) -> Configuration:
    """Configuration from its text; the path gives its format, and its name in messages.

    Raises:
        ConfigurationError: as for ``read_configuration``.
    """
    if path.suffix == ".py":
        return configuration_of(TRL_IN_PYTHON, _python(text, path), str(path), TRAINERS)
    values = _yaml(text, path)
    return configuration_of(trainer_of(values, path), values, str(path), TRAINERS)


def _python(text: str, path: Path) -> Mapping[str, Any]:
    try:
        return python_configuration(text)
    except PythonFileError as error:
        raise ConfigurationError(f"--config {path}: {error}") from None


def _yaml(text: str, path: Path) -> Mapping[str, Any]:
    read = read_yaml(text)
    if read.problems:
        lines = (f"--config {path}:{problem.line}: {problem.text}" for problem in read.problems)
        raise ConfigurationError("\n".join(lines))
    if not isinstance(read.data, dict) or not read.data:
        raise ConfigurationError(f"--config {path}: has no keys: give a trainer's configuration")
    return read.data


def _layout_options(values: Mapping[str, Any]) -> str:
    """Options that say what a configuration of accelerate does, where it is simulated."""
    number, machines = values.get("num_processes"), values.get("num_machines", 1)
    strategy = _strategy(values)
    if type(number) is not int or number < FEWEST_GPUS or strategy is None:
        return ""
    nodes = f" --nodes {machines}" if type(machines) is int and machines > 1 else ""
    return f", with --gpus {number} --strategy {strategy}{nodes}"


def _strategy(values: Mapping[str, Any]) -> str | None:
    """Strategy of a configuration of accelerate, with its options; None if not simulated."""
    kind = values.get("distributed_type")
    axes = _section(values, "parallelism_config")
    if any(axes.get(f"parallelism_config_{name}", 1) != 1 for name in OTHER_AXES):
        return None
    if kind == "MULTI_GPU":
        return "ddp"
    settings = _section(values, f"{str(kind).lower()}_config")
    if kind == "DEEPSPEED":
        strategy = f"deepspeed-zero{settings.get('zero_stage')}"
        offload = _offload(settings)
        is_simulated = strategy in ZERO_STRATEGIES and offload is not None
        return f"{strategy}{offload}" if is_simulated else None
    if settings.get("fsdp_version") != FSDP2:
        return None
    return "fsdp2 --offload all" if settings.get("fsdp_offload_params") else "fsdp2"


def _offload(settings: Mapping[str, Any]) -> str | None:
    """Option that says what DeepSpeed keeps on the host by accelerate; None if not simulated."""
    devices = {name: settings.get(f"{name}_device") or "none" for name in OFFLOADS["all"]}
    if not set(devices.values()) <= {"none", "cpu"}:
        return None
    offload = offload_of(name for name, device in devices.items() if device == "cpu")
    return "" if offload is None else f" --offload {offload}"


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def trainer_of(values: Mapping[str, Any], path: Path | str) -> Trainer:
    """Trainer that a configuration is for, by its keys.

    Raises:
        ConfigurationError: it is for none that is supported, or describes no training.
    """
    parts = [values, *(part for part in values.values() if isinstance(part, dict))]
    for key, reason in OTHER_FILES.items():
        if "base_model" not in values and any(key in part for part in parts):
            hint = _layout_options(values)
            raise ConfigurationError(
                f"--config {path}: {reason}: give the trainer's own file{hint}"
            )
    if "model" in values and any(key in values for key in OF_VERSION_1):
        several = " on several GPUs" if values.get("dist_config") else ""
        raise ConfigurationError(
            f"--config {path}: is of LLaMA-Factory's version 1, whose own training loop{several} "
            "is not simulated: give a file of version 0, with model_name_or_path and stage"
        )
    if "base_model" in values:
        return AXOLOTL
    if "model_name_or_path" in values:
        return LLAMA_FACTORY if any(key in values for key in OF_LLAMA_FACTORY) else TRL
    raise ConfigurationError(
        f"--config {path}: is of no trainer that is supported: a file of axolotl has base_model, "
        "one of LLaMA-Factory or TRL model_name_or_path"
    )
