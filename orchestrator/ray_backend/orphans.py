"""End of a driver's own Ray on this machine: neither a process nor a folder outlives the driver.

Ray's own processes end with their driver, but workers that are still starting notice it up to a
minute later, and Ray never removes its folder. A helper waits for the end of the driver's pipe. If
the driver was killed, it kills whatever carries the driver's mark; then it removes the folder.
Where a helper was killed, too, that of a later driver does both for it.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "FINETUNE_COST_DRIVER"
"""Variable that every process of a driver inherits, with a value of that driver."""
PREFIX, OWNER = "ray-", "owner"
"""Beginning of a folder's name, and the file in it that its driver locks."""
MOST_MARK_BYTES = 64
KEEPS_VARIABLES = "SPT_NOENV"
"""Variable that keeps Ray's titles of processes from overwriting the variables, and the mark."""
NONE_LEFT_SECONDS = 2.0  # without a marked process: none of them starts another any more
REMOVAL_SECONDS = 10.0  # processes that end may still write to the folder
POLL_SECONDS = 0.1
MOST_PLACE_BYTES = 28
"""Longest path for the folder to be in: macOS has room for 103 bytes of a socket's path, Linux for
107, and the folder's name and Ray's below it are up to 75 and 77 bytes."""


@contextlib.contextmanager
def folder_of_own_ray() -> Iterator[Path]:
    """A folder for the Ray that this process starts within; it is removed in the end.

    Should this process be killed, the processes started within end, too. A normal end leaves them.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    folder = _place() / f"{PREFIX}{secrets.token_hex(4)}"
    helper = subprocess.Popen(
        [sys.executable, "-P", "-m", "orchestrator.ray_backend.orphans", mark, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for the driver
    )
    os.environ |= {MARK: mark, KEEPS_VARIABLES: "1"}
    try:
        folder.mkdir(parents=True)  # the helper runs: no kill leaves it
        with _owned(folder, mark):
            yield folder
    finally:
        del os.environ[MARK], os.environ[KEEPS_VARIABLES]
        with contextlib.suppress(BrokenPipeError):
            helper.communicate(b"ended")


@contextlib.contextmanager
def _owned(folder: Path, mark: str) -> Iterator[None]:
    """Lock a folder while its driver runs; the locked file has the driver's mark.

    A normal end, which leaves the driver's processes, removes the file while it is locked.
    """
    path = folder / OWNER
    with path.open("wb", buffering=0) as owner:
        with contextlib.suppress(OSError):  # as of a disk without locks, or a full one
            fcntl.flock(owner, fcntl.LOCK_SH)
            owner.write(mark.encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def end_leftovers(place: Path) -> None:
    """End what killed drivers of this user have left in a place, whose helpers were killed too."""
    for path in place.glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):  # of other users, without a lock, or gone meanwhile
            if path.parent.lstat().st_uid != os.getuid() or _keeping(path.parent).exists():
                continue
            if not path.is_file():
                continue
            with path.open("rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mark = owner.read(MOST_MARK_BYTES)
            # Else its driver is about to lock it, or it is no folder of a driver.
            if re.fullmatch(rb"\d+-[0-9a-f]{16}", mark):
                kill_marked(mark.decode())
                _remove(path.parent)


def _place() -> Path:
    """Place of the folder: where Ray has its own, unless the paths of sockets would be too long."""
    place = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()
    return place if len(os.fsencode(place)) <= MOST_PLACE_BYTES else Path("/tmp")  # noqa: S108 - as Ray does


def keep_logs(folder: Path) -> Path | None:
    """Keep a folder of a Ray that failed.

    Returns:
        Where the logs are in it; None if Ray has not written any, or they cannot be kept.
    """
    logs = folder / "session_latest" / "logs"
    with contextlib.suppress(OSError):  # as of a full disk
        if logs.is_dir():
            _keeping(folder).touch()
            return logs
    return None


def _keeping(folder: Path) -> Path:
    """File whose presence keeps the folder."""
    return folder / "kept"


def marked(mark: str) -> list[psutil.Process]:
    """Processes of the driver with this mark."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                running.append(process)
    return running


def kill_marked(mark: str) -> None:
    """Kill the processes of the driver with this mark, and what they start meanwhile."""
    last = time.monotonic()
    while time.monotonic() < last + NONE_LEFT_SECONDS:
        for process in marked(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
            last = time.monotonic()
        time.sleep(POLL_SECONDS)


def _remove(folder: Path) -> None:
    """Remove a folder to which processes that end may still write, unless it is to be kept."""
    end = time.monotonic() + REMOVAL_SECONDS
    while folder.exists() and not _keeping(folder).exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    end_leftovers(Path(sys.argv[2]).parent)
    is_killed = not sys.stdin.buffer.read()
    if is_killed:
        kill_marked(sys.argv[1])
    _remove(Path(sys.argv[2]))
