"""Where a run lies: a local folder, or a bucket of S3 or of a service that answers like it."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from gpu_catalog.errors import UserError

S3 = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


class StoreError(UserError):
    """A run folder that cannot be used; one line on why and what to do."""


@dataclass(frozen=True, slots=True)
class S3Url:
    """An address in a bucket."""

    bucket: str
    key: str
    """Without a slash at either end; empty for the bucket itself."""

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.bucket, f"{self.key}/{name}".lstrip("/"))


RunPath = Path | S3Url


def run_path(given: RunPath | str) -> RunPath:
    """The run folder that is meant.

    Raises:
        StoreError: it is neither a local folder nor one in a bucket.
    """
    if not isinstance(given, str):
        return given
    if not given.startswith(S3):
        if "://" in given:
            raise StoreError(f"{given}: is no run folder: take a local one, or {S3}BUCKET/FOLDER")
        return Path(given)
    bucket, _, key = given.removeprefix(S3).partition("/")
    if "@" in bucket:  # somebody's password, perhaps: it is not repeated
        raise StoreError(
            f"{S3}…@…: names more than a bucket: take {S3}BUCKET/FOLDER, and have the credentials "
            "where Amazon's own tools find them"
        )
    key = key.strip("/")
    if _BUCKET.fullmatch(bucket) is None or "//" in key or not key.isprintable():
        raise StoreError(f"{given!r}: is no run folder in a bucket: take {S3}BUCKET/FOLDER")
    return S3Url(bucket, key)


def distinct_names(paths: Sequence[RunPath]) -> tuple[str, ...]:
    """What to call runs: the last parts of their paths, numbered where those are the same."""
    last = [str(path).rstrip("/").rpartition("/")[2] or "run" for path in paths]
    if len(set(last)) == len(last):
        return tuple(last)
    return tuple(f"{name}-{number}" for number, name in enumerate(last, start=1))


class ObservationLog(Protocol):
    """The end of a run's observations where they are written: one driver at a time."""

    def open(self) -> None:
        """Takes it for this driver.

        Raises:
            StoreError: another driver has it, or it cannot be written.
        """

    def recover(self, known: Collection[str]) -> set[str]:
        """Writes what earlier drivers of this machine could only keep on its own disk.

        Args:
            known: keys of the observations that are there; they are not written again.

        Returns:
            The keys of those that were written.
        """

    def append(self, line: bytes) -> None:
        """Writes an observation so that no crash of this process can lose it.

        Raises:
            StoreError: it could not be; what was there before is untouched.
        """

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file beside the observations, without waiting for a bucket that is away.

        It is there when the log is closed, at the latest; of two contents of a file the first may
        never be.

        Raises:
            StoreError: it could not be; the old one is still there.
        """

    def close(self, *, failed: bool) -> None:
        """Lets others have it. After a failure it takes seconds at most, and raises nothing.

        Raises:
            StoreError: something is on this machine's disk alone.
        """


class RunStorage(Protocol):
    """What a run folder asks of where it lies. Every method may raise StoreError, in one line.

    Attributes:
        has_several_files: of observations; more than one may tell of one probe.
    """

    has_several_files: bool

    def names(self) -> set[str] | None:
        """What it holds; None when there is no such folder."""

    def read(self, name: str) -> bytes | None:
        """What a file holds; None when there is no such file."""

    def write(self, name: str, content: bytes) -> None:
        """Replaces one file as a whole: whoever reads it sees the old or the new one."""

    def make(self) -> None:
        """Makes the folder, unless it is there."""

    def observations(self) -> Iterator[tuple[RunPath, Iterator[bytes]]]:
        """The lines of each file of observations, as written. The last of a file may be torn."""

    def is_written(self) -> bool:
        """Whether a driver is writing to it now."""

    def log(self) -> ObservationLog:
        """To write observations to."""

    def local_folder(self) -> Path:
        """A folder of this machine that will be there as long as the sweep."""
