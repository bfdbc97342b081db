"""`launch` takes a cluster down only when Ray reports that the job has ended."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from builders.gangs import gone_within

from orchestrator.cli.main import main
from orchestrator.clouds import launch, process_tree

SPEC = """\
name: small
gpus: [L4]
cells:
  - {models: [llama-tiny], recipes: [{method: full, precision: fp32}], seq_lens: [32]}
workload: {examples: 100, epochs: 1}
"""
BUCKET = ("--out", "s3://bucket/run")
ABSENT = "echo 'RuntimeError: 404: Job launch-my does not exist' >&2; exit 1"
CLOSED = "echo 'ConnectionError: Failed to connect to Ray' >&2; exit 1"
ENDED = "echo \"Job 'launch-my' {}\""
RUNS = "echo \"Status for job 'launch-my': RUNNING\""


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Function that launches with a scripted `ray`, and returns exit status and calls."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.0)
    Path("my.yaml").write_text(SPEC, encoding="utf-8")
    Path("cluster.yaml").write_text("cluster_name: x\n", encoding="utf-8")

    def launched(
        *options: str,
        spec: str = "my.yaml",
        status: list[str],
        up: str = "true",
        submit: str = "true",
        fetch: str = "true",
        is_absent: str = "true",
        down: str = "true",
    ) -> list[str]:
        answers = [f"{n}) {text} ;;" for n, text in enumerate(status, start=1)]
        script = [
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls',
            f"n=$(grep -c '^job status' {tmp_path}/calls)",
            'case "$1 $2" in',
            f'"job status") case $n in {" ".join(answers)} *) {status[-1]} ;; esac ;;',
            f'"job submit") {submit} ;;',
            r'"job logs") echo one; printf "two \377\n" ;;',
            f"up*) {up} ;;",
            f"rsync-down*) {fetch} ;;",
            f"exec*) {is_absent} ;;",
            f"down*) {down} ;;",
            "esac",
        ]
        ray = tmp_path / "ray"
        ray.write_text("\n".join(script), encoding="utf-8")
        ray.chmod(0o755)
        ended = main(["launch", "cluster.yaml", spec, *options])
        calls = tmp_path / "calls"
        lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
        return [str(ended), *(line for line in lines if not line.startswith("dashboard"))]

    return launched


def test_it_waits_until_the_job_has_ended(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Connections drop; the log of each new one starts from its beginning, and is shown once."""
    states = [CLOSED, ABSENT, RUNS, CLOSED, RUNS, ENDED.format("succeeded")]
    ended, *calls = laptop(*BUCKET, "--budget-usd", "20", status=states)
    assert ended == "0"
    assert calls[0].split() == ["up", "--yes", "--no-restart", "cluster.yaml"]
    assert calls[-1] == "down --yes cluster.yaml"
    assert sum(call.startswith("down") for call in calls) == 1
    (submit,) = (call for call in calls if call.startswith("job submit"))
    sweep = "-- python -m orchestrator sweep my.yaml --out s3://bucket/run --budget-usd 20"
    assert submit.endswith(sweep)
    assert "--no-wait" in submit
    assert "-id launch-my" in submit
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo \ufffd\n"
    assert shown.err.count("Failed to connect to Ray") == 2  # once for each time it was lost


@pytest.mark.parametrize("state", ["failed", "was stopped"])
def test_a_sweep_that_failed_takes_the_cluster_down_too(
    state: str, laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A second `launch` sees that, submits nothing and shows the log."""
    ended, *calls = laptop(*BUCKET, status=[ENDED.format(state)])
    assert ended == "1"
    assert calls[-1] == "down --yes cluster.yaml"
    assert not any(call.startswith("job submit") for call in calls)
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo \ufffd\n"
    assert "launch-my is already" in shown.err


def test_a_run_is_fetched_before_the_head_goes(laptop: Callable[..., list[str]]) -> None:
    """The specification is a link beside its files; its target may be gone by then."""
    Path("elsewhere").mkdir()
    Path("my.yaml").rename("elsewhere/the.yaml")
    Path("my.yaml").symlink_to("elsewhere/the.yaml")
    states = [ABSENT, ENDED.format("succeeded")]
    ended, *calls = laptop(status=states, submit="rm elsewhere/the.yaml")
    assert ended == "0"
    (submit,) = (call for call in calls if call.startswith("job submit"))
    assert f'"working_dir": "{Path.cwd()}"' in submit
    fetch, down = calls[-2:]
    assert fetch.split() == ["rsync-down", "cluster.yaml", "~/runs/small/", "runs/small/"]
    assert down.startswith("down ")


@pytest.mark.parametrize(
    ("state", "is_absent", "line"),
    [
        ("failed", "true", "launch-my failed; the cluster is down"),
        ("failed", "exit 1", "~/runs/a b: cannot be fetched: the cluster is up and costs money"),
        ("succeeded", "true", "~/runs/a b: cannot be fetched: the cluster is up and costs money"),
    ],
)
def test_a_run_that_cannot_be_fetched_is_not_lost(
    state: str,
    is_absent: str,
    line: str,
    laptop: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The cluster goes down only if the head has no run."""
    ended, *calls = laptop(
        *("--out", "runs/a b"), status=[ENDED.format(state)], fetch="exit 1", is_absent=is_absent
    )
    assert ended == "1"
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert (calls[-1] == "down --yes cluster.yaml") is ("is down" in line)
    checks = [call for call in calls if call.startswith("exec")]
    expected = "exec cluster.yaml test ! -e ~/'runs/a b'"
    assert checks == ([] if state == "succeeded" else [expected])


def test_a_head_that_accepts_no_job_yet_gives_one_line(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A head may need minutes to accept jobs."""
    states = [ABSENT, ABSENT, ABSENT, ENDED.format("succeeded")]
    assert laptop(*BUCKET, status=states, submit=CLOSED)[0] == "0"
    shown = capsys.readouterr().err
    assert shown.count("Failed to connect to Ray") == 1
    assert "is already" not in shown


@pytest.mark.parametrize(
    ("at", "status", "line"),
    [
        ("up", RUNS, "whatever is up costs money"),
        ("submit", ABSENT, "the cluster is up and costs money"),
        ("status", RUNS, "launch-my continues on the cluster: the cluster is up and costs money"),
        ("fetch", ENDED.format("failed"), "the cluster is up and costs money"),
        ("down", ENDED.format("failed"), "whatever is up costs money"),
    ],
)
def test_stopping_it_prints_what_is_up(
    at: str,
    status: str,
    line: str,
    laptop: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C at any point prints the running cluster and the command that ends it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = "sleep 0.5; kill -INT $PPID; exit 1"  # by then, `Popen` has returned to its caller
    given = {"status": [status, stop]} if at == "status" else {"status": [status], at: stop}
    try:
        ended, *_ = laptop(**given)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == "130"
    *_, up, stopped = capsys.readouterr().err.splitlines()
    assert up.startswith(line)
    assert up.endswith("'ray down cluster.yaml'")
    assert stopped.startswith("stopped: ")


@pytest.mark.parametrize(("trap", "seconds"), [("", 5.0), ("trap '' TERM; ", 0.0)])
def test_stopping_it_ends_what_ray_has_started(
    trap: str, seconds: float, laptop: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head would start, and be paid for, after "stopped"; also where SIGTERM ends nothing."""
    monkeypatch.setattr(process_tree, "END_SECONDS", seconds)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        up = f"{trap}sleep 30 & echo $! $$ > started; sleep 0.5; kill -INT $PPID; wait"
        assert laptop(*BUCKET, status=[RUNS], up=up)[0] == "130"
    finally:
        signal.signal(signal.SIGINT, before)
    started = [int(pid) for pid in Path("started").read_text(encoding="utf-8").split()]
    assert gone_within([one for one in psutil.process_iter() if one.pid in started], 10.0)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"status": [CLOSED], "up": "echo 'An error occurred (VcpuLimitExceeded)' >&2; exit 1"},
            "'ray up' failed: the account's quota is used up: request a larger one from",
        ),
        (
            {"status": [CLOSED], "up": "echo 'no such host'; exit 1"},
            "'ray up' failed: whatever is up costs money until 'ray down cluster.yaml'",
        ),
        (
            {"status": [CLOSED], "up": r"printf 'not UTF-8: \377\n'; exit 1"},
            "'ray up' failed: whatever is up costs money until 'ray down cluster.yaml'",
        ),
        (
            {"status": [ABSENT], "submit": CLOSED},
            "the job is not accepted: ConnectionError: Failed to connect to Ray: the cluster is up",
        ),
        ({"status": [CLOSED]}, "no answer for an hour: ConnectionError"),
        (
            {"status": ["echo AuthenticationError >&2; exit 1"]},
            "the cluster has another token than this machine: the cluster is up",
        ),
        (
            {"status": [ENDED.format("succeeded")], "down": "exit 1"},
            "'ray down' failed: whatever is up costs money until 'ray down cluster.yaml'",
        ),
    ],
)
def test_a_failure_prints_what_is_up(
    given: dict[str, object],
    line: str,
    laptop: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line names the running cluster; nothing that may still work was taken down."""
    monkeypatch.setattr(launch, "SUBMIT_SECONDS", 0.0)
    monkeypatch.setattr(launch, "SILENT_SECONDS", 60.0 if "submit" in given else 0.0)
    ended, *calls = laptop(*BUCKET, **given)
    assert ended == "1"
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert any(call.startswith("down") for call in calls) is ("down" in given)


def test_ray_is_found_without_an_activated_environment(
    laptop: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `ray` beside this Python is used."""
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    ended, *calls = laptop(*BUCKET, status=[ENDED.format("succeeded")])
    assert ended == "0"
    assert calls[-1] == "down --yes cluster.yaml"


def test_invalid_input_starts_nothing(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of another launcher, a wrong specification or an unknown option is an error."""
    for text in ("kind: RayCluster\n", "kind: Claim\n---\nkind: RayJob\n"):
        Path("cluster.yaml").write_text(text, encoding="utf-8")
        assert laptop(status=[ENDED.format("failed")]) == ["1"]
        assert "cluster.yaml: not a cluster file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        laptop("--budget", "much", status=[ENDED.format("failed")])
    Path("my.yaml").write_text(SPEC.replace("L4", "L5"), encoding="utf-8")
    assert laptop(status=[ENDED.format("failed")]) == ["1"]
    assert "L5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "# YOUR_COMMENT\nimage: YOUR_REGISTRY/x:cpu\nips: [YOUR_H100-SXM_HOST, YOUR_HEAD]\n",
            ["cluster.yaml: fill in YOUR_REGISTRY, YOUR_H100-SXM_HOST, YOUR_HEAD: nothing was"],
        ),
        (
            "file_mounts: {~/.ray/auth_token: ~/.ray/auth_token, ~/here: .}\n",
            ["cluster.yaml: ~/.ray/auth_token, which nodes get, is not on this machine: 'ray get-"],
        ),
        (
            "x: YOUR_KEY\nfile_mounts: {a: ~/.cache/huggingface/token, b: /no/file}\n",
            [
                "cluster.yaml: fill in YOUR_KEY: nothing was started",
                "cluster.yaml: ~/.cache/huggingface/token, which nodes get, is not on this machine",
                "cluster.yaml: /no/file, which nodes get, is not on this machine: put it there",
            ],
        ),
    ],
)
def test_an_unfinished_cluster_file_starts_nothing(
    text: str,
    lines: list[str],
    laptop: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Values to fill in, and files that Ray would miss with a traceback, one line each."""
    monkeypatch.setenv("HOME", "/nowhere")
    Path("cluster.yaml").write_text(f"cluster_name: x\n{text}", encoding="utf-8")
    assert laptop(status=[ENDED.format("failed")]) == ["1"]
    for shown, line in zip(capsys.readouterr().err.splitlines(), lines, strict=True):
        assert shown.startswith(line)
        assert shown.endswith(": nothing was started")
    assert not Path("runs").exists()


def test_files_that_are_not_sent_start_nothing(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them are listed at once; neither does a run whose folder cannot be created."""
    Path("mine.yaml").touch()
    Path("runs").write_text("", encoding="utf-8")
    files = ("--catalog", str(Path("mine.yaml").absolute()), "--prices", "../my.csv")
    more = ("--prices", "shipped", "--constants", "runs/constants.json", "--dry-run")
    assert laptop(*files, *more, status=[ENDED.format("failed")]) == ["1"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("--dry-run:", "--catalog", "--prices", "--constants"),
    ]
    assert "../my.csv: not in" in lines[2]
    assert laptop(status=[ENDED.format("failed")]) == ["1"]
    assert capsys.readouterr().err.startswith("runs/small: cannot ")
    assert laptop("--out", "gs://bucket/run", status=[ENDED.format("failed")]) == ["1"]


def test_files_beside_the_specification_go_along(laptop: Callable[..., list[str]]) -> None:
    """Paths are relative to its folder, wherever `launch` runs; a file defines the sweep's GPU."""
    gpu = "{key: mine, kind: cpu, usable_memory_bytes: 50331648, source: me, recorded: 2026-11-20}"
    Path("sweeps").mkdir()
    Path("sweeps/gpus.yaml").write_text(f"gpus: [{gpu}]\n", encoding="utf-8")
    Path("my.yaml").unlink()
    Path("sweeps/my.yaml").write_text(SPEC.replace("L4", "mine"), encoding="utf-8")
    options = (*BUCKET, "--catalog", "gpus.yaml")
    assert laptop(*options, spec="sweeps/my.yaml", status=[ENDED.format("succeeded")])[0] == "0"


def test_a_command_that_needs_the_cluster_names_the_wrong_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RAY_ADDRESS is set to the address for `ray job submit`."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    (tmp_path / "my.yaml").write_text(SPEC, encoding="utf-8")
    assert main(["plan", str(tmp_path / "my.yaml")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "http://127.0.0.1:8265" in err
