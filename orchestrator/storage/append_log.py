"""Append-only local file: one writer, and each line is synced to disk before the call returns."""

import contextlib
import errno
import fcntl
import os
import stat
from io import DEFAULT_BUFFER_SIZE, BufferedReader, FileIO
from pathlib import Path

from orchestrator.storage.run_storage import StoreError


class AppendFile:
    """Append-only file with an exclusive lock.

    Args:
        path: the file; created if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def open(self) -> None:
        """Lock the file, and drop an incomplete last line that a killed writer may have left.

        Raises:
            BlockingIOError: another process has the lock.
            StoreError: the file cannot be written.
        """
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            # The kernel drops this lock when the process dies, so no lock is ever stale.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = regular_bytes(self.path)
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.ftruncate(self._descriptor, whole)
            sync_folder(self.path.parent)  # else a new file may be gone after a power failure
        except OSError as error:
            if self._descriptor >= 0:
                self.close()
            if isinstance(error, BlockingIOError):
                raise
            raise unusable(self.path, "written", error) from None

    def append(self, line: bytes) -> None:
        """Write a line completely or not at all, and sync it.

        Raises:
            StoreError: the disk refused it; earlier lines are untouched.
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
        """Release the file."""
        os.close(self._descriptor)
        self._descriptor = -1


def has_writer(path: Path) -> bool:
    """Whether a process holds the lock of this file now.

    Raises:
        StoreError: the file cannot be opened.
    """
    try:
        with regular_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise unusable(path, "read", error) from None
    return False


def regular_file(path: Path, buffer_bytes: int = DEFAULT_BUFFER_SIZE) -> BufferedReader:
    """Open a file of a run for reading; a pipe or a device there could keep the reader for ever.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    file = FileIO(path, opener=at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return BufferedReader(file, buffer_bytes)


def regular_bytes(path: Path) -> bytes:
    """Content of a file of a run.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with regular_file(path) as file:
        return file.read()


def unusable(path: Path, action: str, error: OSError) -> StoreError:
    """Error for a file or folder; ``action`` is a participle, such as ``written``."""
    return StoreError(f"{path}: cannot be {action}: {error.strerror}")


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
