"""The base of everything that is written to or read from disk."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
