"""A configuration of a trainer: what each of its keys comes to, and the options of its estimate."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from gpu_catalog.errors import UserError
from orchestrator.configurations.key_classes import (
    ABSENT,
    EARLIER,
    IMAGES,
    Computed,
    Line,
    Reading,
    classified,
    entry_of,
    shown,
    unquoted,
)
from orchestrator.configurations.keys_of_changes import LENGTH
from orchestrator.configurations.quantised_weights import format_of, read_format
from orchestrator.configurations.trainer import Trainer
from orchestrator.markdown_table import table
from orchestrator.model_names import preset_of
from orchestrator.spec.validation_messages import mistake_text
from orchestrator.spec.validation_messages import shown as quoted
from trials.recipes.recipe import Recipe, hidden_contradictions

NO_CLIPPING = "none"
LIKENESS = 0.85  # of a misspelt key and the one that was meant
LIKENESS_OF_MISSING = 0.8  # where the file lacks a key that it needs: lora_rank for lora_r
SAME_IN_ALL = (
    *("seq_len, cutoff", "batch_size, effective_batch", "epochs", "lora_rank", "optimizer"),
    *("packing", "attention", "double_quantisation", "router_loss", "modules_to_save", "dora"),
)
"""Meanings of keys whose values are alike in all trainers."""
MODEL_KEYS = ("base_model", "model_name_or_path")

FUSED = "grouped"
"""Experts as transformers 5 holds them under each trainer.

They are parameters of three dimensions, which bitsandbytes does not quantise and which are no
linear layers that a trainer finds.
"""


class ConfigurationError(UserError):
    """The configuration cannot be read or estimated; a line for each reason."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration as it was read.

    Attributes:
        file: name of the file in messages.
        trainer: name of the trainer.
        options: options of the estimate, by name; a recipe's fields by theirs.
        lines: what each key comes to, then assumptions on what the file leaves open.
        tokens: limit of an example's tokens, or tokens of a packed row.
        pads_to_limit: whether every example is padded to that limit.
        data_fault: fault of the data on this machine that the file names, which stops the trainer.
    """

    file: str
    trainer: str
    options: Mapping[str, Any]
    lines: tuple[Line, ...]
    tokens: int
    pads_to_limit: bool
    data_fault: str | None = None

    @property
    def model_name(self) -> str:
        """Name of the model: a folder, by its path relative to the file; else as in the file."""
        name = str(self.options["model"])
        beside = Path(self.file).parent / name
        if (beside / "config.json").is_file():
            return str(beside) if beside.is_absolute() else f"./{beside}"
        return name

    @property
    def model(self) -> str:
        """The model: a folder as ``model_name``; else a preset, which reads text alone, or it."""
        name = str(self.options["model"])
        is_folder = self.model_name != name or (Path(name) / "config.json").is_file()
        return self.model_name if is_folder else preset_of(name) or name

    def with_images(self) -> Self:
        """The configuration, to be estimated with a stated number of image tokens.

        Vision tower and projector are frozen: keys that train them stay refused.
        """
        read = "images: by --image-tokens"
        lines = (
            replace(line, key_class="irrelevant", meaning=read) if line.meaning == IMAGES else line
            for line in self.lines
        )
        return replace(self, lines=tuple(lines))

    @property
    def refusals(self) -> tuple[str, ...]:
        """A line for each refused key."""
        return tuple(self._text(line) for line in self.lines if line.key_class == "refused")

    def check(self) -> None:
        """Check that no key is refused.

        Raises:
            ConfigurationError: there are some; a line for each, and for each misspelt key.
        """
        if self.refusals:
            wrong = [line for line in self.lines if line.key_class == "refused" or line.is_misspelt]
            raise ConfigurationError("\n".join(map(self._text, wrong)))

    def _text(self, line: Line) -> str:
        return ": ".join(filter(None, (self.file, line.key, _value_text(line), line.meaning)))

    def explanation(self) -> str:
        """Table of what each key comes to, in Markdown."""
        rows = [(line.key, shown(line.value), line.key_class, line.meaning) for line in self.lines]
        return table(("key", "value", "class", "meaning"), rows)


def configuration_of(
    trainer: Trainer, values: Mapping[str, Any], file: str, others: Sequence[Trainer] = ()
) -> Configuration:
    """Classify every key of a configuration, and derive its options.

    Args:
        trainer: the trainer that it is for.
        values: values by key.
        file: name of the file in messages.
        others: trainers whose keys are recognised as theirs.
    """
    values = {name: unquoted(value) for name, value in values.items()}
    reading = classified({**trainer.earlier, **trainer.keys}, values, trainer.unknown)
    reading.options["experts"] = FUSED
    trainer.derive(_well_formed(trainer, values, reading), reading)
    _read_format(values, reading)
    options = {name: value for name, value in reading.options.items() if value is not None}
    tokens = options.pop("sequence_len", None)
    pads = options.pop("pads_to_limit", False)
    if not isinstance(options.get("model"), str):
        reading.refuse("model", options.get("model", ABSENT), "the file names none")
    if type(tokens) is not int or tokens < 1:
        key = LENGTH[trainer.name]
        reading.refuse(key, values.get(key, ABSENT), "must be a whole number of at least 1")
    _mark_misspelt(trainer, values, reading, others)
    _check_recipe(options, reading)
    _mark_earlier(trainer, reading)
    return Configuration(
        file=file,
        trainer=f"{trainer.name} {trainer.version}",
        options=options,
        lines=tuple(reading.lines.values()),
        tokens=tokens if type(tokens) is int else 1,
        pads_to_limit=pads,
    )


def _read_format(values: Mapping[str, Any], reading: Reading) -> None:
    """Read the format of weights that the model's name has."""
    model = reading.options.get("model")
    form = format_of(model) if isinstance(model, str) else None
    if form is not None and not values.get("gptq"):
        key = next((name for name in MODEL_KEYS if values.get(name) == model), "model")
        read_format(reading, key=key, value=model, form=form)


KINDS: dict[type, str] = {
    int: "a number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping of keys to values",
}
"""Types of values in words."""


def _well_formed(trainer: Trainer, values: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Values of the shapes that the trainer takes; others are refused and left out."""
    kept = {name: v for name, v in values.items() if not isinstance(v, Computed)}
    for name, types in trainer.shapes.items():
        value = kept.get(name)
        is_list = isinstance(value, list)
        if value is None or (isinstance(value, types) and not is_list):
            continue
        if list in types and is_list and all(isinstance(item, str) for item in value):
            continue
        del kept[name]
        kinds = dict.fromkeys(KINDS[kind] for kind in types)
        reading.refuse(name, value, f"must be {' or '.join(kinds)}")
    return kept


def _check_recipe(options: Mapping[str, Any], reading: Reading) -> None:
    """Refuse a recipe that does not hold together, unless a key of it is refused already."""
    fields = {
        name: None if value == NO_CLIPPING else value
        for name, value in options.items()
        if name in Recipe.model_fields
    }
    if any(reading.refusals()) or options.get("defaults") is None:
        return
    try:
        Recipe.model_validate(fields)
    except ValidationError as error:
        keys = {line.meaning: line for line in reading.lines.values() if line.key_class == "used"}
        contradictions = hidden_contradictions(fields)
        for detail in error.errors(include_url=False):
            field = ".".join(map(str, detail["loc"]))
            text = mistake_text(dict(detail), Recipe)
            if (line := keys.get(field)) is not None:
                value = f", not {quoted(detail['input'])}"  # which the line has
                reading.refuse(line.key, line.value, text.replace(value, "", 1))
            else:
                contradictions += [f"{field}: {text}"] if field else text.splitlines()
        if contradictions:
            reading.refuse("recipe", ABSENT, "; ".join(contradictions))


def _mark_misspelt(
    trainer: Trainer, values: Mapping[str, Any], reading: Reading, others: Sequence[Trainer]
) -> None:
    """Name the key that was probably meant by one that the trainer does not have."""
    names = [name for name in trainer.keys if not name.endswith("*")]
    missing = [line.key for line in reading.refusals() if line.value == ABSENT]
    for name in values:
        if name in trainer.earlier or entry_of(trainer.keys, name) is not None:
            continue
        near_names = difflib.get_close_matches(name, missing, n=1, cutoff=LIKENESS_OF_MISSING)
        hint = None if near_names else _known_name(trainer, name, others)
        if hint is None:
            near_names = near_names or difflib.get_close_matches(name, names, n=1, cutoff=LIKENESS)
            hint = next((f"did you mean {near!r}?" for near in near_names), None)
        if hint is not None:
            unknown = trainer.unknown
            text = f"{unknown.meaning}: {hint}"
            line = Line(name, values[name], unknown.key_class, text, is_misspelt=True)
            reading.lines[name] = line
        for near in near_names:
            lacking = reading.lines.get(near)
            if lacking is not None and lacking.value == ABSENT:
                text = f"{lacking.meaning}: did you mean it by {name!r}?"
                reading.lines[near] = replace(lacking, meaning=text)


def _mark_earlier(trainer: Trainer, reading: Reading) -> None:
    """Say of keys of earlier versions that this one refuses them, and their names today."""
    for name in trainer.earlier.keys() & reading.lines.keys() - trainer.keys.keys():
        line, now = reading.lines[name], trainer.renamed.get(name)
        if line.key_class != "refused":
            renamed = "" if now is None else f": renamed to {now}"
            text = f"{EARLIER}, which {trainer.name} {trainer.version} refuses{renamed}"
            changed = replace(line, key_class="assumed", meaning=text, is_earlier=True)
            reading.lines[name] = changed


def _known_name(trainer: Trainer, name: str, others: Sequence[Trainer]) -> str | None:
    """Name of a key today, or the other trainer that has it; None where nothing is known."""
    if name in trainer.renamed:
        return f"renamed to {trainer.renamed[name]}"
    other = next((other for other in others if name in other.keys), None)
    if other is None:
        return None
    meaning = other.keys[name].meaning
    alike = [
        [key for key, entry in keys.items() if entry.meaning == meaning]
        for keys in (other.keys, trainer.keys)
    ]
    is_clear = meaning in SAME_IN_ALL and [len(names) for names in alike] == [1, 1]
    own = f"; that of {trainer.name} is {alike[1][0]}" if is_clear else ""
    return f"a key of {other.name}{own}"


def _value_text(line: Line) -> str:
    return "" if line.value == ABSENT else shown(line.value)
