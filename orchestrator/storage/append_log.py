"""A local file of lines that only grows: one writer, each line on the disk before it goes on."""

import contextlib
import fcntl
import os
from pathlib import Path

from orchestrator.storage.run_storage import StoreError


class AppendFile:
    """The end of a file, for the one process that has it.

    Args:
        path: the file; it is made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def open(self) -> None:
        """Takes the file, and drops half a line that a killed writer may have left.

        Raises:
            BlockingIOError: another writer has it.
            StoreError: it cannot be written.
        """
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise unusable(self.path, "written", error) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._drop_torn_line()
            sync_folder(self.path.parent)
        except BlockingIOError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise unusable(self.path, "written", error) from None

    def append(self, line: bytes) -> None:
        """Writes a line, whole or not at all.

        Raises:
            StoreError: the disk would not take it; what was there before is untouched.
        """
        size = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise StoreError(
                f"{self.path}: cannot be written: {error.strerror}: make room and run the same "
                "command again, it continues where this stopped"
            ) from None

    def close(self) -> None:
        """Lets another writer have it."""
        os.close(self._descriptor)
        self._descriptor = -1

    def _drop_torn_line(self) -> None:
        content = self.path.read_bytes()
        torn = content.rpartition(b"\n")[2]
        if torn:
            os.ftruncate(self._descriptor, len(content) - len(torn))


def has_writer(path: Path) -> bool:
    """Whether a process has the end of this file now.

    Raises:
        StoreError: it may not be looked at.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise unusable(path, "looked at", error) from None
    return False


def unusable(path: Path, done: str, error: OSError) -> StoreError:
    """What to say of a file or folder with which something could not be done."""
    return StoreError(f"{path}: cannot be {done}: {error.strerror}")


def sync_folder(path: Path) -> None:
    """Has a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
