"""Storage of a run in a bucket."""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.storage.run_storage import RunPath, S3Url, StoreError
from orchestrator.storage.s3_bucket import CONNECTIONS, Bucket
from orchestrator.storage.s3_lock import RunLock
from orchestrator.storage.s3_log import FOLDER, S3Log, S3Timings
from orchestrator.storage.s3_spool import spool_folder

AT_ONCE = 4 * CONNECTIONS  # files of observations; each has some hundred lines
MOST_CACHED_BYTES = 256 * 2**20
_DEFAULT = S3Timings()


class S3Storage:
    """Folder in a bucket of Amazon's or of another S3 service."""

    def __init__(self, url: S3Url, timings: S3Timings = _DEFAULT) -> None:
        self._url = url
        self._timings = timings
        self._bucket = Bucket(url, timings.retry_seconds)
        self._log: S3Log | None = None
        self._listed_for: S3Log | None = None
        self._names: list[str] = []
        self._cache: dict[str, bytes] = {}  # an object of observations never changes
        self._cached_bytes = 0

    def names(self) -> set[str] | None:
        """Names in the folder; None if it is empty."""
        names = self._bucket.retry(self._bucket.names)
        return {name.rstrip("/") for name in names} or None

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is no such file."""
        stored = self._bucket.retry(lambda: self._bucket.get(name))
        return None if stored is None else stored.content

    def write(self, name: str, content: bytes | Iterator[bytes]) -> None:
        """Replace a file atomically."""
        whole = content if isinstance(content, bytes) else b"".join(content)
        self._bucket.retry(lambda: self._bucket.put(name, whole))

    def make(self) -> None:
        """Do nothing: a bucket has no folders."""

    def observations(self) -> Iterator[tuple[RunPath, Iterator[bytes]]]:
        """Observations in the bucket, then those of this process that may be unsent."""
        log = self._log if self._log is not None and self._log.is_open else None
        if log is None or log is not self._listed_for:
            objects = self._bucket.retry(lambda: self._bucket.names(FOLDER))
            self._names = sorted(FOLDER + name for name in objects if name.endswith(".jsonl"))
            self._listed_for = log  # while this log is open, no other driver writes
        # A few at a time: a long run may not fit into memory.
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
        """Whether a driver is writing to the run now."""
        return self._bucket.retry(RunLock(self._bucket, self._timings.stale_seconds).is_held)

    def log(self) -> S3Log:
        """Writer of the run."""
        self._log = S3Log(self._bucket, self._timings)
        return self._log

    def local_folder(self) -> Path:
        """Folder of the spools."""
        return spool_folder(self._bucket).parent

    def _content(self, name: str) -> bytes:
        """Content of a file of observations, cached up to ``MOST_CACHED_BYTES``."""
        content = self._cache.get(name)
        if content is None:
            content = self.read(name)
            if content is None:
                raise StoreError(
                    f"{self._url / name}: was deleted while the run was read: run the command again"
                )
            if not content.endswith(b"\n"):  # objects are written whole
                raise StoreError(
                    f"{self._url / name}: is cut off: restore it from a copy, or delete it"
                )
            if self._cached_bytes + len(content) <= MOST_CACHED_BYTES:
                self._cache[name] = content
                self._cached_bytes += len(content)
        return content
