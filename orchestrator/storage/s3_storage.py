"""A run in a bucket."""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.storage.run_storage import RunPath, S3Url, StoreError
from orchestrator.storage.s3_bucket import CONNECTIONS, Bucket
from orchestrator.storage.s3_lock import RunLock
from orchestrator.storage.s3_log import FOLDER, S3Log, S3Timings, spool_folder

AT_ONCE = 4 * CONNECTIONS  # files of observations; each is some hundred lines
MOST_KEPT_BYTES = 256 * 2**20
_DEFAULT = S3Timings()


class S3Storage:
    """A folder of a bucket, of Amazon's or of a service that answers like it.

    Args:
        url: its address.
        timings: how long things may take.
    """

    has_several_files = True

    def __init__(self, url: S3Url, timings: S3Timings = _DEFAULT) -> None:
        self._url = url
        self._timings = timings
        self._bucket = Bucket(url, timings.patience_seconds)
        self._log: S3Log | None = None
        self._looked_for: S3Log | None = None
        self._names: list[str] = []
        self._kept: dict[str, bytes] = {}  # what was sent once never changes
        self._kept_bytes = 0

    def names(self) -> set[str] | None:
        """What it holds; None when that is nothing."""
        found = self._bucket.patiently(self._bucket.names)
        return {name.rstrip("/") for name in found} or None

    def read(self, name: str) -> bytes | None:
        """What a file holds; None when there is no such file."""
        found = self._bucket.patiently(lambda: self._bucket.get(name))
        return None if found is None else found.content

    def write(self, name: str, content: bytes) -> None:
        """Replaces one file as a whole."""
        self._bucket.patiently(lambda: self._bucket.put(name, content))

    def make(self) -> None:
        """A bucket has no folders to make."""

    def observations(self) -> Iterator[tuple[RunPath, Iterator[bytes]]]:
        """What drivers have sent; of a run that this process writes, what it has not sent, too."""
        log = self._log if self._log is not None and self._log.is_open else None
        if log is None or log is not self._looked_for:
            held = self._bucket.patiently(lambda: self._bucket.names(FOLDER))
            self._names = sorted(FOLDER + name for name in held if name.endswith(".jsonl"))
            self._looked_for = log  # from now on nobody else writes
        # A few at a time: a long run's are more than this machine may hold.
        for start in range(0, len(self._names), AT_ONCE):
            names = self._names[start : start + AT_ONCE]
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                contents = list(pool.map(self._content, names))
            for name, content in zip(names, contents, strict=True):
                yield self._url / name, io.BytesIO(content)
        if log is not None:
            path, content = log.spooled()
            yield path, io.BytesIO(content)

    def is_written(self) -> bool:
        """Whether a driver is writing to it now."""
        return self._bucket.patiently(RunLock(self._bucket, self._timings.stale_seconds).is_held)

    def log(self) -> S3Log:
        """To write observations to."""
        self._log = S3Log(self._bucket, self._timings)
        return self._log

    def local_folder(self) -> Path:
        """Where observations wait for buckets."""
        return spool_folder(self._bucket).parent

    def _content(self, name: str) -> bytes:
        """What a file of observations holds; kept for the next time, where it is not much."""
        content = self._kept.get(name)
        if content is None:
            content = self.read(name)
            if content is None:
                raise StoreError(f"{self._url / name}: was deleted while it was read: run it again")
            if self._kept_bytes + len(content) <= MOST_KEPT_BYTES:
                self._kept[name] = content
                self._kept_bytes += len(content)
        return content
