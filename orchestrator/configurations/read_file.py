"""Reading a configuration's file: its format, and the trainer that it is for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.configurations.configuration import (
    Configuration,
    ConfigurationError,
    configuration_of,
)
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.axolotl import AXOLOTL
from orchestrator.configurations.trainers.llama_factory import LLAMA_FACTORY
from orchestrator.configurations.trainers.trl import TRL

TRAINERS = (AXOLOTL, LLAMA_FACTORY, TRL)
"""Trainers whose configurations are read."""

OTHER_FILES = {
    "compute_environment": "is a configuration of accelerate, which describes machines",
    "provider": "is a configuration of a cloud, which describes machines",
    "export_dir": "merges or exports weights, and trains nothing",
    "dist_config": "trains on several GPUs",
    "peft_config": "is of LLaMA-Factory's version 1, which is not supported",
    "model_class": "is of LLaMA-Factory's version 1, which is not supported",
    "infer_backend": "runs inference, and trains nothing",
}
"""Keys of files that describe no training, and the reason."""


OF_LLAMA_FACTORY = ("stage", "finetuning_type", "template", "cutoff_len", "do_train")
"""Keys that files of LLaMA-Factory have, and files of TRL have not."""


def read_configuration(path: Path) -> Configuration:
    """Read a configuration.

    Raises:
        ConfigurationError: the file cannot be read, or describes no training of a trainer that is
            supported.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigurationError(f"--config {path}: {reason}") from None
    values = _yaml(text, path)
    return configuration_of(trainer_of(values, path), values, str(path))


def _yaml(text: str, path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path}: is not YAML: {reason}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigurationError(f"--config {path}: has no keys: give a trainer's configuration")
    return {str(name): value for name, value in values.items()}


def trainer_of(values: Mapping[str, Any], path: Path | str) -> Trainer:
    """Trainer that a configuration is for, by its keys.

    Raises:
        ConfigurationError: it is for none that is supported, or describes no training.
    """
    for key, reason in OTHER_FILES.items():
        if key in values and "base_model" not in values:
            raise ConfigurationError(f"--config {path}: {reason}: give the trainer's own file")
    if "base_model" in values:
        return AXOLOTL
    if "model_name_or_path" in values:
        return LLAMA_FACTORY if any(key in values for key in OF_LLAMA_FACTORY) else TRL
    raise ConfigurationError(
        f"--config {path}: is of no trainer that is supported: a file of axolotl has base_model, "
        "one of LLaMA-Factory or TRL model_name_or_path"
    )
