"""Sweeps on a real Ray whose trials train on two ranks: into a bucket, and on a budget."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from builders.gangs import gone_within
from fakes.ray_sweeps import SPEC, ended, observations
from fakes.s3_server import BUCKET, S3Server, s3_server
from fakes.s3_sweeps import sent, start_sweep, undisturbed

from gpu_catalog.number_text import dollars
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Observation

GANGS = (
    SPEC.replace("[24, 32, 40]", "[24, 32]\n    parallel: [{gpus: 2, strategy: fsdp2}]")
    .replace("usd_per_hour: 0.10", "usd_per_hour: 3600, gpus_per_instance: 2")
    .replace("batch_size: 32", "batch_size: 2")  # which always fits
)
"""Two cells, whose trials run one after another at a dollar a second."""
TWO_CPUS = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}  # whatever this machine has
PATIENCE_SECONDS = 600.0  # for what takes seconds on an idle machine
SOON_SECONDS = 15.0  # a second where a core is free


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An empty bucket."""
    with s3_server() as server:
        yield server


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The specification."""
    file = tmp_path / "gangs.yaml"
    file.write_text(GANGS, encoding="utf-8")
    return file


def gangs(driver: int) -> list[psutil.Process]:
    """Fork server, parent of the ranks and ranks of a driver's trial."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            found += [process] if "gang_worker" in " ".join(process.cmdline()) else []
        except psutil.NoSuchProcess:
            continue
    return found


def assert_complete(probes: list[Observation]) -> None:
    """Check that nothing is lost or there twice, and that two ranks trained."""
    assert sorted(o.key for o in probes) == sorted(o.key for o in undisturbed(GANGS))
    assert {len(o.measurement.ranks) for o in probes if o.measurement} == {2}


@pytest.mark.long
def test_a_killed_driver_of_a_gang_is_resumed_on_another_machine(
    server: S3Server, spec: Path, tmp_path: Path
) -> None:
    """No rank outlives it, and nothing is lost or measured twice, though every third request fails.

    Of the two drivers, the first is killed once the bucket has an observation.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    out = ("--out", f"s3://{BUCKET}/gangs")
    sweep = start_sweep(server, first, str(spec), *out, **TWO_CPUS)
    end = time.monotonic() + PATIENCE_SECONDS
    while not (sent(server, "gangs") and gangs(sweep.pid)) and time.monotonic() < end:
        assert sweep.poll() is None, (first / "log").read_text()
        time.sleep(0.05)
    processes = gangs(sweep.pid)
    sweep.kill()
    assert gone_within(processes, SOON_SECONDS)
    sweep.wait()
    before = server.objects("gangs/observations/")
    assert before, (first / "log").read_text()
    server.fails_every = 3
    resumed = start_sweep(server, second, "--resume", *out, **TWO_CPUS)
    assert resumed.wait(timeout=PATIENCE_SECONDS) == 0, (second / "log").read_text()
    server.fails_every = 0
    assert server.objects("gangs/observations/").items() > before.items()
    assert_complete([o for o in sent(server, "gangs") if isinstance(o, Observation)])
    assert "Traceback" not in (first / "log").read_text() + (second / "log").read_text()


@pytest.mark.long
def test_a_sweep_of_gangs_ends_when_its_budget_is_spent(spec: Path, tmp_path: Path) -> None:
    """A gang costs its whole instance, and ends with its probe, or with its links, which cost too.

    More money takes it further.
    """
    budget, run = 0.5, tmp_path / "run"
    out = ("--out", str(run), "--budget-usd")
    done = ended(tmp_path, "sweep", str(spec), *out, str(budget), **TWO_CPUS)
    assert done.returncode == 0, done.stderr
    probes, logged = observations(run), RunFolder(run).logged()
    spent = sum(record.seconds for record in logged)
    assert budget <= spent <= budget + max(record.seconds for record in logged)
    assert "2 trials are excluded by the budget of $0.5: " in done.stderr
    assert f"spent: ${dollars(spent)}" in done.stderr
    more = ended(tmp_path, "sweep", "--resume", *out, "10000", **TWO_CPUS)
    assert more.returncode == 0, more.stderr
    assert observations(run)[: len(probes)] == probes
    assert_complete(observations(run))
