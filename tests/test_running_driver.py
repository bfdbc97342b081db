"""A sweep whose own Ray dies under it."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from builders.gangs import link_times
from builders.observations import environment, observation
from builders.runs import TWO_CELLS, LineDevice, spec_of

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.ray_backend import own_ray
from orchestrator.ray_backend.errors import RayEndedError
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running import driver, trial_executor
from orchestrator.running.driver import STARTS_IN_VAIN, log_stand_ins, measure
from orchestrator.running.recorder import ObservationRecorder
from orchestrator.running.session import SweepSession
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.strategy import ExhaustiveStrategy
from trials.profile_trial import ProfileTask
from trials.records.cell import Cell
from trials.records.observation import Observation, Outcome
from trials.records.profile import Logged
from trials.run_trial import run_trial

SPEC = spec_of(TWO_CELLS)
DEATH = "Ray on this machine has ended: its raylet died"


class MortalRay:
    """A Ray that runs trials and dies with each of the given numbers of probes.

    Attributes:
        starts: how often it was started.
    """

    def __init__(self, *lifetimes: int) -> None:
        self._lifetimes = list(lifetimes)
        self.starts = 0

    def connected(self, *, folder: Path, **_: Any) -> Any:
        """Start it."""
        self.starts += 1
        (folder / "session_latest" / "logs").mkdir(parents=True, exist_ok=True)
        return nullcontext(ClusterResources((Node({"CPU": 1.0}, None, "n1"),)))

    def run(self, scheduler: Scheduler, recorder: ObservationRecorder, *_: Any) -> None:
        """Run trials until it dies or none is left."""
        probes = self._lifetimes.pop(0) if self._lifetimes else 10**6
        left = iter(range(probes))
        while (placement := scheduler.next()) is not None:
            task, cell = placement.task, placement.task.cell
            assert not isinstance(task, ProfileTask)
            scheduler.started(cell)
            scheduler.located(cell, NodeAddress("n1", "10.0.0.1"))

            def emit(observation: Observation) -> None:
                recorder.observed(observation)
                scheduler.observed(observation)
                if next(left, None) is None:
                    raise RayEndedError(DEATH)

            if probes == 0:
                scheduler.interrupted(DEATH)
                raise RayEndedError(DEATH)
            try:
                run_trial(task, LineDevice(40, environment()), emit)
            except RayEndedError:
                scheduler.interrupted(DEATH)
                raise
            scheduler.ended(cell, None)


def swept(ray: MortalRay, place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, Plan]:
    """The run and the plan that a sweep on this Ray leaves."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(driver, "cluster_address", lambda: None)
    monkeypatch.setattr(driver, "connected_cluster", ray.connected)
    monkeypatch.setattr(trial_executor, "run_trials", ray.run)
    run, rates = open_run(place / "run", TWO_CELLS, SPEC), NodePrices(SPEC.merged_catalog())
    with ObservationWriter(run) as writer:
        session = SweepSession(run, writer, SPEC, rates)
        plan = measure(session, ExhaustiveStrategy(SPEC, rates), wait_seconds=60)
    return run, plan


def test_a_sweep_starts_another_ray_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it dies, as long as each brought an observation; the faults say it."""
    ray = MortalRay(2, 0, 0, 3, 0, 0)
    with caplog.at_level(logging.WARNING):
        run, plan = swept(ray, tmp_path, monkeypatch)
    assert ray.starts == 7
    assert set(plan.complete) == set(SPEC.all_cells())
    keys = [o.key for o in run.observations()]
    assert len(keys) == len(set(keys))
    assert caplog.messages == [f"{DEATH}; starting Ray again"] * 6
    assert {fault.reason for fault in run.faults().faults} == {DEATH}


class StarvedRay(MortalRay):
    """A Ray on a host that runs out of memory in every probe, or once links were timed."""

    def __init__(self, result: Callable[[int, Cell], Logged]) -> None:
        super().__init__()
        self._result = result

    def run(self, scheduler: Scheduler, recorder: ObservationRecorder, *_: Any) -> None:
        """Report one result without a verdict on a probe, and die."""
        assert self.starts < 10
        placement = scheduler.next()
        assert placement is not None
        cell = placement.task.cell
        scheduler.started(cell)
        recorder.observed(self._result(self.starts, cell))
        scheduler.interrupted(DEATH)
        raise RayEndedError(DEATH)


@pytest.mark.parametrize(
    "ray",
    [
        MortalRay(*[0] * 10),
        StarvedRay(lambda start, cell: observation(start, Outcome.HOST_OUT_OF_MEMORY, cell=cell)),
        StarvedRay(
            lambda start, cell: link_times(cell, node_ids=(f"n{start}",), started_at=f"at {start}")
        ),
    ],
    ids=["no result", "no verdict", "times of links"],
)
def test_a_ray_that_never_lives_ends_the_sweep_in_a_line(
    ray: MortalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or never until a verdict on a probe; the same command continues it."""
    monkeypatch.setattr(own_ray, "folder_of_own_ray", lambda: nullcontext(tmp_path))
    with pytest.raises(RayEndedError, match=r"3 times in a row: .* same command") as error:
        swept(ray, tmp_path, monkeypatch)
    assert str(error.value).endswith(f"Ray's logs are in {tmp_path / 'session_latest' / 'logs'}")
    assert "\n" not in str(error.value)
    assert ray.starts == STARTS_IN_VAIN


class WorkerlessRay(MortalRay):
    """A Ray whose node starts no worker."""

    def run(self, scheduler: Scheduler, *_: Any) -> None:
        """Give up every cell."""
        scheduler.no_node |= dict.fromkeys(SPEC.all_cells(), "the node started no worker")


@pytest.mark.parametrize(("ray", "lines"), [(MortalRay(2), 0), (WorkerlessRay(), 1)])
def test_rays_logs_stay_where_they_say_why_cells_were_given_up(
    ray: MortalRay,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line says where they are."""
    monkeypatch.setattr(own_ray, "folder_of_own_ray", lambda: nullcontext(tmp_path))
    with caplog.at_level(logging.INFO, logger=own_ray.__name__):
        swept(ray, tmp_path, monkeypatch)
    logs = f"Ray's logs are in {tmp_path / 'session_latest' / 'logs'}"
    assert caplog.messages.count(logs) == lines
    assert (tmp_path / "kept").exists() == bool(lines)


def test_a_cpu_that_no_node_declares_is_named_before_any_cores_measure_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sweep that is resumed on another machine would else mix two machines in silence."""
    rows = "{kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31, key: "
    spec = spec_of(
        f"catalog: {{gpus: [{rows}desk}}, {rows}lap}}]}}\n"
        + TWO_CELLS.replace("[cpu]", "[desk, lap, cpu]")
    )
    catalog, nodes = spec.merged_catalog(), ClusterResources((Node({"CPU": 2.0, "lap": 1.0}),))
    with caplog.at_level(logging.WARNING):
        log_stand_ins(make_plan(spec, catalog, nodes, []), nodes, catalog)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["desk"]
