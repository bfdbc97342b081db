"""Lines of the observation log: reading, and mistakes with their lines."""

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
        number: of the line, from 1.
        reason: what is wrong with it.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason

    def of(self, file: RunPath, before: int = 0) -> StoreError:
        """What a user is told: where it stands in its file, after so many others, and a remedy."""
        return StoreError(
            f"{file}:{before + self.number}: not an observation ({self.reason}): "
            "restore the line or delete it"
        )


def read_lines(
    lines: Iterable[bytes], read: Callable[[bytes], L], *, profiles: bool = False
) -> Iterator[L]:
    """The observations of lines, or their profiles; a torn last line is neither.

    Raises:
        BadLineError: a line before the last cannot be read.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return  # what a writer adds meanwhile is not the rest of another line
        if is_profile(line) is not profiles:
            continue
        try:
            yield read(line)
        except ValidationError as error:
            raise BadLineError(number, mistake(error)) from None


def told(
    file: RunPath,
    lines: Iterable[bytes],
    read: Callable[[bytes], L],
    profiles: bool,  # noqa: FBT001 - which
) -> Iterator[L]:
    """As ``read_lines``, of a file."""
    try:
        yield from read_lines(lines, read, profiles=profiles)
    except BadLineError as error:
        raise error.of(file) from None


def once(logged: Iterable[L]) -> Iterator[L]:
    """Each key once, the first that was written: several files may tell of one probe."""
    keys: set[str] = set()
    for each in logged:
        key = each.key
        if key not in keys:
            keys.add(key)
            yield each


def mistake(error: ValidationError) -> str:
    """First mistake of a record, with its field."""
    first = error.errors(include_url=False)[0]
    where = dotted(first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
