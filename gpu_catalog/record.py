"""Base of all records that are written to or read from disk."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def former_names(**fields: str) -> Callable[[Any], Any]:
    """Body of a ``model_validator(mode="before")`` that accepts former names of fields.

    Args:
        fields: the field of today by its former name.
    """

    def renamed(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {old: new for old, new in fields.items() if old in data and new not in data}
        return {given.get(name, name): value for name, value in data.items()} if given else data

    return renamed
