"""Lock that keeps a second driver away from a run in a bucket.

The lock is a series of numbered objects, of which the highest counts. A driver takes it by writing
the next number on the condition that there is no such object, so only one of two drivers succeeds.
The holder rewrites its object regularly. The lock has expired if that has stopped for minutes, or
if the holder's process on this machine is gone. Ages are by the clock of the service, since the
clocks of two machines may differ.
"""

import contextlib
import datetime as dt
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import ValidationError

from gpu_catalog.record import Record
from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_bucket import Bucket, OutageError

FOLDER = "lock/"
_MACHINE = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"))


class LostError(StoreError):
    """Another driver has taken over the lock."""


class LockHolder(Record):
    """Holder of the lock.

    Attributes:
        pid: id of its process.
        machine: boot and process namespace in which ``pid`` is unique; None if unknown.
        since: time at which it took the lock.
        token: random name of this holder.
        released: whether it has released the lock.
    """

    host: str
    pid: int
    machine: str | None
    since: str
    token: str
    released: bool = False

    def __str__(self) -> str:
        return f"on {self.host} (process {self.pid}, since {self.since})"

    def has_died(self) -> bool:
        """Whether its process is certainly gone; False on another machine."""
        is_here = self.machine is not None and self.machine == _this_machine()
        return is_here and not psutil.pid_exists(self.pid)


@dataclass(frozen=True, slots=True)
class _LockState:
    """Latest object of the lock: its number, its holder and its age."""

    number: int
    holder: LockHolder
    age_seconds: float


class RunLock:
    """Lock of a run."""

    def __init__(self, bucket: Bucket, stale_seconds: float) -> None:
        self._bucket = bucket
        self._stale_seconds = stale_seconds
        self._number = 0
        self._me = LockHolder(
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_this_machine(),
            since=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            token=uuid.uuid4().hex,
        )

    @property
    def holding(self) -> str:
        """Name of this hold of the lock; names of later ones sort after it."""
        return f"{self._number:06d}-{self._me.token[:8]}"

    def is_held(self) -> bool:
        """Whether a driver has the lock now."""
        latest = self._latest()
        return latest is not None and self._is_valid(latest)

    def take(self) -> None:
        """Take the lock for this process.

        Raises:
            StoreError: another driver has it.
        """
        latest = self._latest()
        if latest is not None and self._is_valid(latest) and not self._is_mine(latest):
            raise self._held_error(latest)
        if latest is None or not self._is_mine(latest):  # it is on a retry
            self._number = 1 if latest is None else latest.number + 1
            self._bucket.put(_name(self._number), self._record(), new=True)
        # The reply does not decide: a request that botocore repeated finds its own object, and not
        # every service respects the condition. The object itself does.
        latest = self._latest()
        if latest is None:
            raise self._vanished()
        if not self._is_mine(latest):
            raise self._held_error(latest)
        for number in self._numbers():
            if number < self._number:
                self._bucket.delete(_name(number))

    def renew(self) -> None:
        """Renew the lock.

        Raises:
            LostError: another driver has taken it over.
        """
        latest = self._latest()
        if latest is not None and not self._is_mine(latest):
            raise LostError(f"{self._bucket.url}: was taken over by a sweep {latest.holder}")
        self._bucket.put(_name(self._number), self._record())

    def release(self) -> None:
        """Release the lock."""
        latest = self._latest()
        if latest is not None and self._is_mine(latest):
            self._bucket.put(_name(self._number), self._record(released=True))

    def _record(self, *, released: bool = False) -> bytes:
        return self._me.model_copy(update={"released": released}).model_dump_json().encode()

    def _numbers(self) -> list[int]:
        stems = [name.removesuffix(".json") for name in self._bucket.names(FOLDER)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _latest(self) -> _LockState | None:
        """State of the lock; None if no driver ever took it."""
        numbers = self._numbers()
        if not numbers:
            return None
        name = _name(numbers[-1])
        stored = self._bucket.get(name)
        if stored is None:  # deleted meanwhile in favour of a higher number
            raise self._vanished()
        try:
            holder = LockHolder.model_validate_json(stored.content)
        except ValidationError:
            raise StoreError(
                f"{self._bucket.url / name}: not a lock: delete it when no sweep runs"
            ) from None
        return _LockState(numbers[-1], holder, stored.age_seconds)

    def _vanished(self) -> OutageError:
        return OutageError(f"{self._bucket.url}: its lock changed while it was read")

    def _is_mine(self, state: _LockState) -> bool:
        return state.holder.token == self._me.token

    def _is_valid(self, state: _LockState) -> bool:
        is_stale = state.age_seconds > self._stale_seconds
        return not (state.holder.released or is_stale or state.holder.has_died())

    def _held_error(self, state: _LockState) -> StoreError:
        wait = max(0.0, self._stale_seconds - state.age_seconds)
        return StoreError(
            f"{self._bucket.url}: another sweep is writing to it, {state.holder}: wait for it, or "
            f"stop it; if it was killed, run the same command in {wait / 60:.0f} min"
        )


def _name(number: int) -> str:
    return f"{FOLDER}{number:06d}.json"


def _this_machine() -> str | None:
    """Boot and process namespace, in which a process id is unique; None if unknown."""
    boot, namespace = _MACHINE
    with contextlib.suppress(OSError):
        return f"{boot.read_text(encoding='ascii').strip()} {namespace.readlink()}"
    return None
