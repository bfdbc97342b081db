"""Cells of a specification that name a trainer's configuration: ``cells: [{config: FILE}]``."""

import logging
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from orchestrator.configurations.configuration import Configuration, ConfigurationError
from orchestrator.configurations.estimate_options import as_recipe
from orchestrator.configurations.key_classes import Line
from orchestrator.configurations.local_data import KEYS as DATA
from orchestrator.configurations.read_file import read_configuration
from orchestrator.spec.spec_file import SpecError, named_spec_text
from orchestrator.spec.trainer_defaults import trl_defaults

logger = logging.getLogger(__name__)

CONFIG = "config"
OF_THE_WORKLOAD = frozenset(
    {"batch_size", "epochs", "examples", "group_by_length", "long_examples", "set_aside"}
)
"""Options of a configuration that a specification states for all cells, or measures."""


def spec_text(name: Path | None) -> tuple[str, str]:
    """Text of a specification without references to configurations, and its name for messages.

    In place of ``config`` a block has the models, recipes and lengths of the file, as a merged
    mapping on the same line, so that keys beside it go first and lines keep their numbers. A log
    message has the class of each key.

    Args:
        name: a file, or a shipped sweep; None for the default sweep.

    Raises:
        SpecError: the specification or a configuration cannot be read, or a key is refused; a line
            for each.
    """
    text, shown = named_spec_text(name)
    return (text if name is None else with_cells(text, shown, name.parent)), shown


def with_cells(text: str, name: str, folder: Path) -> str:
    """Text of a specification with the cells of its configurations written out.

    Args:
        text: the specification.
        name: its name for messages.
        folder: folder that the names of configurations are relative to.

    Raises:
        SpecError: as for ``spec_text``.
    """
    if CONFIG not in text:
        return text
    mistakes: list[str] = []
    parts, last = [], 0
    for index, key, value in _references(text):
        place = f"{name}:{key.start_mark.line + 1}: cells[{index}].{CONFIG}"
        try:
            block = _block(_named(value, key), folder, place)
        except ConfigurationError as error:
            lines = (line.removeprefix("--config ") for line in str(error).splitlines())
            mistakes += [f"{place}: {line}" for line in lines]
            continue
        merged = yaml.safe_dump(
            block, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True
        )
        parts += [text[last : key.start_mark.index], f"<<: {merged.strip()}"]
        last = value.end_mark.index
    if mistakes:
        raise SpecError("\n".join(mistakes))
    return "".join([*parts, text[last:]])


def _references(text: str) -> list[tuple[int, yaml.Node, yaml.Node]]:
    """Index of each block with a configuration, its key and its value, in the order of the file."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return []  # the reader of specifications reports it
    cells = (value for key, value in _pairs(root) if key.value == "cells")
    blocks = [
        block for node in cells if isinstance(node, yaml.SequenceNode) for block in node.value
    ]
    return [
        (index, key, value)
        for index, block in enumerate(blocks)
        for key, value in _pairs(block)
        if key.value == CONFIG
    ]


def _pairs(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    yield from node.value if isinstance(node, yaml.MappingNode) else ()


def _named(value: yaml.Node, key: yaml.Node) -> Path:
    is_alias = value.start_mark.index < key.end_mark.index
    if not isinstance(value, yaml.ScalarNode) or not value.value or is_alias:
        raise ConfigurationError("must be the name of one file")
    return Path(value.value).expanduser()


def _block(file: Path, folder: Path, place: str) -> dict[str, Any]:
    """Models, recipes and lengths of a configuration, in YAML's types."""
    configuration = read_configuration(folder / file)
    configuration.check()
    if {"strategy", "deepspeed"} & configuration.options.keys():
        text = "trains on several GPUs, and a trial of a sweep on one: estimate it"
        raise ConfigurationError(f"{configuration.file}: {text}")
    for line in _classes(configuration):
        logger.info("%s: %s: %s", place, configuration.file, line)
    recipe = as_recipe(configuration)
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    # Defaults that a specification may add would replace those that the file has.
    defaults = trl_defaults(recipe.method, task=recipe.task, precision=recipe.precision)
    fields |= {n: v for n, v in recipe.model_dump(mode="json").items() if n in defaults}
    return {
        "models": [configuration.model],
        "recipes": [fields],
        "seq_lens": [configuration.tokens],
    }


def _classes(configuration: Configuration) -> Iterator[str]:
    """A line for each class of keys, and for each assumption."""
    lines = configuration.lines
    used = [line for line in lines if line.key_class == "used" and line.key not in DATA]
    left = [line.key for line in used if _options(line.meaning) <= OF_THE_WORKLOAD]
    yield f"{configuration.trainer}: used: {_names(used, left)}"
    left += [line.key for line in lines if line.key in DATA]
    if left:
        yield f"left to the workload of the specification, or to the sweep: {', '.join(left)}"
    for line in lines:
        if line.key_class == "assumed" and line.key not in DATA:
            yield f"assumed for {line.key}: {line.meaning}"


def _names(lines: Iterable[Line], but: Collection[str]) -> str:
    return ", ".join(line.key for line in lines if line.key not in but)


def _options(meaning: str) -> set[str]:
    return {part.split()[0] for part in meaning.split(",") if part.strip()}
