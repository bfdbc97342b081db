"""The lock that keeps a second driver away from a run in a bucket.

Each driver that takes the lock writes the next of its objects, on the condition that there is none
of this number, so of two only one can. The highest number counts. Its holder writes it again and
again; one that has not for minutes has died, and so has one of this machine whose process is gone.
Ages are by the clock of the bucket's service: those of two machines may differ.
"""

import contextlib
import datetime as dt
import os
import socket
import uuid
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_bucket import Bucket, OutageError

FOLDER = "lock/"
_MACHINE = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"))


class LostError(StoreError):
    """Another driver has taken the lock over."""


class Holder(BaseModel):
    """Who has the lock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    machine: str | None
    """Where ``pid`` names a process; None where that cannot be told."""
    since: str
    token: str
    released: bool = False

    def __str__(self) -> str:
        return f"on {self.host} (process {self.pid}, since {self.since})"

    def has_died(self) -> bool:
        """Whether it is surely gone."""
        if self.machine is None or self.machine != _this_machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


_Taken = tuple[int, Holder, float]
"""The lock as it was found: its number, its holder, and its age in seconds."""


class RunLock:
    """The lock of a run.

    Args:
        bucket: where the run is.
        stale_seconds: after so long without a sign its holder has died.
    """

    def __init__(self, bucket: Bucket, stale_seconds: float) -> None:
        self._bucket = bucket
        self._stale_seconds = stale_seconds
        self._number = 0
        self._me = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_this_machine(),
            since=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            token=uuid.uuid4().hex,
        )

    @property
    def holding(self) -> str:
        """A name of this holding of the lock; later ones sort behind it."""
        return f"{self._number:06d}-{self._me.token[:8]}"

    def is_held(self) -> bool:
        """Whether a driver has it now."""
        latest = self._latest()
        return latest is not None and self._lives(latest)

    def take(self) -> None:
        """Takes it for this process.

        Raises:
            StoreError: another driver has it.
        """
        latest = self._latest()
        if latest is not None and self._lives(latest) and not self._is_mine(latest):
            raise self._refusal(latest)
        if latest is None or not self._is_mine(latest):  # it is when this is done again
            self._number = 1 if latest is None else latest[0] + 1
            self._bucket.put(_name(self._number), self._record(), new=True)
        # A request that was sent twice finds its own object there, and not every service heeds
        # the condition: what is there in the end decides.
        latest = self._latest()
        if latest is None:
            raise self._vanished()
        if not self._is_mine(latest):
            raise self._refusal(latest)
        for number in self._numbers():
            if number < self._number:
                self._bucket.delete(_name(number))

    def renew(self) -> None:
        """A sign that its holder lives.

        Raises:
            LostError: another driver has it by now.
        """
        latest = self._latest()
        if latest is not None and not self._is_mine(latest):
            raise LostError(f"{self._bucket.url}: was taken over by a sweep {latest[1]}")
        self._bucket.put(_name(self._number), self._record())

    def release(self) -> None:
        """Lets others have it."""
        latest = self._latest()
        if latest is not None and self._is_mine(latest):
            self._bucket.put(_name(self._number), self._record(released=True))

    def _record(self, *, released: bool = False) -> bytes:
        return self._me.model_copy(update={"released": released}).model_dump_json().encode()

    def _numbers(self) -> list[int]:
        names = self._bucket.names(FOLDER)
        return sorted(int(n[: -len(".json")]) for n in names if n[: -len(".json")].isdecimal())

    def _latest(self) -> _Taken | None:
        """None when nobody ever took it."""
        numbers = self._numbers()
        if not numbers:
            return None
        name = _name(numbers[-1])
        found = self._bucket.get(name)
        if found is None:  # taken away meanwhile, for a higher one
            raise self._vanished()
        try:
            return numbers[-1], Holder.model_validate_json(found.content), found.age_seconds
        except ValidationError:
            raise StoreError(
                f"{self._bucket.url / name}: not a lock: delete it, when no sweep runs"
            ) from None

    def _vanished(self) -> OutageError:
        return OutageError(f"{self._bucket.url}: its lock changes while it is read")

    def _is_mine(self, taken: _Taken) -> bool:
        return taken[1].token == self._me.token

    def _lives(self, taken: _Taken) -> bool:
        _, holder, age_seconds = taken
        return not (holder.released or age_seconds > self._stale_seconds or holder.has_died())

    def _refusal(self, taken: _Taken) -> StoreError:
        _, holder, age_seconds = taken
        wait = max(0.0, self._stale_seconds - age_seconds)
        return StoreError(
            f"{self._bucket.url}: another sweep is writing to it, {holder}: wait for it, or stop "
            f"it; if it was killed, the same command goes on in {wait / 60:.0f} min"
        )


def _name(number: int) -> str:
    return f"{FOLDER}{number:06d}.json"


def _this_machine() -> str | None:
    """What two processes must share for the one to see the other by its id."""
    boot, namespace = _MACHINE
    with contextlib.suppress(OSError):
        return f"{boot.read_text(encoding='ascii').strip()} {namespace.readlink()}"
    return None
