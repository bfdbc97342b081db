"""Base of all records that are written to or read from disk."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

_new, _set = object.__new__, object.__setattr__
# The slots of pydantic's models: without look-ups, half the time of a record.
_set_values, _set_fields, _set_extra, _set_private = (
    vars(BaseModel)[name].__set__
    for name in (
        "__dict__",
        *(f"__pydantic_{part}__" for part in ("fields_set", "extra", "private")),
    )
)

MOST_SHARED = 30
"""Most attributes whose names CPython keeps once for all objects of a class."""


class Record(BaseModel):
    """Immutable, and closed to unknown keys.

    Attributes:
        FORMER: current names of fields by their former ones, for messages; see ``former_names``.
    """

    FORMER: ClassVar[Mapping[str, str]] = {}
    # Few of the records that a command loads are validated: only these are made ready for it.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    __slots__ = ("_hash",)  # beside the fields: copies and pickles leave it out

    def __hash__(self) -> int:
        """Hash of the fields, computed once: cells of a long log are looked up a million times."""
        value: int | None = getattr(self, "_hash", None)
        if value is None:
            value = hash(tuple(vars(self).values()))
            _set(self, "_hash", value)
        return value

    @classmethod
    def of_checked(cls, values: dict[str, Any]) -> Self:
        """A record of valid values; other fields have their defaults.

        It takes a tenth of the time of validation, and all records of a class share the set of
        their fields, which otherwise takes more memory than the values.
        """
        blank, fields = _blank(cls)
        attributes = blank.copy()
        attributes.update(values)
        record = _new(cls)
        _set_values(record, attributes)
        _set_fields(record, fields)
        _set_extra(record, None)
        _set_private(record, None)
        return record


@cache
def _blank(kind: type[Record]) -> tuple[dict[str, Any], set[str]]:
    """Attributes with their defaults, and their names.

    Up to ``MOST_SHARED`` are apart from their names, which copies share: dictionaries of their own
    would take a quarter more memory for a long log.
    """
    defaults = {name: field.default for name, field in kind.model_fields.items()}
    if len(defaults) > MOST_SHARED:
        return defaults, set(defaults)
    record = _new(kind)
    for name, value in defaults.items():
        _set(record, name, value)
    return vars(record), set(defaults)


def former_names(**fields: str) -> Callable[[Any], Any]:
    """Body of a ``model_validator(mode="before")`` that accepts former names of fields.

    A former name beside the current one stays, so that validation reports it as unknown.

    Args:
        fields: current name of each field by its former name.
    """

    def renamed(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        current = {old: new for old, new in fields.items() if new not in data}
        return {current.get(name, name): value for name, value in data.items()}

    return renamed
