"""Addresses of a run's storage: a local folder, or a bucket of an S3 service."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpu_catalog.errors import UserError

S3 = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


class StoreError(UserError):
    """A run folder that cannot be used; one line says why and what to do."""


@dataclass(frozen=True, slots=True)
class S3Url:
    """An address in a bucket."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.bucket, f"{self.key}/{name}".lstrip("/"))


RunPath = Path | S3Url


def run_path(given: RunPath | str) -> RunPath:
    """Parse the address of a run folder.

    Raises:
        StoreError: it is neither a local folder nor one in a bucket.
    """
    if not isinstance(given, str):
        return given
    if not given.startswith(S3):
        if "://" in given:
            raise StoreError(
                f"{given}: is not a run folder: give a local one, or {S3}BUCKET/FOLDER"
            )
        return Path(given)
    bucket, _, key = given.removeprefix(S3).partition("/")
    if "@" in bucket:  # may hold a password, so the message does not repeat it
        raise StoreError(
            f"{S3}…@…: names more than a bucket: give {S3}BUCKET/FOLDER, and set up the "
            "credentials as for Amazon's own tools"
        )
    key = key.strip("/")
    if _BUCKET.fullmatch(bucket) is None or "//" in key or not key.isprintable():
        raise StoreError(f"{given!r}: is not a run folder in a bucket: give {S3}BUCKET/FOLDER")
    return S3Url(bucket, key)


def output_path(out: str | None, name: str) -> RunPath:
    """The run folder to write to: the given one, else ``runs/NAME``.

    A Ray job runs in a copy of the working directory that Ray deletes with the job. There, a
    relative path starts at the home directory, so that the results survive.

    Raises:
        StoreError: the given one is neither a local folder nor one in a bucket.
    """
    path = run_path(out) if out is not None else Path("runs") / name
    if not isinstance(path, Path):
        return path
    in_ray_job = "runtime_resources" in Path.cwd().parts
    return Path.home() / path if in_ray_job else path.absolute()


def distinct_names(paths: Sequence[RunPath]) -> tuple[str, ...]:
    """Names of runs: the last parts of their paths, numbered if two are equal."""
    last = [str(path).rstrip("/").rpartition("/")[2] or "run" for path in paths]
    if len(set(last)) == len(last):
        return tuple(last)
    return tuple(f"{name}-{number}" for number, name in enumerate(last, start=1))
