"""Start a cluster, run a sweep on it as a Ray job, and take the cluster down: ``launch``.

The job runs on the cluster and continues without this machine. Only a final state of the job that
Ray reports takes the cluster down, so a dropped tunnel or a sleeping laptop interrupts nothing.
"""

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_catalog.errors import UserError
from gpu_catalog.user_file import text_of
from orchestrator.clouds.process_tree import ended_on_error
from orchestrator.clouds.start_checks import mistakes
from orchestrator.planning.launch_failures import known_meaning
from orchestrator.pricing.prices_in_use import NAMES
from orchestrator.spec.yaml_lines import read_yaml
from orchestrator.storage.run_storage import S3

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
OPEN_SECONDS = 30.0  # time for ssh to open its port
SUBMIT_SECONDS = 300.0  # a head that has just started does not accept jobs yet
SILENT_SECONDS = 3600.0
NOT_SENT = [".git", ".venv", "runs"]  # folders beside the specification that no sweep reads
STDERR = 2
# Lines that `ray job logs` adds to the output of the job, at its start and where it breaks off.
ADDED_BY_RAY = ("Job submission server address", "Status for job", "Status message")

State = Literal["absent", "running", "succeeded", "failed", "stopped"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "stopped")


class LaunchError(UserError):
    """The sweep cannot be started or followed; one line on why, and on what is still up."""


class _UnreachableError(RuntimeError):
    """The cluster does not answer at the moment; one line with the reason."""


def files_left_behind(files: Iterable[tuple[str, str | Path | None]], folder: Path) -> list[str]:
    """Mistakes, one line each: files that a job on the cluster would not have.

    Args:
        files: options and their files; None where an option was not given.
        folder: folder of the specification, the only one that is sent to the cluster.
    """
    return [
        f"--{option} {name}: not in {folder}, the folder that is sent to the cluster (without "
        f"{', '.join(NOT_SENT)}): put the file there, and give its path from there"
        for option, name in files
        if name is not None and name not in NAMES and not _is_sent(Path(name), folder)
    ]


def _is_sent(file: Path, folder: Path) -> bool:
    is_below = not file.is_absolute() and not {"..", *NOT_SENT} & set(file.parts)
    return is_below and (folder / file).is_file()


def launch(
    cluster: Path, spec: Path, words: Sequence[str], out: str, show: Callable[[str], None]
) -> int:
    """Start a cluster, run a sweep on it, show the sweep's output, and take the cluster down.

    Args:
        cluster: file that ``deploy`` made.
        spec: specification; its folder is sent to the cluster.
        words: command line of the sweep.
        out: run folder that the sweep writes.
        show: called with each line of the sweep's output.

    Returns:
        0 if the sweep succeeded, else 1.

    Raises:
        LaunchError: the sweep cannot be started or followed, or the cluster cannot be taken down;
            the cluster may be up.
    """
    config = _read(cluster)
    run = None if out.startswith(S3) else _run_on_head(config, out)
    job = f"launch-{re.sub('[^A-Za-z0-9_-]', '-', spec.stem)}"
    head = _Head(cluster, job, show)
    try:
        # Not resolved: the files beside a symbolic link are the ones to send.
        state = _run_sweep(head, spec.absolute().parent, words, run)
    except KeyboardInterrupt:
        logger.warning(
            f"{job} continues on the cluster: {head.still_up}" if head.has_job else head.still_up
        )
        raise
    logger.info("%s %s; the cluster is down", job, state)
    return 0 if state == "succeeded" else 1


def _run_sweep(head: "_Head", folder: Path, words: Sequence[str], run: "_Run | None") -> "State":
    """Final state of the job, once the cluster is down."""
    head.start()
    head.still_up = f"the cluster is up and {head.bill}"
    with contextlib.closing(head):
        state = _follow(head, folder, words)
    if run is not None:
        _fetch(head, run, state)
    head.still_up = f"whatever is up {head.bill}"
    if not head.ray("down", "--yes", str(head.file)):
        raise LaunchError(f"'ray down' failed: {head.still_up}")
    return state


def _read(cluster: Path) -> dict[str, Any]:
    """Parse the cluster's file, which is to be complete."""
    text = text_of(cluster, LaunchError)
    read, is_of_another = read_yaml(text), "\n---\n" in text  # of Kubernetes or SkyPilot
    if read.problems and not is_of_another:
        raise LaunchError(f"{cluster}:{read.problems[0].line}: {read.problems[0].text}")
    config = read.data
    if is_of_another or not isinstance(config, dict) or "cluster_name" not in config:
        raise LaunchError(
            f"{cluster}: not a cluster file for 'ray up': make one with 'deploy --provider'. Give "
            "a file for Kubernetes to 'kubectl apply', and one for SkyPilot to 'sky'"
        )
    lacks = [f"{cluster}: {line}: nothing was started" for line in mistakes(config)]
    if lacks:
        raise LaunchError("\n".join(lacks))
    return config


@dataclass(frozen=True, slots=True)
class _Run:
    """Paths of a run folder: on the head, whose disk goes away with it, and on this machine."""

    on_head: str
    local: Path


def _run_on_head(config: dict[str, Any], out: str) -> _Run:
    """Paths of the run; its local folder is created before anything costs money."""
    home = "/root" if "docker" in config else "~"
    local = Path("runs") / Path(out).name if out.startswith("/") else Path(out)
    try:
        local.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{local}: cannot create the run folder ({error.strerror}): nothing was started"
        ) from None
    return _Run(out if out.startswith("/") else f"{home}/{out}", local)


def _follow(head: "_Head", folder: Path, words: Sequence[str]) -> State:
    """Final state of the job, which is submitted first if the cluster does not have it."""
    last_answer = time.monotonic()
    submitting_since, last_error, is_first = None, "", True
    while True:
        try:
            state = head.state()
            last_answer = time.monotonic()
            if state != "absent":  # until a new head accepts the job, every error is the same
                last_error = ""
            if is_first and state != "absent":
                logger.info(
                    "%s is already on the cluster: the options given now are not used", head.job
                )
            is_first = False
            if state in ENDED:
                head.show_log()  # the part that nobody has followed
                return state
            if state == "running":
                submitting_since = None
                head.show_log()
            else:
                submitting_since = submitting_since or last_answer
                head.submit(folder, words)
        except _UnreachableError as error:
            if submitting_since is not None and last_answer > submitting_since + SUBMIT_SECONDS:
                raise LaunchError(f"the job is not accepted: {error}: {head.still_up}") from None
            if time.monotonic() > last_answer + SILENT_SECONDS:
                raise LaunchError(f"no answer for an hour: {error}: {head.still_up}") from None
            if str(error) != last_error:
                logger.warning("%s: trying again every %.0f seconds", error, POLL_SECONDS)
            last_error = str(error)
        time.sleep(POLL_SECONDS)


def _fetch(head: "_Head", run: _Run, state: State) -> None:
    """Copy the run to this machine; a job that failed may have none."""
    if head.ray("rsync-down", str(head.file), f"{run.on_head}/", f"{run.local}/"):
        logger.info("the run is in %s", run.local)
        return
    home, _, path = run.on_head.partition("/")  # the shell expands ~ only if it is not quoted
    is_absent = f"test ! -e {home}/{shlex.quote(path)}"
    if state == "succeeded" or not head.ray("exec", str(head.file), is_absent):
        raise LaunchError(f"{run.on_head}: cannot be fetched: {head.still_up}")
    logger.warning("%s: the job ended before there was a run: nothing is fetched", run.on_head)


class _Head:
    """The cluster's head, reached by an ssh tunnel that is opened again whenever it dropped."""

    def __init__(self, file: Path, job: str, show: Callable[[str], None]) -> None:
        self.file = file
        self.job = job
        self.has_job = False  # whether the job runs on the cluster
        self.bill = f"costs money until 'ray down {file}'"
        self.still_up = f"whatever is up {self.bill}"
        self._show = show
        self._shown_lines = 0
        self._ssh: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        # Unbuffered, so that the sweep's lines are shown as they are written.
        self._env = {"RAY_AUTH_MODE": "token"} | self._env | {"PYTHONUNBUFFERED": "1"}
        # Without an activated environment, `ray` is beside this Python.
        path = (self._env.get("PATH", os.defpath), str(Path(sys.executable).parent))
        self._env["PATH"] = os.pathsep.join(path)

    def start(self) -> None:
        """Run `ray up`, and show its lines.

        Raises:
            LaunchError: it failed, for the reason that a provider gave, if there is one.
        """
        lines = []
        # Without a restart, a job on it continues. `ray` is found on the PATH above.
        up = subprocess.Popen(
            ["ray", "up", "--yes", "--no-restart", str(self.file)],  # noqa: S607 - as said
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with up, ended_on_error(up):
            assert up.stdout is not None
            for line in up.stdout:
                sys.stderr.write(line)
                lines.append(line)
        if up.returncode != 0:
            reason = known_meaning("".join(lines))
            raise LaunchError(f"'ray up' failed: {f'{reason}: ' if reason else ''}{self.still_up}")

    def ray(self, *words: str) -> bool:
        """Run a command of Ray's launcher, which prints its own errors; whether it succeeded."""
        command = subprocess.Popen(["ray", *words], env=self._env, stdout=STDERR)  # noqa: S607 - as above
        with command, ended_on_error(command):
            return command.wait() == 0

    def state(self) -> State:
        """State of the job.

        Raises:
            _UnreachableError: the cluster does not answer at the moment.
            LaunchError: the cluster will not answer later either.
        """
        reply = self._job_command("status", self.job)
        if "does not exist" in reply.stderr:
            return "absent"
        self._check(reply)
        ended = re.search(r"^Job '.*' (?:was )?(\w+)$", reply.stdout, flags=re.MULTILINE)
        state: State = next((s for s in ENDED if ended and s == ended[1]), "running")
        self.has_job = state == "running"
        return state

    def submit(self, folder: Path, words: Sequence[str]) -> None:
        """Submit the job without waiting for its end.

        Raises:
            _UnreachableError: the job may not have been accepted.
        """
        runtime_env = json.dumps({"working_dir": str(folder), "excludes": NOT_SENT})
        sweep = ("python", "-m", "orchestrator", *words)
        self._check(
            self._job_command(
                *("submit", "--no-wait", "--submission-id", self.job),
                *("--runtime-env-json", runtime_env, "--", *sweep),
            )
        )
        self.has_job = True
        logger.info("%s is on the cluster and continues there whatever happens here", self.job)

    def show_log(self) -> None:
        """Show the job's new output until the job ends or the connection drops."""
        lines = 0
        log = subprocess.Popen(
            self._command("logs", "--follow", self.job),
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        with log, ended_on_error(log):
            assert log.stdout is not None
            for line in log.stdout:
                if line.startswith(ADDED_BY_RAY):
                    continue
                lines += 1
                if lines > self._shown_lines:  # the log starts from its beginning each time
                    self._show(line.rstrip("\n"))
        self._shown_lines = max(lines, self._shown_lines)

    def _job_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        self._open()
        return subprocess.run(
            self._command(*words),
            env=self._env,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    def _command(self, name: str, *words: str) -> list[str]:
        plain = ("--log-style=pretty", "--log-color=false")
        return ["ray", "job", name, *plain, f"--address=http://127.0.0.1:{self._port}", *words]

    def _check(self, reply: subprocess.CompletedProcess[str]) -> None:
        if reply.returncode == 0:
            return
        lines = reply.stderr.strip().splitlines() or [f"ended with {reply.returncode}"]
        if "AuthenticationError" in reply.stderr:  # the next try would fail, too
            raise LaunchError(f"the cluster has another token than this machine: {self.still_up}")
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

    def close(self) -> None:
        """Close the tunnel."""
        if self._ssh is not None and self._ssh.poll() is None:
            os.killpg(self._ssh.pid, signal.SIGTERM)
            self._ssh.wait()
