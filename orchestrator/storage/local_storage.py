"""A run in a local folder."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from orchestrator.storage.append_log import AppendFile, has_writer, sync_folder, unusable
from orchestrator.storage.run_storage import StoreError

OBSERVATIONS = "observations.jsonl"
BUFFER_BYTES = 2**20


class LocalStorage:
    """A folder of this machine, or one that it has mounted."""

    has_several_files = False

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def file(self) -> Path:
        """Of the observations."""
        return self._path / OBSERVATIONS

    def names(self) -> set[str] | None:
        """What it holds; None when there is no such folder."""
        try:
            return {entry.name for entry in self._path.iterdir()}
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise StoreError(f"{self._path}: is a file, or below one: name a folder") from None
        except OSError as error:
            raise unusable(self._path, "read", error) from None

    def read(self, name: str) -> bytes | None:
        """What a file holds; None when there is no such file."""
        file = self._path / name
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unusable(file, "read", error) from None

    def write(self, name: str, content: bytes) -> None:
        """Replaces one file as a whole."""
        target, part = self._path / name, self._path / f".{name}.part"
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
            sync_folder(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise unusable(target, "written", error) from None

    def make(self) -> None:
        """Makes the folder, unless it is there."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(self._path, "made", error) from None

    def observations(self) -> Iterator[tuple[Path, Iterator[bytes]]]:
        """One file has them all."""
        yield self.file, lines_of(self.file)

    def is_written(self) -> bool:
        """Whether a driver is writing to it now."""
        return has_writer(self.file)

    def log(self) -> "LocalLog":
        """To write observations to."""
        return LocalLog(self._path)

    def local_folder(self) -> Path:
        """The folder itself."""
        return self._path


class LocalLog:
    """The end of the file of observations; the file is locked for as long as it is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = AppendFile(folder / OBSERVATIONS)

    def open(self) -> None:
        """Takes it for this driver."""
        try:
            self._file.open()
        except BlockingIOError:
            raise StoreError(
                f"{self._folder}: another sweep is writing to it: wait for it, or stop it"
            ) from None

    def recover(self, known: Collection[str]) -> set[str]:
        """Nothing: what was appended is there."""
        del known
        return set()

    def append(self, line: bytes) -> None:
        """Writes an observation."""
        self._file.append(line)

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file beside them."""
        LocalStorage(self._folder).write(name, content)

    def close(self, *, failed: bool) -> None:
        """Lets others have it."""
        del failed
        self._file.close()


def lines_of(file: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The lines of a file as they are read; none of one that is not there.

    Args:
        file: to read.
        start: lines that begin before this byte are left out.
        end: so are those that begin at this one or later; absent for none.
    """
    try:
        with file.open("rb", BUFFER_BYTES) as lines:
            at = start
            if start > 0:
                lines.seek(start - 1)
                at += len(lines.readline()) - 1
            for line in lines:
                if end is not None and at >= end:
                    return
                yield line
                at += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(file, "read", error) from None
