"""A sweep on a real Ray whose trials train on one and on several ranks, one of which is killed."""

import contextlib
import json
import statistics
import time
from pathlib import Path

import psutil
import pytest
from builders.long_cases import long_cases
from fakes.ray_sweeps import observations, start_sweep

from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.local_storage import OBSERVATIONS
from trials.records.observation import Outcome, largest_batch

SPEC = """\
name: gangs
gpus: [cpu-small]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [64]
    parallel: [LAYOUT]
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [64]
workload: {examples: 100, epochs: 1}
seed: 3
max_batch_size: 4
boundary_repeats: 0
timing: {warmup_steps: 0, warmup_seconds: 0.0, max_steps: 6, max_seconds: 0.2}
catalog:
  gpus:
    - key: cpu-small
      kind: cpu
      usable_memory_bytes: 16000000
      source: made for this test
      recorded: 2026-11-20
  offers:
    - {gpu: cpu-small, provider: own, region: here, instance: desk, usd_per_hour: 0.10,
       source: made for this test, recorded: 2026-11-20}
    - {gpu: cpu-small, provider: own, region: here, instance: box, usd_per_hour: 0.30,
       gpus_per_instance: 4, source: made for this test, recorded: 2026-11-20}
"""
FOUR_CPUS = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 4}'}  # whatever this machine has
FSDP2, TP = "2xfsdp2", "4xtp-2degree"
LAYOUTS = {FSDP2: "{gpus: 2, strategy: fsdp2}", TP: "{gpus: 4, strategy: tp, degree: 2}"}


def kill_a_rank(driver: int, gpus: int, out: Path) -> None:
    """Kill the last rank of a gang that has all, once the links were timed.

    Again if no probe has failed by that: the rank had just ended.
    """
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        is_timed = (out / OBSERVATIONS).exists() and RunFolder(out).links()
        rank = last_rank(driver, gpus) if is_timed else None
        if rank is None:
            time.sleep(0.05)
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        reported_by = time.monotonic() + 60
        while time.monotonic() < reported_by:
            if any(o.outcome is Outcome.FAILED for o in observations(out)):
                return
            time.sleep(0.1)
    raise AssertionError("no gang ever ran")


def last_rank(driver: int, gpus: int) -> psutil.Process | None:
    """The last rank of the first gang that has so many; None without one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(driver).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = process.children()
                if "gang_worker" in " ".join(process.cmdline()) and len(ranks) == gpus:
                    return max(ranks, key=lambda rank: rank.pid)
    return None


@pytest.fixture(scope="module", params=[FSDP2, *long_cases([TP])])
def layout(request: pytest.FixtureRequest) -> str:
    """Layout of the sweep's gang."""
    return str(request.param)


@pytest.fixture(scope="module")
def run(layout: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A complete sweep in which one rank was killed."""
    home = tmp_path_factory.mktemp("home")
    (home / "gangs.yaml").write_text(SPEC.replace("LAYOUT", LAYOUTS[layout]), encoding="utf-8")
    sweep = start_sweep(home / "gangs.yaml", home / "run", home, **FOUR_CPUS)
    kill_a_rank(sweep.pid, int(layout[0]), home / "run")
    assert sweep.wait(timeout=1800) == 0, (home / "run.log").read_text()
    return RunFolder(home / "run")


def test_a_killed_rank_costs_one_probe_and_nothing_is_lost_or_measured_twice(
    layout: str, run: RunFolder
) -> None:
    """The probe failed by that rank, the trial went on, and every probe is there once."""
    probes = observations(Path(str(run.path)))
    failed = [o.detail for o in probes if o.outcome is Outcome.FAILED]
    assert failed == [f"rank {int(layout[0]) - 1}: the child was killed by SIGKILL"]
    assert len({o.key for o in probes}) == len(probes)
    assert largest_batch([o for o in probes if o.cell.key.endswith(f"/{layout}")]) is not None


def test_links_are_timed_once_and_are_no_probe(layout: str, run: RunFolder) -> None:
    """The first line of their cell has them, with the node of the ranks."""
    (link,) = run.links()
    assert next(record for record in run.logged() if record.cell == link.cell) == link
    assert link.outcome is Outcome.FITS
    assert link.cell.key.endswith(f"/{layout}")
    assert {time.collective for time in link.times} == {
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    }
    assert link.environment is not None
    assert link.node_ids == (link.environment.node_id,)
    assert link.environment.backend == "gloo"


def test_ranks_share_what_one_process_holds_alone(layout: str, run: RunFolder) -> None:
    """Shards leave room for larger batches, on the node that each rank names."""
    of_cell: dict[int, list[object]] = {}
    for o in observations(Path(str(run.path))):
        of_cell.setdefault(o.cell.ranks, []).append(o)
        if o.measurement is not None:
            nodes = {rank.node_id for rank in o.measurement.ranks}
            assert nodes == (set() if o.cell.ranks == 1 else {o.environment.node_id})
            assert len(o.measurement.ranks) == (0 if o.cell.ranks == 1 else o.cell.ranks)
    alone, shared = (largest_batch(of_cell[ranks]) for ranks in (1, int(layout[0])))
    assert alone is not None
    assert shared is not None
    assert alone[0] < shared[0]


def test_a_family_holds_its_layout(layout: str, run: RunFolder) -> None:
    """Step times of several ranks are never fitted together with those of one process."""
    fits = json.loads((Path(str(run.path)) / "fits.json").read_text(encoding="utf-8"))
    layouts = [family["name"].get("layout") for family in fits["families"]]
    assert sorted(layouts, key=str) == [layout, None]


def test_a_gang_is_priced_by_whole_instances_with_enough_gpus(layout: str, run: RunFolder) -> None:
    """It has no row on an instance of one GPU, and its throughput is that of all ranks."""
    ranking = json.loads((Path(str(run.path)) / "ranking.json").read_text(encoding="utf-8"))
    rows = [row for row in ranking["offers"] if row["cell"].get("parallel") is not None]
    assert [row["cell"]["parallel"]["gpus"] for row in rows] == [int(layout[0])]
    assert {row["instance"] for row in rows} == {"box"}
    for row in rows:
        parallel = row["cell"]["parallel"]
        steps = [
            seconds
            for o in observations(Path(str(run.path)))
            if o.cell.ranks == parallel["gpus"]
            and o.is_timing
            and o.batch_size == row["batch_size"]
            for seconds in o.micro_batch_seconds
        ]
        batches = parallel["gpus"] // parallel.get("degree", 1)  # ranks of a group share one
        expected = batches * row["batch_size"] / statistics.median(steps)
        assert row["examples_per_second"] == pytest.approx(expected)
    report = (Path(str(run.path)) / "report.md").read_text(encoding="utf-8")
    assert f"{layout[0]}xcpu-small {layout[2:].partition('-')[0]}" in report
