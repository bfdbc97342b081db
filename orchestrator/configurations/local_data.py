"""Data and models on this machine that a configuration names."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_catalog.errors import UserError
from gpu_catalog.suggestions import did_you_mean
from gpu_catalog.user_file import json_of, text_of
from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.estimate_options import READ_ALONE
from orchestrator.configurations.key_classes import ABSENT, Computed, Line, shown
from orchestrator.configurations.trainers.axolotl import AXOLOTL
from orchestrator.configurations.trainers.trl import TRL
from orchestrator.configurations.trainers.trl_tasks import TRAINING_DATA
from orchestrator.datasets.preference import ANSWERS, INPUT, INSTRUCTION, MESSAGES, PROMPT
from orchestrator.datasets.recognition import TEXT, recognised
from orchestrator.datasets.source import FORMATS, DataError, DatasetSource, data_format

KEYS = ("datasets", "pretraining_dataset", "dataset", "dataset_name", TRAINING_DATA)
"""Keys that name data: of axolotl and TRL, of axolotl, of LLaMA-Factory, and two of TRL."""
INFO = "dataset_info.json"
DATA_FOLDER = "data"  # llamafactory/hparams/data_args.py: the default of dataset_dir


MOST = "max_samples"
STRATEGY, CONCATENATED = "mix_strategy", "concat"
BUILDERS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Builders of the package datasets by formats of files."""
TEMPLATE, OWN_TEMPLATE = "chat_template", "tokenizer_default"
TOKENIZER_CONFIG = "tokenizer_config.json"
OF_TEMPLATES = (TEMPLATE, "additional_chat_templates", "tekken")
"""Beginnings of names of files that render conversations beside a tokenizer's configuration."""
PROMPTS = ([PROMPT], [INSTRUCTION], [INSTRUCTION, INPUT])
"""Columns of prompts that are recognised beside pairs of answers."""


class _NotReadError(UserError):
    """Local data that is not read; one line says why."""


class _FaultyError(_NotReadError):
    """Local data without which the trainer stops, too."""


def with_local_data(configuration: Configuration) -> Configuration:
    """Configuration whose data set is an option, where it is one local file or folder.

    Names are relative to the folder of the configuration, or else to the working directory, which
    is the trainer's. Local data that is not read has a line that says why.
    """
    values = {line.key: line.value for line in configuration.lines}
    key = next((name for name in KEYS if values.get(name)), None)
    if key is None:
        return configuration
    try:
        options = _options(key, values, Path(configuration.file).parent)
    except _NotReadError as reason:
        text = f"not read ({reason}): lengths and examples come from --dataset, or are assumed"
        changed = _with_lines(configuration, {key: Line(key, values[key], "assumed", text)}, {})
        is_fault = isinstance(reason, _FaultyError)
        return replace(changed, data_fault=f"{key}: {reason}" if is_fault else None)
    if not options:
        return configuration
    meaning = ", ".join(
        f"{name} {shown(value)}"
        for one in (options, *options.get("others", ()))
        for name, value in one.items()
        if name != "others"
    )
    lines = {key: Line(key, values[key], "used", meaning)}
    if configuration.trainer.startswith(TRL.name) and (form := _other_form(key, values[key])):
        lines[key] = Line(key, values[key], "assumed", form)
    if "most" in options:
        lines[MOST] = Line(MOST, options["most"], "used", "most")
    return _with_lines(configuration, lines, options)


def with_chat_template(configuration: Configuration) -> Configuration:
    """Configuration with a remark where axolotl lacks the chat template that its data needs.

    It takes that of the tokenizer unless the file names one, and stops where there is none
    (axolotl/utils/chat_templates/base.py:60). Only a tokenizer on this machine is looked at.
    """
    values = {line.key: line.value for line in configuration.lines}
    if not configuration.trainer.startswith(AXOLOTL.name) or values.get("chat_template_jinja"):
        return configuration
    data, stated = values.get("datasets"), values.get(TEMPLATE) or OWN_TEMPLATE
    takes_own = any(
        (entry.get(TEMPLATE) or stated) == OWN_TEMPLATE
        for entry in (data if isinstance(data, list) else [])
        if isinstance(entry, dict) and TEMPLATE in str(entry.get("type")).split(".")
    )
    name = str(values.get("tokenizer_config") or configuration.options.get("model"))
    if not takes_own or not _lacks_template(name, Path(configuration.file).parent):
        return configuration
    text = (
        f"one that you add: the tokenizer of {name} has none, and {configuration.trainer} then "
        f"stops before it trains: add {TEMPLATE}: chatml, or the one that you want"
    )
    lines = {line.key: line for line in configuration.lines}
    lines[TEMPLATE] = Line(TEMPLATE, values.get(TEMPLATE, ABSENT), "assumed", text)
    return replace(configuration, lines=tuple(lines.values()))


def _lacks_template(name: str, folder: Path) -> bool:
    """Whether the tokenizer is in a folder on this machine, and has no chat template there."""
    with contextlib.suppress(UserError, ValueError, OSError):
        if (place := _local(name, folder)) is not None:
            settings = json_of(text_of(place / TOKENIZER_CONFIG, _NotReadError))
            has_file = any(file.name.startswith(OF_TEMPLATES) for file in place.iterdir())
            return isinstance(settings, dict) and not settings.get(TEMPLATE) and not has_file
    return False


def _other_form(key: str, value: object) -> str | None:
    """Form of a file's bare name that TRL reads; None for other data.

    ``datasets.load_dataset`` looks for such a name on the hub.
    """
    (entry,) = value if isinstance(value, list) else (value,)
    stated = entry if isinstance(entry, dict) else {"path": entry}
    name = str(stated.get("path"))
    builder = BUILDERS.get(data_format(Path(name)))
    if builder is None or stated.get("data_files"):
        return None
    form = f"datasets: [{{path: {builder}, data_files: {name}}}]"
    if key == TRAINING_DATA:
        form = f'load_dataset("{builder}", data_files="{name}")'
    return f"{READ_ALONE} {name}, which TRL does not find by its name alone: write {form}"


def local_files(configuration: Configuration) -> dict[str, Path]:
    """Model and data on this machine, by the names that the trainer looks for them under.

    LLaMA-Factory looks for a whole folder of data, with its index.
    """
    values = {line.key: line.value for line in configuration.lines}
    key = next((name for name in KEYS if values.get(name)), None)
    folder = Path(configuration.file).parent
    names: list[str] = []
    if key == "dataset":
        names = [str(values.get("dataset_dir") or DATA_FOLDER)]
    elif key is not None:
        with contextlib.suppress(_NotReadError):
            names.extend(str(entry.get("path")) for entry in _entries(key, values, folder))
    files: dict[str, Path] = {}
    model = Path(configuration.model).expanduser()
    if (model / "config.json").is_file():
        files[str(configuration.options["model"])] = model.absolute()
    for name in names:
        with contextlib.suppress(_NotReadError):
            path = _local(name, folder)
            files |= {} if path is None else {name: path.absolute()}
    return files


def _with_lines(
    configuration: Configuration, lines: Mapping[str, Line], options: Mapping[str, Any]
) -> Configuration:
    changed = tuple(lines.get(line.key, line) for line in configuration.lines)
    return replace(configuration, lines=changed, options={**configuration.options, **options})


def _options(key: str, values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options of the data; none where it is not on this machine.

    Raises:
        _NotReadError: it is, but is not read.
    """
    entries = [*_entries(key, values, folder)]
    paths = [_local(str(entry.get("path")), folder) for entry in entries]
    if not any(paths):
        return {}
    if not all(paths):
        raise _NotReadError(f"{paths.count(None)} of its {len(paths)} data sets are on the hub")
    strategy = str(values.get(STRATEGY) or CONCATENATED)
    if len(entries) > 1 and strategy != CONCATENATED:
        raise _NotReadError(f"it takes examples of {len(entries)} data sets by {strategy}")
    first, *others = (
        _options_of(path, entry, values)
        for path, entry in zip(paths, entries, strict=True)
        if path is not None
    )
    aside = entries[0].get("set_aside")
    first |= {} if aside is None else {"set_aside": aside}
    return first | ({"others": tuple(others)} if others else {})


def _options_of(path: Path, entry: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of one data set on this machine.

    Raises:
        _NotReadError: it is not read.
    """
    options: dict[str, Any] = {"dataset": str(path)} | _rendering(entry, values)
    if len(options) == 1:
        try:
            form = recognised(DatasetSource(str(path)))
        except DataError as error:
            # A trainer may read a format that is not counted.
            kind = _FaultyError if data_format(path) in FORMATS else _NotReadError
            raise kind(str(error).splitlines()[0]) from None
        if form is None:
            raise _NotReadError(f"{path} has the columns of no format that is recognised")
    most = entry.get("most") or values.get(MOST)  # of each data set
    return options | ({"most": most} if type(most) is int and most > 0 else {})


def _entries(key: str, values: Mapping[str, Any], folder: Path) -> Iterator[Mapping[str, Any]]:
    """Data sets, each with its path and what else the trainer states of it."""
    value = values[key]
    if key == "dataset":
        yield from _of_llama_factory(str(value), values, folder)
        return
    for entry in value if isinstance(value, list) else [value]:
        stated = entry if isinstance(entry, dict) else {"path": entry}
        if computed := next((v for v in stated.values() if isinstance(v, Computed)), None):
            raise _NotReadError(f"{shown(computed)} is computed, and the file is not run")
        path, files = stated.get("path"), stated.get("data_files") or stated.get("data_dir")
        if files and "/" in str(path):
            raise _NotReadError(f"it takes some of the files of {path}")
        if isinstance(files, dict):
            files = files.get("train")
        for file in files if isinstance(files, list) else [files or path]:
            yield {**stated, "path": file}


def _of_llama_factory(
    names: str, values: Mapping[str, Any], folder: Path
) -> Iterator[Mapping[str, Any]]:
    """Files that the index of LLaMA-Factory's data folder has for names of data sets."""
    data = _local(str(values.get("dataset_dir") or DATA_FOLDER), folder)
    index = _index(data / INFO) if data is not None else {}
    for name in names.split(","):
        entry = index.get(name.strip())
        if entry is None and data is not None:
            near = did_you_mean(name.strip(), index)
            raise _FaultyError(f"{data / INFO} has no data set {name.strip()!r}{near}")
        entry = entry if isinstance(entry, dict) else {}
        file = entry.get("file_name")
        yield {"path": file and str(data / str(file) if data else file), "index": entry}


def _index(path: Path) -> Mapping[str, Any]:
    try:
        index = json_of(text_of(path, _NotReadError))
    except ValueError:
        raise _NotReadError(f"{path} is not JSON") from None
    return index if isinstance(index, dict) else {}


def _local(name: str, folder: Path) -> Path | None:
    """File or folder of a name; None for a data set of the hub."""
    path = Path(name).expanduser()
    for place in (folder / path, path):
        if name and place.exists():
            return place
    if data_format(path) in FORMATS or name.startswith((".", "/", "~")):
        raise _FaultyError(f"{name}: no such file in {folder}")
    return None


def _rendering(entry: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Option of the column that the trainer is to read; none where its name is a usual one."""
    if "index" in entry:
        return _rendering_by_index(entry["index"], values.get("stage"))
    if isinstance(entry.get("type"), dict):
        raise _NotReadError("its prompt is written out: give --dataset with --template")
    if entry.get("split") not in (None, "train"):
        raise _NotReadError(f"it takes the split {entry['split']}")
    if entry.get("shards"):
        raise _NotReadError(f"it takes one of {entry['shards']} shards")
    if entry.get("field_messages") not in (None, *MESSAGES):
        return {"chat": entry["field_messages"]}
    text = entry.get("field") or values.get("dataset_text_field")
    return {} if text in (None, TEXT) else {"text_fields": (text,)}


def _rendering_by_index(index: Mapping[str, Any], stage: object) -> dict[str, Any]:
    """Option of the columns that LLaMA-Factory's index states, as data/converter.py reads them.

    Raises:
        _NotReadError: the trainer reads more of an example than is counted.
    """
    stated = index.get("columns")
    stated = stated if isinstance(stated, dict) else {}
    columns = {key: name for key, name in stated.items() if name and isinstance(name, str)}
    unread = [name for name in ("history", "tools", "kto_tag") if name in columns]
    unread += [name for name in ("num_samples",) if index.get(name)]
    prompts = [columns[name] for name in ("prompt", "query") if name in columns]
    options: dict[str, Any] = {}
    if index.get("formatting", "alpaca") != "alpaca":
        unread += [name for name in ("system",) if name in columns]
        unread += ["ranking"] if index.get("ranking") else []
        if columns.get("messages") not in (None, *MESSAGES):
            options = {"chat": columns["messages"]}
    elif index.get("ranking"):
        answers = tuple(columns.get(name) for name in ANSWERS["pairs"])
        if answers != ANSWERS["pairs"] or prompts not in PROMPTS or "system" in columns:
            unread += ["ranking"]
    elif prompts:
        names = (None, None) if stage == "pt" else ("system", "response")
        system, response = ([columns[name]] if name in columns else [] for name in names)
        options = {"text_fields": (*system, *prompts, *response)}
    if unread:
        text = ", ".join(unread)
        raise _NotReadError(f"its index states {text}, not counted: give --length-histogram")
    return options
