"""Nodes far slower than others with the same GPU are reported, and their timings repeated."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from builders.observations import environment
from builders.runs import TWO_CELLS, LineDevice, spec_of, whole_trial

from fitting.families.cell_step_time import StepTimeSource
from fitting.points.observation_columns import columns_of
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import trial_task
from orchestrator.planning.slow_nodes import slow_nodes
from orchestrator.reporting.sections.recipe_section import compare_recipes
from orchestrator.reporting.sections.trouble_section import slow_nodes_section, slow_nodes_text
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import open_run
from orchestrator.running import driver, trial_executor
from orchestrator.running.driver import measure
from orchestrator.running.recorder import ObservationRecorder, RunJournal
from orchestrator.running.session import SweepSession
from orchestrator.running.trial_executor import TrialExecutor
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.strategy import ExhaustiveStrategy
from orchestrator.spec.sweep_spec import SweepSpec
from trials.profile_trial import ProfileTask
from trials.records.cell import Cell
from trials.records.observation import Observation, RankReading, without_superseded
from trials.run_trial import run_trial
from trials.trial import next_probe

SPEC = spec_of(TWO_CELLS)
SHORT, LONG = SPEC.all_cells()


def timed_on(cell: Cell, host: str, *, times: float, spec: SweepSpec = SPEC) -> list[Observation]:
    """Observations of a trial on a node whose steps take a multiple of the normal time."""
    observations = []
    for o in whole_trial(cell, spec, where=environment(host=host, node_id=host * 4)):
        if o.measurement is None:
            observations.append(o)
            continue
        steps = tuple(seconds * times for seconds in o.measurement.step_seconds)
        slower = o.measurement.model_copy(update={"step_seconds": steps})
        observations.append(o.model_copy(update={"measurement": slower}))
    return observations


def timed_again(observations: list[Observation]) -> list[Observation]:
    """Observations of a trial on the fast node that repeats the slow node's timings."""
    done = [o for o in observations if o.cell == LONG]
    task = trial_task(SPEC, SPEC.merged_catalog(), LONG, done)
    task = task.model_copy(update={"slow_nodes": ("slow" * 4,)})
    quick = LineDevice(40, environment(host="quick", node_id="quick" * 4))
    repeats: list[Observation] = []
    run_trial(task, quick, repeats.append)
    return repeats


def test_a_node_ten_times_slower_is_reported_with_its_cells() -> None:
    """The comparison works across cells, since no two nodes of a sweep time the same one."""
    observations = [*timed_on(SHORT, "quick", times=1), *timed_on(LONG, "slow", times=10)]
    (slow_node,) = slow_nodes(observations)
    assert (slow_node.host, slow_node.cells, list(slow_node.standing)) == ("slow", (LONG,), [LONG])
    # Its examples are twice as long, and a step of this device takes as long whatever their length.
    assert 4 < slow_node.times < 11
    assert "| slow (slowslow) | " in slow_nodes_section(slow_nodes(observations))
    assert "do not trust" in " ".join(slow_nodes_text(slow_nodes(observations)))


def test_timings_of_a_slow_node_are_repeated_and_excluded() -> None:
    """Step times, laws and tables ignore them; the search for the largest batch is kept."""
    slow = timed_on(LONG, "slow", times=10)
    first = [*timed_on(SHORT, "quick", times=1), *slow]
    again = timed_again(first)
    assert {o.purpose for o in again} == {"ladder"}
    assert len({o.key for o in (*first, *again)}) == len(first) + len(again)
    every, honest = [*first, *again], timed_on(LONG, "quick", times=1)

    def results(observations: list[Observation]) -> list[object]:
        of_cell = [o for o in observations if o.cell == LONG]
        columns = columns_of(observations)
        of_long = columns.timed & (columns.cell == columns.cells.index(LONG))
        return [
            StepTimeSource(of_cell, ()).timed(LONG),
            sorted(columns.step_seconds[of_long]),
            compare_recipes(of_cell),
        ]

    assert (
        results(every) == results([*timed_on(SHORT, "quick", times=1), *honest]) != results(first)
    )
    (slow_node,) = slow_nodes(every)
    assert (slow_node.cells, dict(slow_node.standing)) == ((LONG,), {})
    assert "elsewhere" in " ".join(slow_nodes_text(slow_nodes(every)))
    assert [o for o in without_superseded(every) if not o.is_timing] == [
        o for o in every if not o.is_timing
    ]
    task = trial_task(SPEC, SPEC.merged_catalog(), LONG, every)
    assert next_probe(task, [o for o in every if o.cell == LONG]) is None


def test_slow_timings_without_a_repeat_are_kept_and_reported() -> None:
    """A budget may be spent, or the other node gone, before all timings are repeated."""
    observations = [*timed_on(SHORT, "quick", times=1), *timed_on(LONG, "slow", times=10)]
    *again, last = timed_again(observations)
    (slow_node,) = slow_nodes([*observations, *again])
    assert dict(slow_node.standing) == {LONG: (last.batch_size,)}


def test_nodes_that_differ_by_ordinary_variation_are_not_slow() -> None:
    """A lone node is not slow either: there is nothing to compare it with."""
    assert slow_nodes(timed_on(SHORT, "alone", times=10)) == []
    observations = [*timed_on(SHORT, "quick", times=1), *timed_on(SHORT, "slower", times=2)]
    assert slow_nodes(observations) == []
    assert slow_nodes_section(slow_nodes(observations)) == ""


def of_batch(observations: list[Observation], *batch_sizes: int) -> list[Observation]:
    """Timings of a node at some batch sizes."""
    return [o for o in observations if o.is_timing and o.batch_size in batch_sizes]


@pytest.mark.parametrize(("times", "hosts"), [(3.99, []), (4.0, ["slow"]), (4.01, ["slow"])])
def test_a_node_is_slow_from_four_times_as_long(times: float, hosts: list[str]) -> None:
    """Both nodes timed the same batch size; a factor of exactly four is slow."""
    observations = [*timed_on(SHORT, "quick", times=1), *timed_on(SHORT, "slow", times=times)]
    assert [node.host for node in slow_nodes(of_batch(observations, 40))] == hosts


@pytest.mark.parametrize(("largest", "compared"), [(60, 2), (61, 0)])
def test_batches_are_compared_up_to_one_and_a_half_times_the_tokens(
    largest: int, compared: int
) -> None:
    """A larger batch hides more of the fixed time of a step, so the node itself may be as fast."""
    slow = of_batch(timed_on(SHORT, "slow", times=10), 40)
    quick = of_batch(timed_on(SHORT, "quick", times=1), 40)
    quick = [o.model_copy(update={"batch_size": largest}) for o in quick]
    assert sum(node.compared for node in slow_nodes([*slow, *quick])) == compared * len(quick)


def timed_on_both(first: str, second: str, *, times: float) -> list[Observation]:
    """Observations of a trial with a rank on each of two nodes."""
    node_ids = (first * 4, second * 4)
    ranks = tuple(
        RankReading(rank=rank, node_id=node_id, peak_allocated_bytes=1)
        for rank, node_id in enumerate(node_ids)
    )
    return [
        o
        if o.measurement is None
        else o.model_copy(update={"measurement": o.measurement.model_copy(update={"ranks": ranks})})
        for o in timed_on(SHORT, first, times=times)
    ]


def test_a_slow_node_of_several_is_the_one_without_which_they_are_quick() -> None:
    """The first node takes part in quick batches too; those of the slow one are timed again."""
    slow = timed_on_both("one", "two", times=10)
    (slow_node,) = slow_nodes([*slow, *timed_on_both("one", "three", times=1)])
    assert slow_node.node_id == "two" * 4
    assert {*slow_node.standing} == {SHORT}
    task = trial_task(SPEC, SPEC.merged_catalog(), SHORT, slow)
    assert next_probe(task, slow) is None
    again = next_probe(task.model_copy(update={"slow_nodes": (slow_node.node_id,)}), slow)
    assert again is not None
    assert again.purpose == "ladder"


DESKS = (
    TWO_CELLS.replace("[cpu]", "[desk]")
    + """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
"""
)


class QuickDesk:
    """A cluster that a fast node with a desk GPU joins during the sweep."""

    def __init__(self) -> None:
        self.begun = ClusterResources((Node({}, None, "head"),))
        desk = Node({"CPU": 1.0, "desk": 1.0}, None, "new")
        self.now = ClusterResources((*self.begun.nodes, desk))

    def run(self, scheduler: Scheduler, keeper: ObservationRecorder, *_: Any) -> None:
        """Run the trial as Ray would."""
        while (placement := scheduler.next()) is not None:
            assert placement.resources == {"CPU": 1.0, "desk": 1.0}
            task, cell = placement.task, placement.task.cell
            assert not isinstance(task, ProfileTask)
            scheduler.started(cell)
            scheduler.located(cell, NodeAddress("new", "10.0.0.9"))

            def emit(observation: Observation) -> None:
                keeper.observed(observation)
                scheduler.observed(observation)

            run_trial(task, LineDevice(40, environment(host="new", node_id="new")), emit)
            scheduler.ended(cell, None)


def test_a_node_that_joins_a_resumed_sweep_repeats_slow_timings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU had no node at the start; a cell that the new node completes is no longer skipped."""
    spec, cluster = spec_of(DESKS), QuickDesk()
    short, long = spec.all_cells()
    slow = [o for o in timed_on(long, "slow", times=10, spec=spec) if o.repeat == 0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "cluster_address", lambda: "ray")
    monkeypatch.setattr(driver, "connected_cluster", lambda **_: nullcontext(cluster.begun))
    monkeypatch.setattr(trial_executor, "cluster_now", lambda: cluster.now)
    monkeypatch.setattr(trial_executor, "run_trials", cluster.run)
    run = open_run(tmp_path / "run", DESKS, spec)
    with ObservationWriter(run) as writer:
        for observation in (*timed_on(short, "quick", times=1, spec=spec), *slow):
            writer.append(observation)
        rates = NodePrices(spec.merged_catalog())
        session = SweepSession(run, writer, spec, rates)
        plan = measure(session, ExhaustiveStrategy(spec, rates), wait_seconds=60)
    (slow_node,) = slow_nodes(run.observations())
    assert (slow_node.host, slow_node.standing) == ("slow", {})
    assert (plan.complete, plan.skipped) == ((short, long), ())
    assert run.plan() == plan


def test_slow_timings_are_not_repeated_once_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said to be timed again; the same command with a larger budget does it."""
    monkeypatch.setattr(trial_executor, "cluster_now", lambda: two_nodes)
    monkeypatch.setattr(trial_executor, "run_trials", lambda *_: pytest.fail("a trial ran"))
    nodes = [Node({"CPU": 1.0}, None, node_id) for node_id in ("slow" * 4, "new")]
    two_nodes, rates = ClusterResources(tuple(nodes)), NodePrices(SPEC.merged_catalog())
    run = open_run(tmp_path / "run", TWO_CELLS, SPEC)
    with ObservationWriter(run) as writer, caplog.at_level(logging.INFO):
        for observation in (*timed_on(SHORT, "quick", times=1), *timed_on(LONG, "slow", times=10)):
            writer.append(observation)
        session, journal = SweepSession(run, writer, SPEC, rates), RunJournal(run, writer, rates)
        executor = TrialExecutor(session, two_nodes, journal, wait_seconds=60, budget_usd=0.0)
        assert not executor.retime_slow_cells()
    assert "elsewhere" not in caplog.text
