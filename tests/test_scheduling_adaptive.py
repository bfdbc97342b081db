"""The adaptive strategy: it measures first where a measurement helps the choice most."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders.observations import MIB, environment, measurement
from builders.runs import ONE_CELL, spec_of
from fakes.ray_sweeps import ended, observations, two_devices

from fitting.families.fit_family import fit_families
from orchestrator.cli.main import main
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import make_plan, trial_task
from orchestrator.planning.spending import Meter
from orchestrator.ranking.next_measurement import GpuChoice, choices, measurable
from orchestrator.reporting.sections.next_measurement_section import next_measurements_table
from orchestrator.scheduling.adaptive import AdaptiveStrategy
from orchestrator.scheduling.strategy import MeasurementRequest
from orchestrator.spec.sweep_spec import SweepSpec
from trials.child_process.forked_child import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest
from trials.records.observation import Observation, Outcome
from trials.run_trial import run_trial

PRICES = {"desk": 0.9, "lap": 0.3, "shed": 3.6, "attic": 1.2}
ROWS = "".join(
    f"    - {{key: {key}, kind: cpu, usable_memory_bytes: 100000000, source: me, "
    "recorded: 2026-01-31}\n"
    for key in PRICES
)
OFFERS = "".join(
    f"    - {{gpu: {key}, provider: pit, region: here, instance: {key}, usd_per_hour: {usd}, "
    "source: me, recorded: 2026-01-31}\n"
    for key, usd in PRICES.items()
)
BARE = "overheads: {startup_minutes: 0, checkpoint_seconds: 0, interruptions_per_day: 0}"
JOB = f"{{examples: 1000, epochs: 3, {BARE}}}"  # nothing but its steps
TEXT = (
    ONE_CELL.replace("[cpu]", f"[{', '.join(PRICES)}]").replace("{examples: 1000, epochs: 3}", JOB)
    + f"catalog:\n  gpus:\n{ROWS}  offers:\n{OFFERS}"
)
SPEC = spec_of(TEXT)
RATES = NodePrices(SPEC.merged_catalog())
ANYWHERE = ClusterResources((Node({"CPU": 1.0}, frozenset()),))


class Device:
    """A device of 1 MiB per example with a capacity, and a floor and a slope in seconds."""

    def __init__(self, largest: int, floor: float, slope: float) -> None:
        self._largest = largest
        self._line = floor, slope

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Measure with a small difference between visits of one batch size."""
        del fresh
        batch = request.batch_size
        if batch > self._largest:
            return ProbeEnd(Outcome.OUT_OF_MEMORY, "too much", None, environment())
        floor, slope = self._line
        noise = 1 + 0.004 * (batch * 7919 % 5 - 2)
        steps = () if request.timing is None else ((floor + slope * batch) * noise,) * 6
        return ProbeEnd(Outcome.FITS, None, measurement(batch * MIB, steps), environment())


# Dollars of a job are price x seconds per example: lap 1.05, desk 1.26, attic 3.9, shed 7.5 µ$/s.
WORLD: dict[str, Device | None] = {
    "desk": Device(40, 0.010, 0.00115),
    "lap": Device(40, 0.010, 0.00325),
    "shed": Device(40, 0.010, 0.00185),
    "attic": Device(40, 0.010, 0.00300),
}


def swept(
    strategy: AdaptiveStrategy, world: dict[str, Device | None], spec: SweepSpec = SPEC
) -> tuple[list[Observation], list[dict[Cell, MeasurementRequest]]]:
    """Return what a sweep in this world observes, and what it places in each round.

    A trial without a device ends without any observation.
    """
    catalog = spec.merged_catalog()
    observations: list[Observation] = []
    rounds = []
    while wanted := strategy.wanted(
        make_plan(spec, catalog, ANYWHERE, observations),
        observations,
        Meter(spec, NodePrices(catalog), observations).usd or 0.0,
    ):
        rounds.append(wanted)
        for cell, sizes in wanted.items():
            device = world[cell.gpu]
            if device is not None:
                task = trial_task(spec, catalog, cell, observations)
                run_trial(
                    task.model_copy(update={"timed": sizes.timed}), device, observations.append
                )
        assert len(rounds) < 50
    return observations, rounds


def chosen(observations: Sequence[Observation]) -> GpuChoice:
    """The only choice of the specification, given some observations."""
    catalog = SPEC.merged_catalog()
    (choice,) = choices(
        SPEC, NodePrices(catalog), SPEC.all_cells(), observations, fit_families(observations)
    )
    return choice


def adaptive(budget_usd: float | None = None) -> AdaptiveStrategy:
    """The adaptive strategy for the specification."""
    return AdaptiveStrategy(SPEC, RATES, budget_usd)


def test_the_winner_is_found_without_measuring_everything() -> None:
    """It is the true one, and most of the ladders remain unmeasured."""
    observations, rounds = swept(adaptive(), WORLD)
    choice = chosen(observations)
    assert choice.leader.cell.gpu == "lap"
    assert choice.leader.is_measured
    assert choice.is_decided
    whole = 4 * 8  # visits of a ladder of six sizes, two of them twice
    assert sum(o.purpose == "ladder" for o in observations) < whole / 2
    # Each GPU is timed at its largest batch before it is timed at another.
    anchored: set[str] = set()
    for wanted in rounds:
        for cell, sizes in wanted.items():
            assert (sizes.timed == ()) == (cell.gpu not in anchored)
            anchored.add(cell.gpu)
    first = {o.cell.gpu: o.batch_size for o in reversed(observations) if o.purpose == "ladder"}
    assert set(first.values()) == {40}


def test_a_budget_is_kept() -> None:
    """A probe's cost of 1.5 s and more counts before it is placed."""
    observations, _ = swept(adaptive(budget_usd=1e-9), WORLD)
    assert observations == []
    whole, _ = swept(adaptive(), WORLD)
    started = with_job("{examples: 1000, epochs: 3}")
    spent = Meter(started, RATES, whole).usd
    probes = sum(o.seconds * PRICES[o.cell.gpu] / 3600 for o in whole)
    starts = sum(PRICES[gpu] for gpu in {o.cell.gpu for o in whole}) / 6  # ten minutes each
    assert spent == pytest.approx(probes + starts)


def test_a_gpu_without_observations_is_given_up() -> None:
    """It may still be the cheapest, so the choice stays undecided."""
    observations, rounds = swept(adaptive(), WORLD | {"lap": None})
    assert sum(cell.gpu == "lap" for wanted in rounds for cell in wanted) == 1
    assert {o.cell.gpu for o in observations} >= {"desk"}
    assert not chosen(observations).is_decided


def test_one_gpu_predicts_the_cost_on_another() -> None:
    """Price and specifications scale the cost; without any observation there is no prediction."""
    nothing = chosen([])
    assert {c.option.known_by for c in nothing.candidates} == {"nothing"}
    assert all(c.option.usd is None for c in nothing.candidates)
    catalog = SPEC.merged_catalog()
    desk = SPEC.all_cells()[0]
    observations: list[Observation] = []
    device = WORLD["desk"]
    assert device is not None
    run_trial(trial_task(SPEC, catalog, desk, []), device, observations.append)
    one = {c.option.cell.gpu: c.option for c in chosen(observations).candidates}
    assert set(one) == set(PRICES) - {"desk"}
    assert {option.known_by for option in one.values()} == {"price beside desk"}
    shed, lap = one["shed"].usd, one["lap"].usd
    assert shed is not None
    assert lap is not None
    assert shed / lap == pytest.approx(PRICES["shed"] / PRICES["lap"])


def with_job(job: str, text: str = TEXT) -> SweepSpec:
    """The specification with another job."""
    return spec_of(text.replace(JOB, job))


def swept_choice(
    spec: SweepSpec, world: dict[str, Device | None]
) -> tuple[GpuChoice, list[Observation]]:
    """The final state of the only choice, and the observations."""
    catalog = spec.merged_catalog()
    observations, _ = swept(AdaptiveStrategy(spec, NodePrices(catalog), None), world, spec)
    (choice,) = choices(
        spec, NodePrices(catalog), spec.all_cells(), observations, fit_families(observations)
    )
    return choice, observations


def test_a_gpu_that_nothing_fits_on_is_not_chosen() -> None:
    """However cheap it is, the choice is between the others."""
    choice, observations = swept_choice(SPEC, WORLD | {"lap": Device(0, 0.01, 0.01)})
    assert choice.leader.cell.gpu == "desk"
    assert choice.is_decided
    assert [o.outcome for o in observations if o.cell.gpu == "lap"] == [Outcome.OUT_OF_MEMORY]


def test_the_choice_is_for_the_ranked_job() -> None:
    """A start of an hour favours the cheap GPU; a requested batch size is timed."""
    fast = {"desk": Device(40, 0.0, 1e-6), "lap": Device(40, 0.0, 2e-6)}
    world: dict[str, Device | None] = {"shed": None, "attic": None, **fast}
    text = TEXT.replace("[desk, lap, shed, attic]", "[desk, lap]").replace(
        "usd_per_hour: 0.3", "usd_per_hour: 0.6"
    )
    steps = with_job("{examples: 1000000, epochs: 100, overheads: {startup_minutes: 0}}", text)
    assert swept_choice(steps, world)[0].leader.cell.gpu == "desk"
    started = with_job("{examples: 1000000, epochs: 100, overheads: {startup_minutes: 60}}", text)
    assert swept_choice(started, world)[0].leader.cell.gpu == "lap"
    wished = with_job(JOB.replace("epochs: 3", "epochs: 3, batch_size: 11"), text)
    choice, observations = swept_choice(wished, world)
    assert {o.batch_size for o in observations if o.purpose == "ladder"} == {11}
    assert choice.leader.batch_size == 11
    assert choice.is_decided


def test_a_choice_between_equal_gpus_stays_undecided() -> None:
    """Everything is measured, and the two GPUs are too alike."""
    choice, _ = swept_choice(SPEC, WORLD)
    assert choice.is_decided
    alike = dataclasses.replace(choice, probability=0.8, candidates=())
    assert not alike.is_decided
    assert not alike.is_open
    table = next_measurements_table([alike], most=5)
    assert "Nothing is left" in table
    assert "undecided, all measured" in table


def test_a_round_may_take_no_longer_than_the_budget_lasts() -> None:
    """Each trial gets its share of the rest, however long its probes take."""
    spec = with_job("{examples: 1000, epochs: 3, overheads: {startup_minutes: 6}}")
    catalog = spec.merged_catalog()
    strategy = AdaptiveStrategy(spec, NodePrices(catalog), 2.0)
    wanted = strategy.wanted(make_plan(spec, catalog, ANYWHERE, []), [], 0.0)
    costs = [
        PRICES[cell.gpu] * (0.1 + sizes.most_seconds / 3600)  # a start of six minutes, then probes
        for cell, sizes in wanted.items()
        if sizes.most_seconds is not None
    ]
    assert len(costs) == len(wanted) > 1
    assert sum(costs) == pytest.approx(2.0)


def test_the_list_says_what_each_measurement_saves_and_costs() -> None:
    """The most valuable measurement is first; the state of each choice follows."""
    table = next_measurements_table([chosen([])], most=2)
    first = table.splitlines()[2]
    assert re.search(r"largest .*needed first", first)
    assert "2 more: --most" in table
    assert "may decide: 4" in table
    choice = chosen([])
    least = dataclasses.replace(choice.candidates[-1], saving=1e-30, saving_usd=1e-28)
    hardly = dataclasses.replace(choice, candidates=(least,))
    assert "| under $0.01 " in next_measurements_table([hardly], most=2)
    observations, _ = swept(adaptive(), WORLD)
    assert "Every choice is decided." in next_measurements_table([chosen(observations)], most=5)


def test_plan_lists_what_to_measure_on_absent_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which GPU to rent first, simulated cells included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["plan", "--next", "--most", "40"]) == 0
    shown = capsys.readouterr().out
    assert "H100-SXM" in shown
    assert "mixtral-tiny" in shown
    assert main(["plan"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_capped_cells_have_no_part_in_a_choice() -> None:
    """Their speed is that of another GPU."""
    text = TEXT.replace("max_batch_size", "as_if: [shed]\nmax_batch_size").replace(
        "key: shed, kind: cpu, usable_memory_bytes: 100000000",
        "key: shed, kind: cpu, usable_memory_bytes: 50000000",
    )
    spec = spec_of(text)
    assert any(cell.capped_on for cell in spec.all_cells())
    assert not any(cell.capped_on for cell in measurable(spec, spec.merged_catalog()))


def test_an_adaptive_run_fails_without_a_measured_leader() -> None:
    """Prices alone decide nothing; a run that measured ends with its choices."""
    nothing = make_plan(SPEC, SPEC.merged_catalog(), ANYWHERE, [])
    assert "measured" in (adaptive().conclusion(nothing, [], 0.0).failure or "")
    observations, _ = swept(adaptive(), WORLD)
    plan = make_plan(SPEC, SPEC.merged_catalog(), ANYWHERE, observations)
    conclusion = adaptive().conclusion(plan, observations, 0.0)
    assert conclusion.failure is None
    assert [choice.leader.cell.gpu for choice in conclusion.choices] == ["lap"]
    assert conclusion.choices[0].is_decided


@pytest.mark.long
def test_an_adaptive_sweep_stops_when_it_has_decided(tmp_path: Path) -> None:
    """On a real Ray: at ninety times the price, two devices need only their largest batch sizes."""
    (tmp_path / "adaptive.yaml").write_text(two_devices("adaptive", 0.1, 9.0), encoding="utf-8")
    command = ("sweep", "adaptive.yaml", "--adaptive", "--budget-usd", "5", "--out", "run")
    done = ended(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 choices decided" in done.stderr
    timed = [o for o in observations(tmp_path / "run") if o.purpose == "ladder"]
    assert {o.cell.gpu for o in timed} == {"small", "large"}
    assert len(timed) <= 4
    assert "decided" in done.stdout
    again = ended(tmp_path, "plan", "run", "--next")
    assert again.returncode == 0, again.stderr
    assert "Every choice is decided" in again.stdout
