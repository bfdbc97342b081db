"""Reading a configuration's file: its format, and the trainer that it is for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.configurations.axolotl import AXOLOTL
from orchestrator.configurations.configuration import (
    Configuration,
    ConfigurationError,
    configuration_of,
)
from orchestrator.configurations.trainer import Trainer

TRAINERS = (AXOLOTL,)
"""Trainers whose configurations are read."""

OTHER_FILES = {
    "compute_environment": "is a configuration of accelerate, which describes machines",
    "provider": "is a configuration of a cloud, which describes machines",
    "export_dir": "merges or exports weights, and trains nothing",
    "infer_backend": "runs inference, and trains nothing",
}
"""Keys of files that describe no training, and the reason."""


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
    return configuration_of(_trainer(values, path), values, str(path))


def _yaml(text: str, path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path}: is not YAML: {reason}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigurationError(f"--config {path}: has no keys: give a trainer's configuration")
    return {str(name): value for name, value in values.items()}


def _trainer(values: Mapping[str, Any], path: Path) -> Trainer:
    for key, reason in OTHER_FILES.items():
        if key in values and "base_model" not in values:
            raise ConfigurationError(f"--config {path}: {reason}: give the trainer's own file")
    if "base_model" in values:
        return AXOLOTL
    raise ConfigurationError(
        f"--config {path}: is of no trainer that is supported: a file of axolotl has base_model"
    )
