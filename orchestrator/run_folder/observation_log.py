"""Lines of the observation log: read, and their mistakes located."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.spec.validation_messages import dotted
from orchestrator.storage.run_storage import RunPath, StoreError
from trials.records.observation import Observation
from trials.records.profile import Profiled, is_profile

L = TypeVar("L", Observation, Profiled)


def bytes_of(content: str | BaseModel) -> bytes:
    """Content of a file of the run, as UTF-8."""
    text = content if isinstance(content, str) else content.model_dump_json(indent=1) + "\n"
    return text.encode()


class BadLineError(ValueError):
    """A line of the log that cannot be read.

    Args:
        number: line number, from 1.
        reason: mistake in the line.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason

    def in_file(self, file: RunPath, lines_before: int = 0) -> StoreError:
        """The error for users."""
        return StoreError(
            f"{file}:{lines_before + self.number}: not an observation ({self.reason}): "
            "restore the line or delete it"
        )


def read_lines(
    lines: Iterable[bytes], read: Callable[[bytes], L], *, profiles: bool = False
) -> Iterator[L]:
    """Parse the observations among lines, or the profiles; a torn last line is neither.

    Raises:
        BadLineError: a line before the last cannot be read.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return  # a writer may append now: its next bytes do not continue this line
        if is_profile(line) is not profiles:
            continue
        try:
            yield read(line)
        except ValidationError as error:
            raise BadLineError(number, mistake(error)) from None


def read_log(
    file: RunPath, lines: Iterable[bytes], read: Callable[[bytes], L], *, profiles: bool
) -> Iterator[L]:
    """Parse lines of a file, as ``read_lines``.

    Raises:
        StoreError: a line before the last cannot be read.
    """
    try:
        yield from read_lines(lines, read, profiles=profiles)
    except BadLineError as error:
        raise error.in_file(file) from None


def without_repeated_keys(records: Iterable[L]) -> Iterator[L]:
    """The first record of each key: several files may hold the same probe."""
    keys: set[str] = set()
    for record in records:
        key = record.key
        if key not in keys:
            keys.add(key)
            yield record


def mistake(error: ValidationError) -> str:
    """First mistake of a record, with its field."""
    first = error.errors(include_url=False)[0]
    where = dotted(first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
