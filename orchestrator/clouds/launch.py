"""A sweep on a cluster that is brought up for it and taken down after it: ``launch``.

The job is the cluster's and goes on without this machine; what Ray says of it, and nothing else,
takes the cluster down. So a tunnel that drops or a laptop that sleeps costs no more than the view.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from gpu_catalog.errors import UserError
from orchestrator.console import print_result, remark
from orchestrator.pricing.prices_in_use import NAMES
from orchestrator.storage.run_storage import S3

POLL_SECONDS = 2.0
OPEN_SECONDS = 30.0  # for ssh to open its port
SUBMIT_SECONDS = 300.0  # a head that has just started takes no job yet
SILENT_SECONDS = 3600.0
STAY_HERE = [".git", ".venv", "runs"]  # of the specification's folder: nothing that a sweep reads
STDERR = 2
# Lines of `ray job logs` that the job has not said: one at the start, one where it stops short.
NOT_OF_THE_JOB = ("Job submission server address", "Status for job", "Status message")

State = Literal["absent", "running", "succeeded", "failed", "stopped"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "stopped")


class LaunchError(UserError):
    """The sweep cannot be started or followed; one line on why, and what is left running."""


class _UnreachableError(RuntimeError):
    """The cluster does not answer now; one line on why."""


def files_left_behind(files: Iterable[tuple[str, str | Path | None]], folder: Path) -> list[str]:
    """Mistakes: files that a job on a cluster would not have.

    Args:
        files: option and file; None where the option was not given.
        folder: of the specification, which is all that is sent.
    """
    lines = []
    for option, name in files:
        if name is not None and name not in NAMES and not _goes_along(Path(name), folder):
            lines.append(
                f"--{option} {name}: is no file in {folder}, which goes to the cluster without "
                f"{', '.join(STAY_HERE)}: put it there, and name it as seen from there"
            )
    return lines


def _goes_along(file: Path, folder: Path) -> bool:
    is_below = not file.is_absolute() and not {"..", *STAY_HERE} & set(file.parts)
    return is_below and (folder / file).is_file()


def launch(cluster: Path, spec: Path, words: Sequence[str], out: str) -> int:
    """Brings a cluster up, sweeps on it, shows what the sweep says, and takes the cluster down.

    Args:
        cluster: the file that ``deploy`` made.
        spec: the specification; its folder is sent along.
        words: the sweep's command line.
        out: the run folder that it writes.

    Returns:
        0 if the sweep has ended well, else 1.

    Raises:
        LaunchError: it cannot be started, followed or ended; the cluster may be up.
    """
    config = _read(cluster)
    run = None if out.startswith(S3) else _run_on_head(config, out)
    job = f"launch-{re.sub('[^A-Za-z0-9_-]', '-', spec.stem)}"
    head = _Head(cluster, job)
    try:
        # A link may lie in another folder than what it names: the link's is the one.
        state = _swept(head, spec.absolute().parent, words, run)
    except KeyboardInterrupt:
        remark(f"{job} goes on there: {head.left_up}" if head.has_job else head.left_up)
        raise
    remark(f"{job} {state}; the cluster is down")
    return 0 if state == "succeeded" else 1


def _swept(head: "_Head", folder: Path, words: Sequence[str], run: "_Run | None") -> "State":
    """How the job has ended; the cluster is down then."""
    if not head.ray("up", "--yes", "--no-restart", str(head.file)):  # a job there goes on
        raise LaunchError(f"'ray up' failed: {head.left_up}")
    head.left_up = f"the cluster is up, and {head.bill}"
    with head.tunnel():
        state = _followed(head, folder, words)
    if run is not None:
        _fetch(head, run, state)
    head.left_up = f"what is up {head.bill}"
    if not head.ray("down", "--yes", str(head.file)):
        raise LaunchError(f"'ray down' failed: {head.left_up}")
    return state


def _read(cluster: Path) -> dict[str, Any]:
    """The cluster's file."""
    try:
        config = yaml.safe_load(cluster.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "is no YAML"
        raise LaunchError(f"{cluster}: cannot be read ({reason})") from None
    if not isinstance(config, dict) or "cluster_name" not in config:
        raise LaunchError(
            f"{cluster}: is no file for 'ray up': make one with 'deploy --provider', or, if it is "
            "for Kubernetes, use 'kubectl apply'"
        )
    return config


@dataclass(frozen=True, slots=True)
class _Run:
    """A run folder whose disk goes away with the head: there, and here."""

    there: str
    here: Path


def _run_on_head(config: dict[str, Any], out: str) -> _Run:
    """Where a run will be; its folder here is made before anything costs money."""
    home = "/root" if "docker" in config else "~"
    here = Path("runs") / Path(out).name if out.startswith("/") else Path(out)
    try:
        here.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{here}: cannot be made, for the run ({error.strerror}): nothing was started"
        ) from None
    return _Run(out if out.startswith("/") else f"{home}/{out}", here)


def _followed(head: "_Head", folder: Path, words: Sequence[str]) -> State:
    """How the job has ended; it is handed over first where the cluster does not have it."""
    heard, asked, told, is_first = time.monotonic(), None, "", True
    while True:
        try:
            state = head.state()
            heard = time.monotonic()
            if state != "absent":  # a head that takes no job yet says so every time
                told = ""
            if is_first and state != "absent":
                remark(f"{head.job} is there already: the options given now are not used")
            is_first = False
            if state in ENDED:
                head.show_log()  # what nobody has followed
                return state
            if state == "running":
                asked = None
                head.show_log()
            else:
                asked = asked or heard
                head.submit(folder, words)
        except _UnreachableError as error:
            now = time.monotonic()
            if asked is not None and heard > asked + SUBMIT_SECONDS:
                raise LaunchError(f"the job is not taken: {error}: {head.left_up}") from None
            if now > heard + SILENT_SECONDS:
                raise LaunchError(f"no answer for an hour: {error}: {head.left_up}") from None
            if str(error) != told:
                remark(f"{error}: tried again every {POLL_SECONDS:.0f} seconds")
            told = str(error)
        time.sleep(POLL_SECONDS)


def _fetch(head: "_Head", run: _Run, state: State) -> None:
    """Brings a run here; a job that has failed may have none."""
    if head.ray("rsync-down", str(head.file), f"{run.there}/", f"{run.here}/"):
        remark(f"the run is in {run.here}")
        return
    home, _, path = run.there.partition("/")  # a quoted ~ is no home
    is_absent = f"test ! -e {home}/{shlex.quote(path)}"
    if state == "succeeded" or not head.ray("exec", str(head.file), is_absent):
        raise LaunchError(f"{run.there}: cannot be fetched: {head.left_up}")
    remark(f"{run.there}: the job ended before there was a run: nothing is fetched")


class _Head:
    """The cluster's head, through an ssh tunnel that is opened again whenever it has dropped."""

    def __init__(self, file: Path, job: str) -> None:
        self.file = file
        self.job = job
        self.has_job = False  # that goes on
        self.bill = f"costs money until 'ray down {file}'"
        self.left_up = f"what is up {self.bill}"
        self._told = 0
        self._ssh: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        # What the sweep says is to be seen when it says it.
        self._env = {"RAY_AUTH_MODE": "token"} | self._env | {"PYTHONUNBUFFERED": "1"}
        # Where no environment was activated `ray` is beside this Python.
        path = (self._env.get("PATH", os.defpath), str(Path(sys.executable).parent))
        self._env["PATH"] = os.pathsep.join(path)

    def ray(self, *words: str) -> bool:
        """Whether a command of the launcher's has ended well; what is wrong it says itself."""
        ended = subprocess.run(["ray", *words], env=self._env, stdout=STDERR, check=False)  # noqa: S607
        return ended.returncode == 0

    @contextlib.contextmanager
    def tunnel(self) -> Iterator[None]:
        """Within it, jobs can be asked for."""
        try:
            yield
        finally:
            self._close()

    def state(self) -> State:
        """How the job is.

        Raises:
            _UnreachableError: not to be had now.
            LaunchError: nor later.
        """
        said = self._job_command("status", self.job)
        if "does not exist" in said.stderr:
            return "absent"
        self._check(said)
        ended = re.search(r"^Job '.*' (?:was )?(\w+)$", said.stdout, flags=re.MULTILINE)
        state: State = next((s for s in ENDED if ended and s == ended[1]), "running")
        self.has_job = state == "running"
        return state

    def submit(self, folder: Path, words: Sequence[str]) -> None:
        """Hands the job over, and does not wait for it.

        Raises:
            _UnreachableError: it may not have been taken.
        """
        runtime_env = json.dumps({"working_dir": str(folder), "excludes": STAY_HERE})
        sweep = ("python", "-m", "orchestrator", *words)
        self._check(
            self._job_command(
                *("submit", "--no-wait", "--submission-id", self.job),
                *("--runtime-env-json", runtime_env, "--", *sweep),
            )
        )
        self.has_job = True
        remark(f"{self.job} is on the cluster, and goes on there whatever happens here")

    def show_log(self) -> None:
        """Prints what the job says, until it ends or the connection drops."""
        seen = 0
        with subprocess.Popen(
            self._command("logs", "--follow", self.job),
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as log:
            assert log.stdout is not None
            for line in log.stdout:
                if line.startswith(NOT_OF_THE_JOB):
                    continue
                seen += 1
                if seen > self._told:  # it begins anew each time
                    print_result(line.rstrip("\n"))
        self._told = max(seen, self._told)

    def _job_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        self._open()
        return subprocess.run(
            self._command(*words), env=self._env, capture_output=True, text=True, check=False
        )

    def _command(self, name: str, *words: str) -> list[str]:
        plain = ("--log-style=pretty", "--log-color=false")
        return ["ray", "job", name, *plain, f"--address=http://127.0.0.1:{self._port}", *words]

    def _check(self, said: subprocess.CompletedProcess[str]) -> None:
        if said.returncode == 0:
            return
        lines = said.stderr.strip().splitlines() or [f"ended with {said.returncode}"]
        if "AuthenticationError" in said.stderr:  # which the next try cannot mend
            raise LaunchError(f"the cluster has another token than this machine: {self.left_up}")
        raise _UnreachableError(lines[-1])

    def _open(self) -> None:
        if self._ssh is not None and self._ssh.poll() is None:
            return
        self._ssh = subprocess.Popen(
            ["ray", "dashboard", "--port", str(self._port), str(self.file)],  # noqa: S607
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + OPEN_SECONDS
        while self._ssh.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.2)

    def _close(self) -> None:
        if self._ssh is not None and self._ssh.poll() is None:
            os.killpg(self._ssh.pid, signal.SIGTERM)
            self._ssh.wait()
