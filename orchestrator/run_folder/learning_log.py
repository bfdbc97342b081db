"""The log of learning, ``learned.jsonl``, in a run folder or alone, and its checkpoints."""

import contextlib
import hashlib
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from orchestrator.run_folder.file_names import LEARNED, LEARNING
from orchestrator.run_folder.observation_log import mistake
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.append_log import AppendFile, regular_bytes
from orchestrator.storage.run_storage import RunPath, StoreError
from trials.records.learning import LearnedEpoch


def learned_in(run: RunFolder) -> list[LearnedEpoch]:
    """Read the epochs of a run; none without a log.

    Raises:
        StoreError: a line before the last cannot be read.
    """
    content = run.storage.read(LEARNED)
    return [] if content is None else _records(run.path / LEARNED, content)


def learned_file(path: Path) -> list[LearnedEpoch]:
    """Read the epochs of a log, or of a folder with one.

    Raises:
        StoreError: it is missing or cannot be read.
    """
    file = path / LEARNED if path.is_dir() else path
    try:
        return _records(file, regular_bytes(file))
    except OSError as error:
        raise StoreError(
            f"{file}: cannot be read: {error.strerror}: give what 'learn' wrote, or its folder"
        ) from None


def _records(file: RunPath, content: bytes) -> list[LearnedEpoch]:
    """Epochs of a log, without a torn last line."""
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(LearnedEpoch.model_validate_json(line))
        except ValidationError as error:
            raise StoreError(
                f"{file}:{number}: not an epoch of 'learn' ({mistake(error)}): restore the line, "
                "or delete it"
            ) from None
    return records


class LearnedWriter:
    """The only writer of a log of learning. A context manager.

    Attributes:
        records: epochs in the log.

    Args:
        folder: local folder of the log; made if it does not exist, removed if it stays empty.

    Raises:
        StoreError: on entering, when another process is writing, or the log cannot be read.
    """

    records: list[LearnedEpoch]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / LEARNED
        self._file = AppendFile(self.path)

    def __enter__(self) -> Self:
        RunFolder(self._folder).storage.make()
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
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # not empty
            (self._folder / LEARNING).rmdir()
        if not self.records:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def append(self, record: LearnedEpoch) -> None:
        """Write an epoch durably.

        Raises:
            StoreError: the disk refused it.
        """
        self._file.append(record.model_dump_json().encode() + b"\n")
        self.records.append(record)

    def checkpoint(self, curve: str) -> Path:
        """File of the checkpoint of a curve."""
        folder = self._folder / LEARNING
        folder.mkdir(exist_ok=True)
        return folder / f"{hashlib.sha256(curve.encode()).hexdigest()[:16]}.pt"

    @property
    def state_bytes(self) -> int:
        """Size of all checkpoints in the folder."""
        return sum(file.stat().st_size for file in (self._folder / LEARNING).glob("*.pt"))
