"""A run in a bucket."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.place import RunPath, S3Url, StoreError
from orchestrator.s3_bucket import CONNECTIONS, Bucket
from orchestrator.s3_lock import RunLock
from orchestrator.s3_log import FOLDER, S3Log, Timings, spool_folder

_DEFAULT = Timings()


class S3Place:
    """A folder of a bucket, of Amazon's or of a service that answers like it.

    Args:
        url: its address.
        timings: how long things may take.
    """

    def __init__(self, url: S3Url, timings: Timings = _DEFAULT) -> None:
        self._url = url
        self._timings = timings
        self._bucket = Bucket(url, timings.patience_seconds)
        self._log: S3Log | None = None
        self._looked_for: S3Log | None = None
        self._seen: dict[str, bytes] = {}  # what was sent once never changes

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

    def observations(self) -> Iterator[tuple[RunPath, bytes]]:
        """What drivers have sent; of a run that this process writes, what it has not sent, too."""
        log = self._log if self._log is not None and self._log.is_open else None
        if log is None or log is not self._looked_for:
            self._look()
            self._looked_for = log  # from now on nobody else writes
        for name in sorted(self._seen):
            yield self._url / name, self._seen[name]
        if log is not None:
            yield log.spooled()

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

    def _look(self) -> None:
        """Reads what is there and was not seen yet."""
        held = self._bucket.patiently(lambda: self._bucket.names(FOLDER))
        names = [FOLDER + name for name in held if name.endswith(".jsonl")]
        new = [name for name in names if name not in self._seen]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            read = dict(zip(new, pool.map(self.read, new), strict=True))
        for name in names:
            content = self._seen.get(name, read.get(name))
            if content is None:
                raise StoreError(f"{self._url / name}: was deleted while it was read: run it again")
            self._seen[name] = content
