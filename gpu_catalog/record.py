"""Base of all records that are written to or read from disk."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable, and closed to unknown keys.

    Attributes:
        FORMER: current names of fields by their former ones, for messages; see ``former_names``.
    """

    FORMER: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(frozen=True, extra="forbid")


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
