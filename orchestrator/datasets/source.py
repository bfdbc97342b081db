"""A data set's source and format, and mistakes in it with their lines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_catalog.errors import UserError

FORMATS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
ZIPPED = ".gz"
KNOWN_FORMATS = f"{', '.join(FORMATS)}, or the texts among them with {ZIPPED}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in the data or in an option.

    Attributes:
        part: key of ``workload`` in a specification, or option without dashes and with
            underscores.
        text: the mistake with the value, and the remedy.
    """

    part: str
    text: str


class DataError(UserError):
    """Data that cannot be used; the message has one line for each mistake."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        # A line about a file begins with its name, not with an option.
        lines = (
            m.text if m.part == "dataset" else f"--{m.part.replace('_', '-')} {m.text}"
            for m in self.mistakes
        )
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Example:
    """A raw example: its place in messages, and its fields."""

    place: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """Source of examples: a file, a folder, or a hub name.

    ``subset`` is the configuration of a hub data set. Without ``split``, training is read.
    """

    name: str
    subset: str | None = None
    split: str | None = None

    @property
    def path(self) -> Path | None:
        """The file or folder; None for a hub name."""
        path = Path(self.name).expanduser()
        stated = self.name.startswith((".", "/", "~")) or data_format(path) in FORMATS
        return path if stated or path.exists() or self.name.count("/") != 1 else None


def data_format(path: Path) -> str:
    """Suffix of a data file, without that of its compression."""
    name = path.name.casefold().removesuffix(ZIPPED)
    return Path(name).suffix
