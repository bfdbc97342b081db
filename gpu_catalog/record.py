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
        for old, new in fields.items():
            if old in data and new in data:
                raise ValueError(f"{old} is the former name of {new}: keep {new} alone")
        return {fields.get(name, name): value for name, value in data.items()}

    return renamed
