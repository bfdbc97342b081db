"""Where what was learnt is kept: a line for each epoch, beside a run's observations or alone."""

import contextlib
import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from orchestrator.append_file import AppendFile
from orchestrator.place import RunPath, StoreError
from orchestrator.store import LEARNED, LEARNING, RunFolder
from orchestrator.wording import dotted
from trials.learning import LearnedEpoch


def learned_in(run: RunFolder) -> list[LearnedEpoch]:
    """What was learnt in a run; nothing where nothing was.

    Raises:
        StoreError: a line before the last cannot be read.
    """
    content = run.place.read(LEARNED)
    return [] if content is None else _records(run.path / LEARNED, content)


def learned_file(path: Path) -> list[LearnedEpoch]:
    """The same of a file, or of a folder that has one.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    file = path / LEARNED if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{file}: cannot be read: {error.strerror}: give what 'learn' wrote, or its folder"
        ) from None
    return _records(file, content)


class LearnedWriter:
    """The one writer of what is learnt in a local folder. A context manager.

    Attributes:
        records: what is there.
        path: the file.

    Args:
        folder: where; it is made when it is not there.

    Raises:
        StoreError: on entering, when another one is writing, or it cannot be.
    """

    records: list[LearnedEpoch]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / LEARNED
        self._file = AppendFile(self.path)
        self._written: set[str] = set()

    def __enter__(self) -> Self:
        RunFolder(self._folder).place.make()
        try:
            self._file.open()
        except BlockingIOError:
            raise StoreError(
                f"{self._folder}: another 'learn' is writing to it: wait for it, or stop it"
            ) from None
        try:
            self.records = learned_file(self._folder)
        except BaseException:
            self._file.close()
            raise
        self._written = {record.key for record in self.records}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        _remove_empty(self._folder / LEARNING)
        if not self.records:  # nothing was learnt: nothing is left behind
            self.path.unlink(missing_ok=True)
            _remove_empty(self._folder)

    def append(self, record: LearnedEpoch) -> None:
        """Writes an epoch so that no crash can lose it; one that is there is not written again.

        Raises:
            StoreError: the disk would not take it.
        """
        if record.key not in self._written:
            self._file.append(record.model_dump_json().encode() + b"\n")
            self._written.add(record.key)
            self.records.append(record)

    def checkpoint(self, curve: str) -> Path:
        """Where the state of a curve is kept: a file for whatever its key tells apart."""
        folder = self._folder / LEARNING
        folder.mkdir(exist_ok=True)
        return folder / f"{hashlib.sha256(curve.encode()).hexdigest()[:16]}.pt"

    @property
    def state_bytes(self) -> int:
        """What the states of all curves here take on disk."""
        return sum(file.stat().st_size for file in (self._folder / LEARNING).glob("*.pt"))


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something is in it
        folder.rmdir()


def _records(file: RunPath, content: bytes) -> list[LearnedEpoch]:
    """The epochs of a file; a torn last line is not one."""
    whole, _, _torn = content.rpartition(b"\n")
    found = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            found.append(LearnedEpoch.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = f"{dotted(first['loc'])}: {first['msg']}".removeprefix(": ")
            raise StoreError(
                f"{file}:{number}: not an epoch of 'learn' ({reason}): restore the line, or delete "
                "it"
            ) from None
    return found
