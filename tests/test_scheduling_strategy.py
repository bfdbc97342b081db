"""Next measurements of each strategy within its budget, from given choices, by hand."""

import logging
from collections.abc import Sequence

import pytest
from builders.runs import ONE_CELL, spec_of

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.ranking.measurement_options import RunOption
from orchestrator.ranking.next_measurement import CandidateMeasurement, GpuChoice
from orchestrator.scheduling.adaptive import AdaptiveStrategy
from orchestrator.scheduling.strategy import ExhaustiveStrategy, MeasurementRequest
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation

# The machine itself, which is not priced, then two rented GPUs: a start is a dollar on each.
TEXT = (
    ONE_CELL.replace("[cpu]", "[cpu, left, right]").replace(
        "epochs: 3}", "epochs: 3, overheads: {startup_minutes: 60}}"
    )
    + """\
catalog:
  gpus:
    - {key: left, kind: cuda, device_names: [Left], usable_memory_bytes: 100000000,
       compute_capability: "9.0", source: me, recorded: 2026-01-31}
    - {key: right, kind: cuda, device_names: [Right], usable_memory_bytes: 100000000,
       compute_capability: "9.0", source: me, recorded: 2026-01-31}
  offers:
    - {gpu: left, provider: pit, region: here, instance: a, usd_per_hour: 1.0, source: me,
       recorded: 2026-01-31}
    - {gpu: right, provider: pit, region: here, instance: b, usd_per_hour: 1.0, source: me,
       recorded: 2026-01-31}
"""
)
SPEC = spec_of(TEXT)
CPU, LEFT, RIGHT = SPEC.all_cells()
RATES = NodePrices(SPEC.merged_catalog())
CLUSTER = ClusterResources(
    (
        Node({"CPU": 8.0, "GPU": 1.0, "left": 1.0}),
        Node({"CPU": 8.0, "GPU": 1.0, "right": 1.0}),
        Node({"CPU": 8.0, "cpu": 1.0}),
    )
)
PLAN = make_plan(SPEC, SPEC.merged_catalog(), CLUSTER, [])


def candidate(
    cell: Cell, size: int | None, saving: float, usd: float, *, is_anchored: bool = True
) -> CandidateMeasurement:
    """A measurement of 100 s, of which the start of the node takes 40."""
    option = RunOption(cell, size, usd, 0.0, 0.1, "a law", is_measured=False)
    return CandidateMeasurement(
        option=option,
        is_anchored=is_anchored,
        saving=saving,
        saving_usd=None,
        seconds=100.0,
        start_seconds=40.0,
        usd=usd,
    )


class Given(AdaptiveStrategy):
    """The adaptive strategy between given candidates."""

    def __init__(
        self,
        *candidates: CandidateMeasurement,
        budget_usd: float | None = None,
        spec: SweepSpec = SPEC,
        probability: float = 0.5,
    ) -> None:
        super().__init__(spec, RATES, budget_usd)
        leader = RunOption(LEFT, 4, 1.0, 0.0, 0.1, "a law", is_measured=True)
        self._choice = GpuChoice(leader, probability, candidates)

    def _choices(self, plan: Plan, observations: Sequence[Observation]) -> list[GpuChoice]:
        del plan, observations
        return [self._choice]

    def sizes(self, spent_usd: float = 0.0, plan: Plan = PLAN) -> dict[Cell, tuple[int, ...]]:
        """Batch sizes of the next round."""
        wanted = self.wanted(plan, [], spent_usd)
        return {cell: request.timed or () for cell, request in wanted.items()}


def test_each_gpu_gets_its_most_valuable_measurement_once() -> None:
    """The value is relative to the cost; of equal ones the cheapest is first."""
    strategy = Given(
        candidate(LEFT, 2, saving=0.25, usd=1.0),
        candidate(LEFT, 4, saving=0.3, usd=1.0),
        candidate(RIGHT, 8, saving=0.4, usd=2.0),
        candidate(RIGHT, 16, saving=0.2, usd=1.0),
    )
    rounds = [strategy.sizes() for _ in range(4)]
    assert rounds == [{LEFT: (4,), RIGHT: (16,)}, {LEFT: (2,), RIGHT: (8,)}, {}, {}]
    assert list(rounds[0]) == [LEFT, RIGHT]


def test_a_cell_is_timed_at_its_largest_batch_first() -> None:
    """The largest is unknown to the strategy; afterwards the candidate's own size is timed."""
    first = Given(candidate(LEFT, 4, 0.1, 1.0, is_anchored=False), candidate(RIGHT, None, 0.1, 1.0))
    assert first.sizes() == {LEFT: (), RIGHT: ()}
    both = Given(
        candidate(LEFT, 4, 0.2, 1.0, is_anchored=False),
        candidate(LEFT, 8, 0.1, 1.0, is_anchored=False),
    )
    assert [both.sizes(), both.sizes()] == [{LEFT: ()}, {}]
    wished = spec_of(TEXT.replace("epochs: 3,", "epochs: 3, batch_size: 11,"))
    assert Given(candidate(LEFT, 4, 0.1, 1.0), spec=wished).sizes() == {LEFT: (11,)}


def test_only_pending_cells_of_open_choices_are_measured() -> None:
    """A decided choice needs nothing; nor does a cell that is complete."""
    measurement = candidate(LEFT, 4, 0.1, 1.0)
    assert Given(measurement).sizes(plan=PLAN.after({LEFT: "no node"}, {})) == {}
    assert Given(measurement, probability=0.99).sizes() == {}


@pytest.mark.parametrize(
    ("budget_usd", "spent_usd", "cells"),
    [
        (3.0, 0.0, [LEFT, RIGHT]),
        (3.5, 0.5, [LEFT, RIGHT]),
        (2.9, 0.0, [LEFT]),
        (3.0, 0.1, [LEFT]),
        (1.5, 0.0, [RIGHT]),
        (0.9, 0.0, []),
    ],
)
def test_a_round_costs_no_more_than_is_left(
    budget_usd: float, spent_usd: float, cells: list[Cell]
) -> None:
    """A measurement that is too expensive leaves the budget to the next one."""
    strategy = Given(
        candidate(LEFT, 4, 0.4, 2.0), candidate(RIGHT, 4, 0.1, 1.0), budget_usd=budget_usd
    )
    assert list(strategy.sizes(spent_usd)) == cells


def test_the_rest_of_the_budget_bounds_the_time_of_each_trial() -> None:
    """In proportion to its expected cost, the start of its node paid first."""
    measurement = candidate(LEFT, 4, 0.1, 0.5)
    assert Given(measurement).wanted(PLAN, [], 0.0) == {LEFT: MeasurementRequest((4,), None)}
    bounded = Given(measurement, budget_usd=2.0).wanted(PLAN, [], 1.0)
    assert bounded == {LEFT: MeasurementRequest((4,), 100.0 * 1.0 / 0.5 - 40.0)}
    free = Given(candidate(LEFT, 4, 0.1, 0.0), budget_usd=1.0).wanted(PLAN, [], 0.0)
    assert free[LEFT].most_seconds == pytest.approx(1e11)


@pytest.mark.parametrize(
    ("budget_usd", "usd", "probability", "words"),
    [
        (None, 1.0, 0.5, ["0 of 1 choices decided, $0.25 spent"]),
        (2.0, 1.0, 0.5, ["0 of 1 choices decided, $0.25 spent of $2"]),
        (2.0, 3.0, 0.5, ["0 of 1 ", " of $2", "the rest would cost more"]),
        (None, None, 0.5, ["0 of 1 ", "no measurement"]),
        (None, 1.0, 0.99, ["1 of 1 choices decided, $0.25 spent"]),
    ],
)
def test_each_round_reports_how_far_the_choice_is(
    budget_usd: float | None,
    usd: float | None,
    probability: float,
    words: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And, at the end, whether the budget or the measurements ran out."""
    caplog.set_level(logging.INFO, "orchestrator.scheduling.adaptive")
    candidates = [] if usd is None else [candidate(LEFT, 4, 0.1, usd)]
    Given(*candidates, budget_usd=budget_usd, probability=probability).sizes(0.25)
    (line,) = caplog.messages
    assert all(word in line for word in words)
    assert len(words) > 1 or line == words[0]


def test_every_cell_is_measured_once() -> None:
    """Rounds that want nothing do not make the cells new again."""
    strategy = ExhaustiveStrategy(SPEC, RATES)
    assert list(strategy.wanted(PLAN, [], 0.0)) == [CPU, LEFT, RIGHT]
    assert [strategy.wanted(PLAN, [], 0.0) for _ in range(2)] == [{}, {}]


@pytest.mark.parametrize(
    ("budget_usd", "spent_usd", "cells"),
    [
        (2.1, 0.0, [CPU, LEFT, RIGHT]),
        (2.0, 0.0, [CPU, LEFT]),
        (2.6, 0.5, [CPU, LEFT, RIGHT]),
        (2.6, 0.7, [CPU, LEFT]),
        (0.9, 0.0, [CPU]),
    ],
)
def test_the_starts_of_all_nodes_share_the_budget(
    budget_usd: float, spent_usd: float, cells: list[Cell]
) -> None:
    """A start takes an hour of a dollar; a machine without a price costs nothing."""
    strategy = ExhaustiveStrategy(SPEC, RATES, budget_usd)
    assert list(strategy.wanted(PLAN, [], spent_usd)) == cells


def test_a_sweep_that_skips_every_trial_has_failed() -> None:
    """No trial is pending, and none is complete."""
    skipped = PLAN.after(dict.fromkeys((CPU, LEFT, RIGHT), "no node"), {})
    conclusion = ExhaustiveStrategy(SPEC, RATES).conclusion(skipped, [], 0.0)
    assert "skipped" in (conclusion.failure or "")
    assert conclusion.unpaid == ()
