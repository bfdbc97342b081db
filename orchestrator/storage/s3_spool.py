"""Copies on this machine's disk of everything a driver has yet to send to a bucket.

A driver's spool is a file of observations, named after its hold of the run's lock. Files of the run
wait beside it under the same stem. The next driver on the machine sends what a killed one left.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from pydantic import ValidationError

from orchestrator.storage.append_log import AppendFile, unusable
from orchestrator.storage.local_storage import LocalStorage
from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_bucket import Bucket
from trials.records.profile import logged

DATE_SECONDS = 2.0  # a bucket's dates, of objects and of now, are in whole seconds
logger = logging.getLogger(__name__)


class Spool:
    """Observations and files of one driver.

    Attributes:
        path: file of the observations, once it is open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, holding: str) -> None:
        """Make the spool of this hold of the lock.

        Raises:
            StoreError: the folder or the file cannot be written.
        """
        self._stem = holding
        self.path = self.folder / f"{holding}.jsonl"
        self._file = AppendFile(self.path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.open()
        except OSError as error:
            raise StoreError(
                f"{unusable(self.folder, 'made', error)}: observations wait there for the "
                "bucket: set XDG_STATE_HOME to a folder that can be written"
            ) from None

    def append(self, line: bytes) -> None:
        """Write an observation and sync it to disk."""
        self._file.append(line)

    def content(self) -> bytes:
        """All observations of this driver, sent or not."""
        return self.path.read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a waiting file of the run."""
        LocalStorage(self.folder).write(f"{self._stem}.{name}", content)

    def remove(self, name: str) -> None:
        """Remove a file that was sent; one that stays is sent again with the same content."""
        with contextlib.suppress(OSError):
            (self.folder / f"{self._stem}.{name}").unlink()

    def close(self, *, sent_bytes: int) -> None:
        """Release the spool, and remove it if it has no more than was sent, and no file waits.

        A line that a signal kept from being queued for sending is in the spool alone.
        """
        self._file.close()
        with contextlib.suppress(OSError):
            is_sent = self.path.stat().st_size == sent_bytes
            if is_sent and [*self.folder.glob(f"{self._stem}.*")] == [self.path]:
                self.path.unlink()
                self.folder.rmdir()  # fails while another driver's spool is in it

    def recover(
        self, bucket: Bucket, keys: Collection[str], append: Callable[[bytes], None]
    ) -> set[str]:
        """Send what other drivers of this machine left, and remove their spools.

        Args:
            bucket: destination of waiting files.
            keys: observations of the run, which are not sent again.
            append: sends an observation.

        Returns:
            Keys of the observations that were sent.
        """
        recovered: set[str] = set()
        written: dict[str, float] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            if path == self.path:
                continue
            left = AppendFile(path)
            try:
                left.open()
            except BlockingIOError:  # its driver is alive: it lost the lock to this one
                continue
            try:
                for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
                    try:
                        key = logged(line).key
                    except ValidationError:
                        raise StoreError(
                            f"{path}:{number}: not an observation that this version reads: "
                            "update, or restore the line"
                        ) from None
                    if key not in keys and key not in recovered:
                        append(line)
                        recovered.add(key)
                for file in sorted({*self.folder.glob(f"{path.stem}.*")} - {path}):
                    _send_left(bucket, file, file.name.removeprefix(f"{path.stem}."), written)
                # Last: a driver that is killed before this recovers the same spool again.
                path.unlink()
            finally:
                left.close()
        return recovered


def _send_left(bucket: Bucket, file: Path, name: str, written: dict[str, float]) -> None:
    """Send a file that another driver left, unless the bucket has a newer one.

    ``written`` keeps the time at which each was written there, by this machine's clock.
    """
    if name not in written:
        stored = bucket.retry(lambda: bucket.get(name))
        # The age is by the bucket's clock, so the difference of the two clocks does not count.
        written[name] = 0.0 if stored is None else time.time() - stored.age_seconds
    modified = file.stat().st_mtime
    if modified + DATE_SECONDS >= written[name]:
        bucket.retry(lambda: bucket.put(name, file.read_bytes()))
        written[name] = modified
    else:
        logger.warning(
            "%s: another sweep has written a newer version: an older one, unsent since an outage "
            "on this machine, is discarded",
            bucket.url / name,
        )
    file.unlink()


def spool_folder(bucket: Bucket) -> Path:
    """Folder of a run's spools on this machine."""
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = state_home if state_home.is_absolute() else Path.home() / ".local" / "state"
    mark = hashlib.sha256(f"{bucket.service} {bucket.url}".encode()).hexdigest()[:12]
    return state / "finetune-cost" / "spool" / f"{bucket.url.bucket}-{mark}"
