"""Requests: frozen dataclasses that options fill by name, from a command line or from Python.

A request is nested: a field whose type is a dataclass is a group of options, which takes its own
fields from the same flat options. An option that is None counts as not given. The help of a command
describes its options.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from gpu_catalog.errors import UserError
from gpu_catalog.suggestions import did_you_mean
from trials.recipes.fields import MOST_COUNTED

T = TypeVar("T")
P = ParamSpec("P")


class OptionError(UserError):
    """Options that are invalid or contradict one another; a line for each mistake."""


class Checks:
    """Errors of several checks, raised together at the end."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    @property
    def lines(self) -> list[str]:
        """Lines of all errors, each once."""
        lines = (line for error in self._errors for line in str(error).split("\n"))
        return list(dict.fromkeys(lines))

    def of(self, check: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Result of a check; None if it raises an error, which is kept."""
        try:
            return check(*args, **options)
        except UserError as error:
            self._errors.append(error)
            return None

    def raise_errors(self) -> None:
        """Raise the error that was kept; several are raised as one, with all their lines.

        Raises:
            UserError: a check failed.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise OptionError("\n".join(self.lines))


def names_in(value: Any) -> Any:
    """Split a text at its commas and drop empty names; pass a sequence through."""
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def path_text(value: Any) -> Any:
    """Return a path as text; pass anything else through."""
    return fspath(value) if isinstance(value, PathLike) else value


def batch_choice(value: Any) -> Any:
    """Read a batch size: a positive number, ``fastest``, or ``largest`` with its synonym ``max``.

    Raises:
        ValueError: it is none of them.
    """
    if value == "max":
        return "largest"
    if value in ("largest", "fastest") or (type(value) is int and value > 0):
        return _at_most(value)
    raise ValueError("must be a positive number, 'max' or 'fastest'")


def _at_most(value: Any) -> Any:
    if type(value) is int and value > MOST_COUNTED:
        raise ValueError(f"must be at most {MOST_COUNTED}")
    return value


def length_choice(value: Any) -> Any:
    """Read tokens per example: a positive number, several in a sequence, or ``max``.

    Raises:
        ValueError: it is none of them.
    """
    lengths = [value] if type(value) is int else value
    if isinstance(lengths, list | tuple) and all(type(n) is int and n > 0 for n in lengths):
        lengths = [_at_most(n) for n in lengths]
        if len(set(lengths)) == len(lengths) > 0:
            return tuple(lengths) if len(lengths) > 1 else lengths[0]
    elif value == "max":
        return value
    raise ValueError("must be a positive number, several different ones, or 'max'")


def one_or_more(value: Any) -> Any:
    """Return a number as a tuple of one; pass anything else through."""
    return (value,) if type(value) is int else value


Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(one_or_more)]
Names = Annotated[tuple[str, ...], BeforeValidator(names_in)]
PathText = Annotated[str, BeforeValidator(path_text)]
BatchOption = Annotated[int | Literal["largest", "fastest"], BeforeValidator(batch_choice)]


LengthOption = Annotated[int | tuple[int, ...] | Literal["max"], BeforeValidator(length_choice)]


def request_of(kind: type[T], options: Mapping[str, object]) -> T:
    """Make a request from options.

    Args:
        kind: a dataclass, its fields named as the options are.
        options: values by name; names that the request does not have are ignored.

    Raises:
        OptionError: values are missing or invalid; a line for each.
    """
    try:
        return TypeAdapter(kind).validate_python(_nested(kind, options))
    except ValidationError as error:
        raise OptionError("\n".join(_line(dict(e)) for e in error.errors())) from None


def request_from(kind: type[T], options: Mapping[str, object]) -> T:
    """Make a request from keyword arguments, each of which it must have.

    Raises:
        OptionError: an option is unknown, missing or invalid; a line for each.
    """
    names = list(_names(kind))
    unknown = [name for name in options if name not in names]
    if unknown:
        raise OptionError(
            "\n".join(f"{name}: no such option{did_you_mean(name, names)}" for name in unknown)
        )
    return request_of(kind, options)


def validation_lines(error: ValidationError) -> str:
    """The mistakes of a record that options were put into, a line each, by option."""
    options = [str(e["loc"][0]).replace("_", "-") if e["loc"] else "" for e in error.errors()]
    messages = [e["msg"].removeprefix("Value error, ") for e in error.errors()]
    pairs = zip(options, messages, strict=True)
    return "\n".join(f"--{option}: {text}" if option else text for option, text in pairs)


def _nested(kind: type[Any], options: Mapping[str, object]) -> dict[str, object]:
    """The options of a request, those of each group in a mapping of its own."""
    return {
        name: options[name] if group is None else _nested(group, options)
        for name, group in _fields(kind)
        if group is not None or options.get(name) is not None
    }


def _names(kind: type[Any]) -> Iterator[str]:
    for name, group in _fields(kind):
        yield from (name,) if group is None else _names(group)


def _fields(kind: type[Any]) -> Iterator[tuple[str, type[Any] | None]]:
    """Each field of a request, with its type where it is a group of options."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        group = hints[field.name]
        is_group = isinstance(group, type) and dataclasses.is_dataclass(group)
        yield field.name, group if is_group else None


def _line(error: dict[str, Any]) -> str:
    name = next((part for part in error["loc"][::-1] if isinstance(part, str)), "")
    if error["type"].startswith("missing"):
        return f"{name}: is missing"
    return f"{name}: {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"
