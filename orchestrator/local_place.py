"""A run in a local folder."""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from orchestrator.append_file import AppendFile, has_writer, sync_folder, unusable
from orchestrator.place import StoreError

OBSERVATIONS = "observations.jsonl"


class LocalPlace:
    """A folder of this machine, or one that it has mounted."""

    has_several_files = False

    def __init__(self, path: Path) -> None:
        self._path = path

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
        file = self._path / OBSERVATIONS
        yield file, _lines(file)

    def is_written(self) -> bool:
        """Whether a driver is writing to it now."""
        return has_writer(self._path / OBSERVATIONS)

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

    def close(self, *, failed: bool) -> None:
        """Lets others have it."""
        del failed
        self._file.close()


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a file as they are read; none of one that is not there."""
    try:
        with file.open("rb") as lines:
            yield from lines
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(file, "read", error) from None
