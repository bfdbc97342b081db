"""Storage of a run in a local folder."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Self

from orchestrator.storage.append_log import (
    AppendFile,
    has_writer,
    regular_bytes,
    regular_file,
    sync_folder,
    unusable,
)
from orchestrator.storage.run_storage import StoreError

OBSERVATIONS = "observations.jsonl"
BUFFER_BYTES = 2**20


class LocalStorage:
    """Folder on this machine or a mounted one.

    ``S3Storage`` has the same methods, and its ``S3Log`` those of the writer. Every one may raise
    StoreError with one line.

    Attributes:
        file: file of the observations.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = path / OBSERVATIONS
        self._log = AppendFile(self.file)

    def names(self) -> set[str] | None:
        """Names in the folder; None if there is no such folder."""
        try:
            return {entry.name for entry in self._path.iterdir()}
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise StoreError(f"{self._path}: is a file, or below one: give a folder") from None
        except OSError as error:
            raise unusable(self._path, "read", error) from None

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is no such file."""
        file = self._path / name
        try:
            return regular_bytes(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unusable(file, "read", error) from None

    def write(self, name: str, content: bytes | Iterator[bytes]) -> None:
        """Replace a file atomically: readers see the old or the new one."""
        target, part = self._path / name, self._path / f".{name}.part"
        try:
            with part.open("wb", BUFFER_BYTES) as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(file.fileno())
            # Synced before and after: a power failure leaves the old file or the new one.
            part.replace(target)
            sync_folder(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise unusable(target, "written", error) from None

    def make(self) -> None:
        """Make the folder if it is missing."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(self._path, "made", error) from None

    def observations(self) -> Iterator[tuple[Path, Iterator[bytes]]]:
        """Lines of each file of observations, as written; the last may be incomplete."""
        yield self.file, lines_of(self.file)

    def is_written(self) -> bool:
        """Whether a driver is writing to the run now."""
        return has_writer(self.file)

    def local_folder(self) -> Path:
        """Folder on this machine that lasts as long as the sweep."""
        return self._path

    def log(self) -> Self:
        """Writer of the run, with the methods below; one driver at a time has it open."""
        return type(self)(self._path)

    def open(self) -> None:
        """Lock the run for this driver."""
        try:
            self._log.open()
        except BlockingIOError:
            raise StoreError(
                f"{self._path}: another sweep is writing to it: wait for it, or stop it"
            ) from None

    def recover(self, _keys: Collection[str]) -> set[str]:
        """Write what earlier drivers left on this machine: here nothing, it is in the file.

        Args:
            _keys: observations of the run; they are not written again.

        Returns:
            Keys of the observations that were written.
        """
        return set()

    def append(self, line: bytes) -> None:
        """Write an observation so that no crash of this process can lose it."""
        self._log.append(line)

    def close(self, *, failed: bool) -> None:
        """Release the run. After a failure this takes seconds at most, and raises nothing."""
        del failed
        self._log.close()


def lines_of(file: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Lines of a file, read lazily; empty if there is no such file.

    Args:
        file: path of the file.
        start: first byte at which a line may begin.
        end: byte before which a line must begin; None for the end of the file.
    """
    try:
        with regular_file(file, BUFFER_BYTES) as lines:
            at = start
            if start > 0:
                lines.seek(start - 1)
                at += len(lines.readline()) - 1
            if end is None:
                yield from lines
                return
            for line in lines:
                if at >= end:
                    return
                yield line
                at += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(file, "read", error) from None
