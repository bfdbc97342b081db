"""pydantic's errors in plain words, each with its line, the value, and what to do."""

import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from gpu_catalog.near import did_you_mean
from orchestrator.located_yaml import LocatedYaml, Location, Problem

# pydantic's error types, and what to say instead. {…} are filled from the error's own context.
WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entry",
    "tuple_type": "must be a list, for example [{example}]",
    "model_type": "must be a mapping of keys to values",
    "string_pattern_mismatch": "may hold letters, digits, '.', '_' and '-' only",
}


def shown(value: object) -> str:
    """A value as it is quoted in a message: short, on one line."""
    text = f"'{value.key}'" if hasattr(value, "key") else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def say(error: ValidationError, located: LocatedYaml, model: type[BaseModel]) -> list[Problem]:
    """One problem for each error of a validation."""
    problems = []
    for detail in error.errors(include_url=False):
        location = tuple(detail["loc"])
        text = _text(dict(detail), location, model)
        where = _dotted(location)
        problems.append(Problem(located.line(location), f"{where}: {text}" if where else text))
    return problems


def _text(detail: dict[str, Any], location: Location, model: type[BaseModel]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return "is missing: add it"
    if kind == "extra_forbidden":
        keys = _fields(model, location[:-1])
        near = did_you_mean(str(location[-1]), keys)
        return f"unknown key{near or '; known here: ' + ', '.join(keys)}"
    if kind == "literal_error":
        near = did_you_mean(str(value), detail["ctx"]["expected"].replace("'", "").split(", "))
        return f"must be {detail['ctx']['expected']}, not {shown(value)}{near}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in WORDS:
        context = {"example": value} | detail.get("ctx", {})
        return f"{WORDS[kind].format(**context)}, not {shown(value)}"
    message = str(detail["msg"])
    return f"{message[0].lower()}{message[1:]}, not {shown(value)}"


def _dotted(location: Location) -> str:
    """``("cells", 0, "seq_lens", 1)`` as ``cells[0].seq_lens[1]``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _fields(model: type[BaseModel], location: Location) -> list[str]:
    """The keys that are known at a place in the file."""
    annotation: object = model
    for part in location:
        if isinstance(part, int):
            continue
        holder = _model_in(annotation)
        if holder is None or part not in holder.model_fields:
            return []
        annotation = holder.model_fields[part].annotation
    holder = _model_in(annotation)
    return [] if holder is None else list(holder.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model an annotation is, or holds: ``tuple[Recipe, ...] | None`` holds Recipe."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    for part in typing.get_args(annotation):
        found = _model_in(part)
        if found is not None:
            return found
    return None
