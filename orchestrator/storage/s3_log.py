"""Log of a run in a bucket: observations, and the files that go with them.

Each observation is first synced to this machine's disk, in a spool. A thread sends the observations
of a few seconds as one object, which is never changed. So an outage costs only disk space until it
exceeds its limit, and the next driver on this machine sends what a killed one left.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_bucket import Bucket, pauses
from orchestrator.storage.s3_lock import LostError, RunLock
from orchestrator.storage.s3_spool import Spool, spool_folder

FOLDER = "observations/"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class S3Timings:
    """Intervals and time limits.

    Attributes:
        send_seconds: interval between two objects; observations within it are sent together.
        most_lines: observations in one object.
        renew_seconds: interval between two renewals of the lock.
        stale_seconds: age of a lock that has expired.
        retry_seconds: longest outage that a reader, or a driver at its start, waits for.
        outage_seconds: longest outage of a running sweep, which goes on measuring.
        exit_seconds: longest outage that a failed or stopped sweep waits for.
    """

    send_seconds: float = 5.0
    most_lines: int = 500
    renew_seconds: float = 30.0
    stale_seconds: float = 300.0
    retry_seconds: float = 30.0
    outage_seconds: float = 900.0
    exit_seconds: float = 20.0


class S3Log:
    """Writer of a run in a bucket; a thread of its own sends."""

    def __init__(self, bucket: Bucket, timings: S3Timings) -> None:
        self._bucket = bucket
        self._timings = timings
        self._lock = RunLock(bucket, timings.stale_seconds)
        self._spool = Spool(spool_folder(bucket))
        self._thread = threading.Thread(target=self._work, name="to the bucket", daemon=True)
        self._wake = threading.Event()
        # The mutex guards these three, which both threads use. No request is made under it, so a
        # trial that appends never waits for the bucket.
        self._mutex = threading.Lock()
        self._waiting: list[bytes] = []
        self._files: dict[str, bytes] = {}
        self._deadline: float | None = None  # of sending; set on closing
        # Set by the sending thread, at most once; the other thread only reads it.
        self._failure: Callable[[], StoreError] | None = None
        # Below: the sending thread's own.
        self._sending: list[bytes] = []
        self._sent_bytes = 0
        self._objects = 0
        self._last_sent = time.monotonic()
        self._next_renewal = time.monotonic() + timings.renew_seconds
        self._outage_since: float | None = None
        self._pauses = pauses()
        self._retry_at = 0.0
        self.is_open = False

    def open(self) -> None:
        """Take the run's lock and make a spool."""
        self._bucket.retry(self._lock.take)
        try:
            self._spool.open(self._lock.holding)
        except BaseException:
            with contextlib.suppress(StoreError):
                self._lock.release()
            raise
        self._bucket.retry_seconds = self._timings.outage_seconds
        self._thread.start()
        self.is_open = True

    def recover(self, keys: Collection[str]) -> set[str]:
        """Send what earlier drivers of this machine left; returns the keys of the observations."""
        return self._spool.recover(self._bucket, keys, self.append)

    def append(self, line: bytes) -> None:
        """Sync an observation to the spool and queue it."""
        self._spool.append(line)
        with self._mutex:
            self._waiting.append(line)
        self._continue()

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the spool and queue it."""
        # Both under the mutex: else the sender could remove this file after sending an older one.
        with self._mutex:
            self._spool.write(name, content)
            self._files[name] = content
        self._continue()

    def spooled(self) -> tuple[Path, bytes]:
        """Path and content of this driver's observations, sent or not."""
        return self._spool.path, self._spool.content()

    def close(self, *, failed: bool) -> None:
        """Send the rest and release the run."""
        limit = self._timings.exit_seconds if failed else self._timings.outage_seconds
        with self._mutex:
            self._deadline = time.monotonic() + limit
        self._wake.set()
        self._thread.join()
        self.is_open = False
        unsent = bool(self._sending or self._waiting or self._files)
        self._spool.close(sent_bytes=self._sent_bytes)
        with contextlib.suppress(StoreError):  # otherwise it expires
            self._lock.release()
        if unsent and self._failure is None:  # an unexpected exception ended the thread
            self._failure = partial(self._unsent, f"{self._bucket.url}: sending broke off", "again")
        if self._failure is None:
            return
        if not failed:
            raise self._failure()
        if unsent:
            logger.warning("%s", self._failure())

    def _continue(self) -> None:
        self._wake.set()
        if self._failure is not None:
            raise self._failure()

    def _work(self) -> None:
        """Send and renew the lock until the log is closed, or an outage exceeds its limit."""
        while not self._is_over():
            self._wake.wait(max(0.0, self._due() - time.monotonic()))
            self._wake.clear()
            if time.monotonic() < self._due():
                continue
            try:
                # The lock first: a driver that has lost it must not send.
                now = time.monotonic()
                if now >= self._next_renewal:
                    self._lock.renew()
                    self._next_renewal = now + self._timings.renew_seconds
                self._send()
            except LostError as error:
                self._failure = partial(self._unsent, str(error), "when that one is over")
            except StoreError as error:  # of any kind: services in an outage reply at random
                self._note_outage(error)
            else:
                if self._outage_since is not None:
                    logger.info("%s: answers again", self._bucket.url)
                self._outage_since, self._pauses, self._retry_at = None, pauses(), 0.0

    def _is_over(self) -> bool:
        if self._failure is not None:
            return True
        with self._mutex:
            unsent = self._waiting or self._sending or self._files
            return self._deadline is not None and not unsent

    def _due(self) -> float:
        """Time of the next request."""
        with self._mutex:
            is_closing, waiting = self._deadline is not None, len(self._waiting)
            due = self._next_renewal
            if self._sending or waiting >= self._timings.most_lines or is_closing:
                due = 0.0
            elif waiting or self._files:
                due = min(due, self._last_sent + self._timings.send_seconds)
        return max(due, self._retry_at)

    def _send(self) -> None:
        """Send one object of observations, then the files.

        An object whose write failed is written again with the same name and lines: the first
        attempt may have succeeded without a reply, and a second object would double its lines.
        """
        if not self._sending:
            with self._mutex:
                self._sending = self._waiting[: self._timings.most_lines]
                del self._waiting[: self._timings.most_lines]
        if self._sending:
            name = f"{FOLDER}{self._lock.holding}-{self._objects + 1:06d}.jsonl"
            content = b"".join(self._sending)
            self._bucket.put(name, content)
            self._sending = []
            self._sent_bytes += len(content)
            self._objects += 1
            self._last_sent = time.monotonic()
        # Files come after the observations that they refer to.
        with self._mutex:
            files = dict(self._files)
        for name, content in files.items():
            self._bucket.put(name, content)
            self._last_sent = time.monotonic()
            with self._mutex:
                if self._files[name] is content:  # else it was replaced meanwhile
                    del self._files[name]
                    self._spool.remove(name)

    def _note_outage(self, error: StoreError) -> None:
        """Schedule the next attempt, or give up once the outage exceeds its limit."""
        now = time.monotonic()
        if self._outage_since is None:
            self._outage_since = now
            logger.warning("%s; meanwhile observations are kept in %s", error, self._spool.path)
        with self._mutex:
            end = self._outage_since + self._timings.outage_seconds
            end = end if self._deadline is None else min(end, self._deadline)
        self._retry_at = now + next(self._pauses)
        if self._retry_at > end:
            text = f"{error}, for {now - self._outage_since:.0f} s"
            self._failure = partial(self._unsent, text, "when it answers")

    def _unsent(self, text: str, when: str) -> StoreError:
        """Error after giving up, with what is unsent at the time of the call."""
        with self._mutex:
            lines, files = len(self._sending) + len(self._waiting), sorted(self._files)
        parts = [*([f"{lines} observations"] if lines else []), *files]
        folder = self._spool.folder if files else self._spool.path
        unsent = f"{', '.join(parts)} are kept in {folder}" if parts else "nothing is unsent"
        return StoreError(
            f"{text}: {unsent}: run the same command on this machine {when}, it sends them and "
            "continues"
        )
