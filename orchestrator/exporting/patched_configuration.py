"""A trainer's configuration with the batches of an export, and all else as the user wrote it."""

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gpu_catalog.user_file import text_of
from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.estimate_options import as_recipe
from orchestrator.configurations.key_classes import ABSENT, OFF
from orchestrator.configurations.keys_of_changes import (
    ACCUMULATION,
    MICRO_BATCH,
    MICRO_BATCH_OF_TRANSFORMERS,
    micro_batch_key,
)
from orchestrator.configurations.layouts.several_gpus import (
    EACH_BATCH,
    OF_REDUCTION,
    REDUCTION,
    layout_of,
    precision_of,
    reduces_each_batch,
)
from orchestrator.configurations.local_data import local_files
from orchestrator.configurations.read_file import read_configuration_text
from orchestrator.exporting.deepspeed_file import carried_content
from orchestrator.exporting.training import ExportError, PatchedConfiguration, TrainingJob
from orchestrator.model_names import preset_of
from orchestrator.spec.recipe_options import plain
from orchestrator.spec.yaml_lines import read_yaml
from trials.recipes.recipe import Recipe

WHOLE_BATCH = "batch_size"
"""Key of axolotl in place of the micro-batch or of the accumulation, which it then divides."""
DELIMITERS = frozenset({"CONFIGURATION", "JOB"})
"""Lines that end the file, or the script with it, in a task of bash."""
OF_BATCHES = frozenset({"gradient_accumulation", "effective_batch", "examples_per_row"})
FILLED_IN = frozenset(
    {"lora_targets", "attention", "experts", "quantised_experts", "mamba", "router_loss"}
)
"""Fields that depend on the model where the configuration does not state them."""


def patched(
    configuration: Configuration, training: TrainingJob, seq_len: int
) -> PatchedConfiguration:
    """Set the micro-batch and the accumulation of a training in its configuration.

    Args:
        configuration: the configuration, without refusals, of a YAML file.
        training: the training that was priced.
        seq_len: tokens that its rows are limited to.

    Raises:
        ExportError: the configuration trains otherwise, a line for each difference; or it cannot be
            patched.
    """
    file = configuration.file
    differences = list(_differences(configuration, training, seq_len))
    if differences:
        lines = (f"{file}: {line}: change the file, or leave that out" for line in differences)
        raise ExportError("\n".join(lines))
    before = text_of(Path(file).expanduser(), ExportError)
    trainer, _, version = configuration.trainer.rpartition(" ")
    batches, contents = _changes(configuration, training), _contents(configuration, training)
    after = _with_values(before, trainer, {**batches, **contents})
    if not _keeps_all_else(before, after, configuration, training, contents):
        names = ", ".join([*batches, *contents])
        raise ExportError(f"{file}: {names} cannot be replaced: write each as a value of its own")
    if not DELIMITERS.isdisjoint(after.splitlines()):
        raise ExportError(
            f"{file}: a line is the word {' or '.join(sorted(DELIMITERS))}: indent it"
        )
    diff = difflib.unified_diff(
        before.splitlines(), after.splitlines(), file, f"{file} (exported)", lineterm="", n=1
    )
    return PatchedConfiguration(
        name=Path(file).name,
        trainer=trainer,
        version=version,
        text=after,
        diff="\n".join(diff),
        files=local_files(configuration),
    )


def _changes(configuration: Configuration, training: TrainingJob) -> dict[str, int]:
    """Values by key that differ from those of the configuration, stated or by default."""
    micro_batch, effective_batch = (
        configuration.options[name] for name in ("batch_size", "effective_batch")
    )
    if training.micro_batch == micro_batch:
        return {}
    trainer = configuration.trainer.rpartition(" ")[0]
    changes = {micro_batch_key(trainer): training.micro_batch}
    if training.accumulation != effective_batch // micro_batch:
        changes[ACCUMULATION] = training.accumulation
    return changes


def _contents(configuration: Configuration, training: TrainingJob) -> dict[str, Mapping[str, Any]]:
    """Contents by key that the training needs beside its batches, where they are others."""
    contents, engine = {}, carried_content(configuration)
    if engine is not None:
        contents["deepspeed"] = engine
    stated = {line.key: line.value for line in configuration.lines}.get(REDUCTION, ABSENT)
    settings = {} if stated in OFF or stated == ABSENT else stated
    is_accumulated = training.is_sharded and training.accumulation > 1
    if is_accumulated and isinstance(settings, Mapping) and not reduces_each_batch(settings):
        reduction = {**(settings.get(OF_REDUCTION) or {}), **EACH_BATCH}
        contents[REDUCTION] = {**settings, OF_REDUCTION: reduction}
    return contents


def _with_values(text: str, trainer: str, changes: Mapping[str, object]) -> str:
    """Text of a configuration with other values; a key that it lacks is appended."""
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # it was read as a configuration
    nodes = {key.value: value for key, value in root.value}
    if trainer in MICRO_BATCH and WHOLE_BATCH in nodes:
        changes = {name: value for name, value in changes.items() if name in nodes}
    texts = {name: _in_a_line(value) for name, value in changes.items()}
    spans = sorted(
        (nodes[name].start_mark.index, nodes[name].end_mark.index, value)
        for name, value in texts.items()
        if name in nodes
    )
    for start, end, value in reversed(spans):
        text = f"{text[:start]}{' ' * (start == end)}{value}{text[end:]}"
    added = [f"{name}: {value}" for name, value in texts.items() if name not in nodes]
    if not added:
        return text
    if root.flow_style:
        start = root.start_mark.index + 1
        return f"{text[:start]}{', '.join(added)}, {text[start:]}"
    margin = " " * root.start_mark.column
    return f"{text.rstrip()}\n" + "".join(f"{margin}{line}\n" for line in added)


def _in_a_line(value: object) -> str:
    """Value in YAML; texts are in ASCII, without what ends a line there."""
    written: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return written.removesuffix("...\n").rstrip()


def _keeps_all_else(
    before: str,
    after: str,
    configuration: Configuration,
    training: TrainingJob,
    contents: Mapping[str, Mapping[str, Any]],
) -> bool:
    """Whether a patched text has the batches of a training, these contents, and the rest as is."""
    old, new = read_yaml(before), read_yaml(after)
    changeable = {*MICRO_BATCH.values(), MICRO_BATCH_OF_TRANSFORMERS, ACCUMULATION, *contents}
    if new.problems or not isinstance(new.data, dict) or not contents.items() <= new.data.items():
        return False
    kept = [[(n, v) for n, v in read.data.items() if n not in changeable] for read in (old, new)]
    options = read_configuration_text(after, Path(configuration.file)).options
    expected: dict[str, Any] = {"batch_size": training.micro_batch}
    expected |= {name: configuration.options.get(name) for name in ("effective_batch", "epochs")}
    return kept[0] == kept[1] and expected.items() <= options.items()


def _differences(
    configuration: Configuration, training: TrainingJob, seq_len: int
) -> Iterator[str]:
    """Properties of a training that are not those of its configuration."""
    yield from _differences_of_layout(configuration, training)
    if not _is_model_of(configuration, training.model.name):
        yield (
            f"trains {configuration.options['model']}, and the price is for {training.model.name}"
        )
    for line in configuration.lines:
        if line.is_earlier:
            yield f"{line.key}: {line.meaning}"
    options, priced = configuration.options, training.recipe
    stated = _stated_recipe(configuration, training)
    for name in Recipe.model_fields.keys() - OF_BATCHES:
        own, other = getattr(stated, name), getattr(priced, name)
        is_open = name in FILLED_IN and (own in (None, "auto") or other in (None, False))
        if own != other and not is_open:
            yield f"trains with {name} {plain(own)}, and the price is for {plain(other)}"
    if seq_len != configuration.tokens:
        yield f"trains at {configuration.tokens} tokens, and the price is for {seq_len}"
    if "steps" not in options and training.epochs != options["epochs"]:
        yield f"trains {options['epochs']} epochs, and the price is for {training.epochs}"
    effective_batch = options["effective_batch"] * training.gpus
    if training.effective_batch != effective_batch:
        several = f" x {training.gpus} GPUs" if training.gpus > 1 else ""
        yield (
            f"has an effective batch of {effective_batch}, and the price is for "
            f"{training.micro_batch} x {training.accumulation}{several}"
        )


def _is_model_of(configuration: Configuration, name: str) -> bool:
    """Whether a model is that of a configuration, or a config.json, which states shapes alone."""
    places = (Path(place).expanduser().resolve() for place in (configuration.model, name))
    is_same = (preset_of(name) or name) == configuration.model or len({*places}) == 1
    return is_same or name.endswith(".json")


def _differences_of_layout(configuration: Configuration, training: TrainingJob) -> Iterator[str]:
    """Properties of several GPUs that are not those of the configuration."""
    stated = {"strategy": "ddp", **layout_of(configuration, {})}
    strategy, zero = stated["strategy"], stated.get("zero")
    if zero is not None and training.strategy is None:
        yield "trains by DeepSpeed, and the price is for one GPU without it"
    elif training.strategy not in (None, strategy):
        yield f"shares several GPUs by {strategy}, and the price is for {training.strategy}"
    elif training.shards_on_host != (zero is None and stated.get("offload") is not None):
        place = "the GPUs" if training.shards_on_host else "the host"
        yield f"has its shards on {place}, which the price is not for: set offload_params"
    elif training.zero not in (None, zero):
        yield "has other settings of DeepSpeed than --deepspeed, which the price is for"


def _stated_recipe(configuration: Configuration, training: TrainingJob) -> Recipe:
    """Recipe of the configuration, in the precision that the training's layout gives it."""
    options = {**configuration.options, "strategy": training.strategy}
    changed = precision_of(configuration, options)
    return as_recipe(replace(configuration, options={**configuration.options, **changed}))
