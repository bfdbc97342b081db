"""Observations, and files that go with them, on their way into a bucket.

Each observation is first on this machine's disk, in a spool, and goes on from there: a few seconds'
worth as one object, written once. A file lies beside the spool until it is sent. An outage costs
nothing but disk, until it has lasted too long. What a driver left there that was killed, or gave
up, is sent by the next one on the same machine.
"""

import contextlib
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from orchestrator.console import remark
from orchestrator.storage.append_log import AppendFile, unusable
from orchestrator.storage.local_storage import LocalStorage
from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_bucket import FIRST_PAUSE_SECONDS, Bucket, longer
from orchestrator.storage.s3_lock import LostError, RunLock
from trials.records.profile import logged

FOLDER = "observations/"
DATE_SECONDS = 2.0  # a bucket tells when a file was written, and what time it is, in whole seconds


@dataclass(frozen=True, slots=True)
class S3Timings:
    """How long things may take."""

    ship_seconds: float = 5.0
    """So much lies between two sendings: what comes meanwhile goes together."""
    batch: int = 500
    """So many go at once."""
    beat_seconds: float = 30.0
    """Between two signs of life."""
    stale_seconds: float = 300.0
    """Without a sign of life, a driver is taken for dead."""
    patience_seconds: float = 30.0
    """An outage is waited out so long by who reads, or begins."""
    outage_seconds: float = 900.0
    """And so long by a sweep, which goes on measuring meanwhile."""
    leave_seconds: float = 20.0
    """And so long by one that has failed, or was stopped."""


class S3Log:
    """The end of the observations of a run in a bucket. A thread of its own sends them.

    Args:
        bucket: where the run is.
        timings: how long things may take.
    """

    def __init__(self, bucket: Bucket, timings: S3Timings) -> None:
        self._bucket = bucket
        self._timings = timings
        self._lock = RunLock(bucket, timings.stale_seconds)
        self._spools = spool_folder(bucket)
        self._spool = AppendFile(self._spools / "none")
        self._thread = threading.Thread(target=self._work, name="to the bucket", daemon=True)
        self._wake = threading.Event()
        self._mutex = threading.Lock()
        # Below: what both threads use, under the mutex.
        self._waiting: list[bytes] = []
        self._files: dict[str, bytes] = {}
        self._end: float | None = None  # when to stop trying; set when it is closed
        # The sending thread's own.
        self._sending: list[bytes] = []
        self._sent = 0
        self._latest = time.monotonic()
        self._away_since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._again = 0.0
        self._next_beat = time.monotonic() + timings.beat_seconds
        self._gave_up: Callable[[], StoreError] | None = None
        self.is_open = False

    def open(self) -> None:
        """Takes the run for this driver, and a spool."""
        self._bucket.patiently(self._lock.take)
        self._spool = AppendFile(self._spools / f"{self._lock.holding}.jsonl")
        try:
            self._spools.mkdir(parents=True, exist_ok=True)
            self._spool.open()
        except BaseException as error:
            with contextlib.suppress(StoreError):
                self._lock.release()
            if isinstance(error, OSError):
                raise StoreError(
                    f"{unusable(self._spools, 'made', error)}: observations wait there for the "
                    "bucket: set XDG_STATE_HOME to a folder that can be written"
                ) from None
            raise
        self._bucket.patience_seconds = self._timings.outage_seconds
        self._thread.start()
        self.is_open = True

    def recover(self, known: Collection[str]) -> set[str]:
        """Sends what is left in the spools of drivers that are gone, and beside them."""
        found: set[str] = set()
        written: dict[str, float] = {}
        for path in sorted(self._spools.glob("*.jsonl")):
            if path == self._spool.path:
                continue
            left = AppendFile(path)
            try:
                left.open()
            except BlockingIOError:  # its driver lives, and has lost the lock to this one
                continue
            try:
                for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
                    key = _key(path, number, line)
                    if key not in known and key not in found:
                        self.append(line)
                        found.add(key)
                for file in sorted({*self._spools.glob(f"{path.stem}.*")} - {path}):
                    self._send_left(file, file.name.removeprefix(f"{path.stem}."), written)
                path.unlink()
            finally:
                left.close()
        return found

    def _send_left(self, file: Path, name: str, written: dict[str, float]) -> None:
        """Sends a file that a driver could not, unless there is a later one.

        Args:
            file: the driver's.
            name: of the run's file.
            written: when each of the run's files was written, by this machine's clock.
        """
        if name not in written:
            found = self._bucket.patiently(lambda: self._bucket.get(name))
            written[name] = 0.0 if found is None else time.time() - found.age_seconds
        at = file.stat().st_mtime
        if at + DATE_SECONDS >= written[name]:
            self._bucket.patiently(lambda: self._bucket.put(name, file.read_bytes()))
            written[name] = at
        else:
            remark(
                f"{self._bucket.url / name}: another sweep has written it since: what a sweep here "
                "could not send in an outage before that is left out"
            )
        file.unlink()

    def append(self, line: bytes) -> None:
        """Puts an observation into the spool, from where it is sent."""
        self._spool.append(line)
        with self._mutex:
            self._waiting.append(line)
        self._wake.set()
        if self._gave_up is not None:
            raise self._gave_up()

    def write(self, name: str, content: bytes) -> None:
        """Has a file of the run replaced, in its turn: an outage holds up nobody but the sender."""
        with self._mutex:
            LocalStorage(self._spools).write(self._beside(name), content)
            self._files[name] = content
        self._wake.set()
        if self._gave_up is not None:
            raise self._gave_up()

    def spooled(self) -> tuple[Path, bytes]:
        """All that this driver has written, sent or not."""
        return self._spool.path, self._spool.path.read_bytes()

    def close(self, *, failed: bool) -> None:
        """Sends the rest, and lets others have the run."""
        patience = self._timings.leave_seconds if failed else self._timings.outage_seconds
        with self._mutex:
            self._end = time.monotonic() + patience
        self._wake.set()
        self._thread.join()
        self._spool.close()
        self.is_open = False
        left = bool(self._sending or self._waiting or self._files)
        if not left:
            with contextlib.suppress(OSError):
                self._spool.path.unlink()
                self._spools.rmdir()  # unless another driver's is in it
        with contextlib.suppress(StoreError):  # others take it over when it is stale
            self._lock.release()
        if left and self._gave_up is None:  # the thread ended as nobody foresaw
            self._gave_up = partial(self._kept, f"{self._bucket.url}: sending broke off", "again")
        if self._gave_up is None:
            return
        if not failed:
            raise self._gave_up()
        if left:
            remark(str(self._gave_up()))

    def _work(self) -> None:
        """Sends what waits, gives signs of life, until it is closed or all patience is used up."""
        while not self._is_over():
            self._wake.wait(max(0.0, self._due() - time.monotonic()))
            self._wake.clear()
            if time.monotonic() < self._due():
                continue
            try:
                self._beat()
                self._send()
            except LostError as error:
                self._gave_up = partial(self._kept, str(error), "when that one is over")
            except StoreError as error:  # whatever it is: buckets that were away answer oddly
                self._missed(error)
            else:
                if self._away_since is not None:
                    remark(f"{self._bucket.url}: answers again")
                self._away_since, self._pause, self._again = None, FIRST_PAUSE_SECONDS, 0.0

    def _is_over(self) -> bool:
        if self._gave_up is not None:
            return True
        with self._mutex:
            is_sent = not (self._waiting or self._sending or self._files)
            return self._end is not None and is_sent

    def _due(self) -> float:
        """When there is something to do."""
        with self._mutex:
            ends, waiting = self._end is not None, len(self._waiting)
            due = self._next_beat
            if self._sending or waiting >= self._timings.batch or ends:
                due = 0.0
            elif waiting or self._files:
                due = min(due, self._latest + self._timings.ship_seconds)
        return max(due, self._again)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._lock.renew()
            self._next_beat = now + self._timings.beat_seconds

    def _send(self) -> None:
        """Sends one batch. One whose sending was not confirmed is sent again as it was."""
        if not self._sending:
            with self._mutex:
                self._sending = self._waiting[: self._timings.batch]
                del self._waiting[: self._timings.batch]
        if self._sending:
            name = f"{FOLDER}{self._lock.holding}-{self._sent + 1:06d}.jsonl"
            self._bucket.put(name, b"".join(self._sending))
            self._sending = []
            self._sent += 1
            self._latest = time.monotonic()
        # After the observations: what they say of these is there when they are.
        with self._mutex:
            files = dict(self._files)
        for name, content in files.items():
            self._bucket.put(name, content)
            self._latest = time.monotonic()
            with self._mutex:
                if self._files[name] is content:
                    del self._files[name]
                    with contextlib.suppress(OSError):  # then it is sent again: it is the same
                        (self._spools / self._beside(name)).unlink()

    def _missed(self, error: StoreError) -> None:
        """Keeps on trying, ever less often, for as long as patience lasts."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            remark(f"{error}; meanwhile observations are kept in {self._spool.path}")
        with self._mutex:
            end = self._away_since + self._timings.outage_seconds
            end = end if self._end is None else min(end, self._end)
        if now + self._pause > end:
            told = f"{error}, for {now - self._away_since:.0f} s now"
            self._gave_up = partial(self._kept, told, "when it answers")
            return
        self._again = now + random.uniform(self._pause / 2, self._pause)
        self._pause = longer(self._pause)

    def _beside(self, name: str) -> str:
        """What a file of the run is called beside the spool."""
        return f"{self._spool.path.stem}.{name}"

    def _kept(self, told: str, when: str) -> StoreError:
        """What to say of having given up, and of what waits by now."""
        with self._mutex:
            left, files = len(self._sending) + len(self._waiting), sorted(self._files)
        parts = [*([f"{left} observations"] if left else []), *files]
        folder = self._spools if files else self._spool.path
        where = f"{', '.join(parts)} lie in {folder}" if parts else "all it has is there"
        return StoreError(
            f"{told}: {where}: run the same command here {when}, it sends them and goes on"
        )


def spool_folder(bucket: Bucket) -> Path:
    """Where observations of a run wait on this machine for their bucket."""
    told = os.environ.get("XDG_STATE_HOME", "")
    state = Path(told) if told.startswith("/") else Path.home() / ".local" / "state"
    mark = hashlib.sha256(f"{bucket.service} {bucket.url}".encode()).hexdigest()[:12]
    return state / "finetune-cost" / "spool" / f"{bucket.url.bucket}-{mark}"


def _key(path: Path, number: int, line: bytes) -> str:
    try:
        return logged(line).key
    except ValidationError:
        raise StoreError(
            f"{path}:{number}: not an observation: restore the line or delete it"
        ) from None
