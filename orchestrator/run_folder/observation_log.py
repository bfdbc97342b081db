"""Lines of the observation log: read, and their mistakes located."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.spec.validation_messages import dotted
from orchestrator.storage.local_storage import lines_of
from orchestrator.storage.run_storage import RunPath, StoreError
from trials.records.observation import LOG_VERSION
from trials.records.profile import Logged

L = TypeVar("L", bound=Logged)


def bytes_of(content: str | BaseModel) -> bytes:
    """Content of a file of the run, as UTF-8."""
    if isinstance(content, str):
        return content.encode()
    # As ``model_dump_json``, without its text, which takes 50 MB more for a long ranking.
    return content.__pydantic_serializer__.to_json(content, indent=1) + b"\n"


def read_lines(
    file: RunPath,
    lines: Iterable[bytes],
    read: Callable[[bytes], L | None],
    *,
    start: int = 0,
) -> Iterator[L]:
    """Parse lines of a file, but for a torn last one.

    Args:
        file: the file, for messages.
        lines: its lines.
        read: parser of a line; None for a line to leave out.
        start: byte of a local file from which on the lines are.

    Raises:
        StoreError: a line before the last cannot be read.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return  # a writer may append now: its next bytes do not continue this line
        try:
            record = read(line)
        except ValidationError as error:
            before = sum(1 for _ in lines_of(file, 0, start)) if isinstance(file, Path) else 0
            raise StoreError(f"{file}:{before + number}: {unreadable(error)}") from None
        if record is not None:
            yield record


def unreadable(error: ValidationError) -> str:
    """Reason why a line is no observation, and the remedy."""
    details = error.errors(include_url=False)
    if any(d["loc"] == ("log_version",) for d in details):
        return f"written by a newer version (a log of more than version {LOG_VERSION}): update"
    if all(d["type"] == "extra_forbidden" for d in details):
        names = ", ".join(sorted({dotted(d["loc"]) for d in details}))
        return f"{names}: unknown here, so that a newer version wrote it: update"
    return f"not an observation ({mistake(error)}): restore the line or delete it"


def mistake(error: ValidationError) -> str:
    """First mistake of a record, with its field."""
    first = error.errors(include_url=False)[0]
    where = dotted(first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
