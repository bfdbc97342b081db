"""pydantic's errors in plain English, each with its line, the value and what to do."""

import datetime as dt
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from gpu_catalog.record import Record
from gpu_catalog.suggestions import did_you_mean, near_matches, suggestion_text
from orchestrator.spec.yaml_lines import LocatedYaml, Location, Problem

# Texts by pydantic's error type. {…} are filled from the context of the error.
WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text of whole characters",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entry",
    "tuple_type": "must be a list, as in [a, b]",
    "model_type": "must be a mapping of keys to values",
    "string_pattern_mismatch": "must be letters, digits, {signs}, the first a letter or digit",
    "date_type": "must be a date, as in 2026-01-31",
    "date_parsing": "must be a date, as in 2026-01-31",
    "date_from_datetime_parsing": "must be a date, as in 2026-01-31",
    "date_from_datetime_inexact": "must be a date, as in 2026-01-31",
}
NUMBERS = {"int_type", "float_type"}
MOST_CHARACTERS = 60


def shown(value: object) -> str:
    """A value as quoted in a message: in YAML, shortened, on one line."""
    text = _as_yaml(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def _as_yaml(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(k)}: {_as_yaml(part)}' for k, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value) if isinstance(value, dt.date) else repr(value)


def problems_of(
    error: ValidationError, located: LocatedYaml, model: type[BaseModel]
) -> list[Problem]:
    """Problems of a file, one for each mistake."""
    details: list[dict[str, Any]] = [dict(d) for d in error.errors(include_url=False)]
    misspelt = _misspelt(details, model)
    problems = []
    for detail in details:
        location = _as_written(detail["loc"], located, model)
        if detail["type"] == "missing" and location in misspelt:
            continue  # reported at the misspelt key
        if detail["type"] == "too_short" and detail["input"]:
            continue  # the mistake inside is reported by itself
        lines = mistake_text(detail, model).split("\n")  # of a recipe, one for each contradiction
        problems += [problem_at(location, line, located) for line in lines]
    return problems


def problem_at(location: Location, text: str, located: LocatedYaml) -> Problem:
    """The problem of a part of a file."""
    path = dotted(location)
    return Problem(located.line(location), f"{path}: {text}" if path else text)


def _misspelt(details: Sequence[dict[str, Any]], model: type[BaseModel]) -> set[Location]:
    """Locations of missing keys for which an unknown key beside them was probably meant."""
    meant: set[Location] = set()
    for detail in details:
        if detail["type"] == "extra_forbidden":
            *holder, key = detail["loc"]
            nearest = _near_fields(str(key), _model_at(model, tuple(holder)))[:1]
            meant.update((*holder, name) for name in nearest)
    return meant


def mistake_text(detail: dict[str, Any], model: type[BaseModel]) -> str:
    """One of pydantic's errors in plain English, with the value and what to do."""
    kind, value, location = detail["type"], detail["input"], detail["loc"]
    if kind == "missing":
        return "is missing: add it"
    if kind == "extra_forbidden":
        return _unknown_key_text(str(location[-1]), _model_at(model, location[:-1]))
    if kind == "literal_error":
        allowed = detail["ctx"]["expected"]
        near = did_you_mean(value, re.findall("'(.*?)'", allowed)) if type(value) is str else ""
        return f"must be {allowed}, not {shown(value)}{near}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in WORDS:
        hint = ": write it out, without quotes" if kind in NUMBERS and _is_number(value) else ""
        if kind == "string_type" and isinstance(value, bool | int | float | dt.date):
            hint = ": put it in quotes"
        context = detail.get("ctx", {})
        signs = _signs(context.get("pattern", ""))
        return f"{WORDS[kind].format(signs=signs, **context)}, not {shown(value)}{hint}"
    message = str(detail["msg"])
    return f"{message[0].lower()}{message[1:]}, not {shown(value)}"


def _signs(pattern: str) -> str:
    """Characters that a pattern allows beside letters and digits."""
    if r"\w " in pattern:
        return "spaces or . , : ( ) / + @ _ -"
    return "'.', '_' or '-'" if "_" in pattern else "'.' or '-'"


def _unknown_key_text(key: str, holder: type[BaseModel] | None) -> str:
    if key in _former(holder):
        new = _former(holder)[key]
        return f"is the former name of {new}, which is given as well: keep {new}"
    fields = {} if holder is None else holder.model_fields
    parts = {name: _model_in(field.annotation) for name, field in fields.items()}
    places = [name for name, part in parts.items() if part and key in part.model_fields]
    if places:
        return f"belongs below {' or '.join(places)}"
    near = suggestion_text(_near_fields(key, holder))
    return f"unknown key{near or ': the known ones are ' + ', '.join(fields)}"


def _is_number(value: object) -> bool:
    """Whether a text is a number: quoted, or like ``1e3``, which YAML takes for text."""
    try:
        return isinstance(value, str) and float(value) >= 0
    except ValueError:
        return False


def dotted(location: Location) -> str:
    """``("cells", 0, "seq_lens", 1)`` as ``cells[0].seq_lens[1]``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{_key(part)}"
    return text.removeprefix(".")


def _key(text: str) -> str:
    return text if text.isprintable() and 0 < len(text) <= MOST_CHARACTERS else shown(text)


def _as_written(location: Location, located: LocatedYaml, model: type[BaseModel]) -> Location:
    """Location in the file, where a former name may stand for the field."""
    if location in located.lines or not location:
        return location
    *holder, field = location
    for old, new in _former(_model_at(model, tuple(holder))).items():
        if new == field and (*holder, old) in located.lines:
            return (*holder, old)
    return location


def _former(model: type[BaseModel] | None) -> Mapping[str, str]:
    return model.FORMER if model is not None and issubclass(model, Record) else {}


def _near_fields(key: str, model: type[BaseModel] | None) -> list[str]:
    """Fields that a key may stand for; near a former name, the current one."""
    if model is None:
        return []
    former = _former(model)
    near = near_matches(key, [*model.model_fields, *former])
    return list(dict.fromkeys(former.get(name, name) for name in near))


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Model of the mapping at a location in the file; None if there is none."""
    annotation: object = model
    for part in location:
        if isinstance(part, int):
            continue
        holder = _model_in(annotation)
        if holder is None or part not in holder.model_fields:
            return None
        annotation = holder.model_fields[part].annotation
    return _model_in(annotation)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Model that an annotation is or contains: ``tuple[Recipe, ...] | None`` contains Recipe."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    for part in typing.get_args(annotation):
        model = _model_in(part)
        if model is not None:
            return model
    return None
