"""The ranking: hours and dollars computed by hand, and a reason for every exclusion."""

import datetime as dt
import math

import pytest
from builders.observations import environment, measurement
from builders.rankings import (
    DESK,
    JOB,
    LAP,
    SPEC,
    TEXT,
    exclusion_reason,
    job_at,
    limit_probes,
    on_desk,
    ranked,
    timed,
    two_gpus,
)
from builders.runs import spec_of, whole_trial

from fitting.laws.forms import Form
from orchestrator.ranking.priced_job import job_hours
from orchestrator.spec.job import NO_OVERHEADS, Job, Overheads
from trials.records.observation import Basis, Outcome


@pytest.mark.parametrize(
    ("examples", "epochs", "batch_size", "steps"),
    [(1000, 3, 8, 375), (1000, 3, 7, 3000 / 7), (1000, 1, 1000, 1), (5, 4, 64, 4)],
)
def test_a_partial_last_batch_counts_as_a_partial_step(
    examples: int, epochs: int, batch_size: int, steps: float
) -> None:
    """This holds in every epoch; fewer examples than one batch still take a whole step."""
    job = Job(examples=examples, epochs=epochs)
    assert job_hours(job, batch_size, 36.0) == pytest.approx(steps / 100)


def test_a_batch_is_no_larger_than_the_job() -> None:
    """With 10 examples, a whole step of batch size 40 costs more than it saves per example."""
    observations = [*limit_probes(40), timed(10, *6 * [0.2]), timed(40, *6 * [0.5])]
    few = JOB.model_copy(update={"examples": 10})
    assert on_desk(ranked(observations)).batch_size == 40
    assert on_desk(ranked(observations, few)).batch_size == 10
    assert on_desk(ranked(observations, few)).hours * 3600 == pytest.approx(3 * 0.2)


def test_hours_and_dollars_are_those_of_the_whole_instance() -> None:
    """994 examples at batch size 7 are 142 steps; three epochs of 0.5 s steps take 213 s."""
    job = JOB.model_copy(update={"examples": 994})
    observations = [*limit_probes(9), timed(7, 0.5, 0.4, 0.6), timed(1, 0.3)]
    single, whole = (row for row in ranked(observations, job).offers if row.cell == DESK)
    assert (single.instance, single.gpus_per_instance, single.market) == ("single", 1, "spot")
    assert (whole.instance, whole.gpus_per_instance, whole.market) == ("whole", 4, "on-demand")
    # Of three steps the interval is their span, 95 %: as of a normal distribution 10 % either way.
    # No visit was repeated: Student's t of the two degrees of freedom that are assumed.
    part = math.exp(2.920 * math.log(0.6 / 0.4) / 2 / 1.96)
    for row, usd in ((single, 0.213), (whole, 0.426)):
        assert row.batch_size == 7
        assert (row.largest_batch, row.limited_by) == (9, "OUT_OF_MEMORY at 10")
        assert row.examples_per_second == pytest.approx(14.0)
        hours = 213 / 3600
        assert row.hours == pytest.approx(hours)
        ends = (row.hours_low, row.hours_high)
        assert ends == pytest.approx((hours / part, hours * part), rel=0.05)
        assert row.usd == pytest.approx(usd)
        assert row.usd_high / row.usd == pytest.approx(row.hours_high / row.hours)
        assert (row.basis, row.source, row.extrapolated) == ("measured", "measured steps", False)
    assert (str(whole.price_as_of), single.price_as_of) == ("2025-12-24", None)
    assert str(single.price_recorded) == "2026-01-31"


def test_fastest_measured_batch_is_taken_not_the_largest() -> None:
    """This holds without a requested batch size."""
    observations = [*limit_probes(8), timed(1, 0.5), timed(4, 0.5), timed(8, 1.25)]
    row = on_desk(ranked(observations))
    assert (row.batch_size, row.batch, row.largest_batch) == (4, "fastest", 8)
    assert row.examples_per_second == pytest.approx(8.0)
    unlimited = on_desk(ranked([timed(4, 0.5)]))
    assert (unlimited.largest_batch, unlimited.limited_by) == (None, None)
    assert on_desk(ranked(observations, job_at(4))).batch == "asked"


def test_batch_that_no_longer_fitted_is_not_priced() -> None:
    """One miss outweighs all fits of that batch size, however fast they were."""
    observations = [*limit_probes(8), timed(8, 0.1), timed(7, 0.1), timed(4, 0.1)]
    observations.append(timed(8, 0.001, outcome=Outcome.THRASHING, repeat=1))
    row = on_desk(ranked(observations, families=()))
    assert (row.batch_size, row.largest_batch, row.limited_by) == (7, 7, "THRASHING at 8")
    reason = exclusion_reason(ranked(observations, job_at(8)))
    assert "8 does not fit" in reason
    assert "largest is 7" in reason


def test_visits_that_lie_apart_widen_the_interval() -> None:
    """The median uses all steps; the whole run gives the variation between visits."""
    steady = [*limit_probes(8), timed(8, *6 * [0.1]), timed(8, *6 * [0.101], repeat=1)]
    restless = [*limit_probes(8), timed(8, *6 * [0.1]), timed(8, *6 * [0.15], repeat=1)]
    other = [timed(8, *6 * [s], cell=LAP, repeat=n) for n, s in enumerate((0.1, 0.15, 0.1, 0.15))]
    widths = []
    for observations in (steady, [*steady, *other], restless):
        row = on_desk(ranked(observations))
        widths.append(math.log(row.hours_high / row.hours_low))
    assert widths[0] < 0.07
    assert min(widths[1:]) > 3 * widths[0]
    assert on_desk(ranked(restless)).hours * 3600 == pytest.approx(375 * 0.125)


def test_requested_batch_that_was_measured_is_priced_by_its_own_steps() -> None:
    """Neither a faster batch size nor a law's prediction replaces them."""
    observations = [
        *limit_probes(40),
        *(timed(b, 0.01 + 0.001 * b) for b in (1, 2, 4, 16, 40)),
        timed(8, 0.4),
    ]
    row = on_desk(ranked(observations, job_at(8)))
    assert (row.source, row.batch_size) == ("measured steps", 8)
    assert row.examples_per_second == pytest.approx(20.0)


def test_requested_batch_that_was_not_measured_is_priced_by_the_law() -> None:
    """10 ms a step and 1 ms an example predict 34 ms at 24, and 1000 / 24 steps per epoch."""
    observations = whole_trial(DESK, SPEC)
    assert 24 not in {o.batch_size for o in observations if o.purpose == "ladder"}
    row = on_desk(ranked(observations, job_at(24)))
    assert (row.source, row.law) == ("law", Form.AFFINE_TOKENS)
    assert (row.batch_size, row.largest_batch) == (24, 40)
    assert row.hours * 3600 == pytest.approx(3 * 1000 / 24 * 0.034)
    assert row.hours_low <= row.hours <= row.hours_high
    assert not row.extrapolated


def test_requested_batch_above_the_timed_ones_is_marked_extrapolated() -> None:
    """The batch fits in memory, but the law was fitted on smaller ones."""
    observations = [*limit_probes(40), *(timed(b, 0.01 + 0.001 * b) for b in (1, 2, 4, 8))]
    row = on_desk(ranked(observations, job_at(32)))
    assert row.extrapolated
    assert row.examples_per_second == pytest.approx(32 / 0.042)


@pytest.mark.parametrize(("above", "high"), [(0.5, 1.5), (2.0, 3.0), (None, 1.3)])
def test_law_of_simulated_steps_has_at_least_the_simulations_error(
    above: float | None, high: float
) -> None:
    """A good fit to simulated steps does not narrow the interval."""
    off = {"relative_error": 0.3, "relative_error_above": above}
    observations = [
        o.model_copy(
            update={
                "basis": Basis.SIMULATED,
                "measurement": o.measurement.model_copy(update=off) if o.measurement else None,
            }
        )
        for o in whole_trial(DESK, SPEC)
    ]
    for batch_size, source in ((24, "law"), (40, "simulated steps")):
        row = on_desk(ranked(observations, job_at(batch_size)))
        assert (row.source, row.basis) == (source, "simulated")
        assert (row.hours_low, row.hours_high) == pytest.approx(
            (row.hours / 1.3, row.hours * high), rel=0.08
        )


def test_stacks_and_bases_are_rows_of_their_own() -> None:
    """The same cell has one row per software stack and one for the simulation."""
    old, new = environment(), environment(versions=(("torch", "3.0"),))
    observations = [
        *limit_probes(8),
        timed(8, 0.4, environment=old),
        timed(8, 0.2, environment=new, repeat=1),
        timed(8, 0.1, environment=new, repeat=2, basis=Basis.SIMULATED),
    ]
    ranking = ranked(observations)
    rows = [row for row in ranking.offers if row.cell == DESK and row.instance == "single"]
    assert [(r.stack, r.basis, round(r.examples_per_second)) for r in rows] == [
        (new.stack, "simulated", 80),
        (new.stack, "measured", 40),
        (old.stack, "measured", 20),
    ]
    assert DESK not in [excluded.cell for excluded in ranking.excluded]


def test_offers_with_equal_chances_are_tied() -> None:
    """Two offers within 1 % are equally likely to be the cheapest."""
    close = ranked(two_gpus(0.1, 0.401)).offers
    desk = next(row for row in close if row.instance == "single")
    lap = next(row for row in close if row.instance == "slow")
    assert (desk.rank, lap.rank) == (1, 2)
    assert desk.probability_cheapest + lap.probability_cheapest == pytest.approx(1)
    assert 0.35 < lap.probability_cheapest < 0.5
    assert desk.tied
    assert lap.tied
    # Of one GPU the dearer offer is never the cheapest, however little is known of its speed.
    dearer = next(row for row in close if row.instance == "whole")
    assert (dearer.probability_cheapest, dearer.tied) == (0.0, False)
    apart = ranked(two_gpus(0.1, 0.8)).offers
    assert [(row.probability_cheapest, row.tied) for row in apart[:2]] == [(1, True), (0, False)]


@pytest.mark.parametrize(
    ("lap_seconds", "tied"),
    [(0.425, ["single", "slow"]), (0.43, ["single", "slow"]), (0.435, ["single"])],
)
def test_an_offer_is_tied_from_one_chance_in_twenty(lap_seconds: float, tied: list[str]) -> None:
    """Chances of a cost within 1 % of the lowest: 9.6, 6.3 and 4.3 % at these step times."""
    rows = ranked(two_gpus(0.1, lap_seconds)).offers
    assert [row.instance for row in rows if row.tied] == tied


DRIFTING = NO_OVERHEADS.model_copy(update={"price_drift": 0.02})


@pytest.mark.parametrize(("sigmas", "chance"), [(1.2, 0.115), (2.0, 0.023)])
def test_price_drift_gives_another_offer_of_one_gpu_a_chance(sigmas: float, chance: float) -> None:
    """The chance is the normal tail at the standardised difference, up to four sigma."""
    sigma = math.hypot(0.02, 0.02) * math.sqrt(90 / 30)
    whole = f"usd_per_hour: {3.6 * math.exp(sigmas * sigma):.4f}"
    text = TEXT.replace("usd_per_hour: 7.2", whole).replace("3.6, market: spot", "3.6")
    job = JOB.model_copy(update={"overheads": DRIFTING})
    day = dt.date(2026, 1, 31) + dt.timedelta(days=90)
    text = text.replace(", as_of: 2025-12-24", "")
    rows = ranked(two_gpus(0.1, 10.0), job, spec=spec_of(text), today=day).offers
    (row,) = (row for row in rows if row.instance == "whole")
    assert row.probability_cheapest == pytest.approx(chance, rel=0.2)


def test_a_minimum_bill_gives_an_offer_without_one_a_chance() -> None:
    """The lower hourly price is the cheapest only where the job outlasts the minimum."""
    text = TEXT.replace("usd_per_hour: 7.2", "usd_per_hour: 3.8").replace(
        "3.6, market: spot", "3.6, minimum_minutes: 0.78125"
    )
    # 375 steps of 0.125 s are expected, which is the minimum; visits lie far apart.
    visits = [timed(8, *6 * [0.1]), timed(8, *6 * [0.15], repeat=1)]
    rows = ranked([*limit_probes(8), *visits], spec=spec_of(text)).offers
    chances = {row.instance: row.probability_cheapest for row in rows}
    assert (rows[0].instance, rows[0].usd) == ("single", pytest.approx(0.046875))
    assert 0.05 < chances["whole"] < 0.5
    assert chances["single"] + chances["whole"] == pytest.approx(1)


def test_measured_offers_come_before_simulated_ones_of_equal_cost() -> None:
    """The order of observation does not matter."""
    both = [
        timed(8, *6 * [0.1], basis=Basis.SIMULATED),
        timed(8, *6 * [0.1], repeat=1),
    ]
    for observations in (both, both[::-1]):
        rows = [row for row in ranked([*limit_probes(8), *observations]).offers if row.rank < 3]
        assert rows[0].usd == rows[1].usd
        assert [row.basis for row in rows] == ["measured", "simulated"]


def test_an_offer_that_is_slower_and_more_expensive_is_off_the_front() -> None:
    """The desk is faster and the lap cheaper; the desk's more expensive offer is neither."""
    rows = ranked(two_gpus(0.1, 0.2)).offers
    assert [(row.instance, row.pareto) for row in rows] == [
        ("slow", True),
        ("single", True),
        ("whole", False),
    ]


@pytest.mark.parametrize(("usd", "pareto"), [(3.6, True), (7.2, False)])
def test_offers_of_equal_time_and_cost_are_on_the_front_together(usd: float, pareto: bool) -> None:  # noqa: FBT001
    """Neither is slower or more expensive than the other."""
    twin = f"""\
    - {{gpu: desk, provider: pit, region: there, instance: twin, usd_per_hour: {usd}, source: me,
       recorded: 2026-01-31}}
"""
    rows = ranked(two_gpus(0.1, 0.2), spec=spec_of(TEXT + twin)).offers
    assert [row.pareto for row in rows if row.usd_per_hour == usd] == [pareto, pareto]


def test_simulation_errors_are_shared_by_all_gpus() -> None:
    """Both may take three times as long; their order is far more certain than their hours."""
    off = measurement(step_seconds=(0.1,)).model_copy(
        update={"relative_error": 0.3, "relative_error_above": 2.0}
    )
    observations = [
        o.model_copy(
            update={
                "basis": Basis.SIMULATED,
                "measurement": off.model_copy(
                    update={"step_seconds": o.measurement.step_seconds if o.measurement else ()}
                ),
            }
        )
        for o in two_gpus(0.1, 0.3)
        if o.purpose == "ladder"
    ]
    first, second = (row for row in ranked(observations).offers if row.instance != "whole")
    assert first.usd_high > 2 * second.usd_low
    assert first.probability_cheapest > 0.9


def test_a_job_has_a_start_and_checkpoints_and_is_interrupted() -> None:
    """Computed by hand on demand; spot takes longer and writes checkpoints at the best interval."""
    overheads = Overheads(
        startup_minutes=30, checkpoint_seconds=36, checkpoint_minutes=60, interruptions_per_day=6
    )
    job = Job(examples=8 * 3600 * 10, epochs=1, overheads=overheads)
    rows = {row.instance: row for row in ranked(two_gpus(1.0, 1.0), job).offers}
    assert rows["whole"].hours == pytest.approx(0.5 + 10 + 10 * 0.01)
    assert rows["whole"].checkpoint_minutes == 60
    assert rows["single"].hours > rows["whole"].hours + 0.5
    assert rows["single"].checkpoint_minutes == pytest.approx(math.sqrt(2 * 0.01 / 0.25) * 60, 0.1)


def test_old_prices_widen_the_cost_interval() -> None:
    """Older prices and spot prices drift more: intervals widen and odds flatten."""
    overheads = NO_OVERHEADS.model_copy(update={"price_drift": 0.02, "spot_price_drift": 0.1})
    job = JOB.model_copy(update={"overheads": overheads})
    observations = two_gpus(0.1, 0.2)
    as_quoted = {row.instance: row for row in ranked(observations, job).offers}
    day = as_quoted["slow"].price_recorded + dt.timedelta(days=90)
    moved = {row.instance: row for row in ranked(observations, job, today=day).offers}
    assert {name: row.usd for name, row in moved.items()} == {
        name: row.usd for name, row in as_quoted.items()
    }
    for name, drift in (("slow", 0.02), ("single", 0.1)):
        row, quoted = moved[name], as_quoted[name]
        assert (row.hours_low, row.hours_high) == (quoted.hours_low, quoted.hours_high)
        sigma = drift * math.sqrt(90 / 30)
        down, up = (abs(math.log(end / quoted.usd)) for end in (quoted.usd_low, quoted.usd_high))
        assert row.usd_low == pytest.approx(row.usd * math.exp(-math.hypot(down, 1.645 * sigma)))
        assert row.usd_high == pytest.approx(row.usd * math.exp(math.hypot(up, 1.645 * sigma)))
    # Twice the dollars is 4 standard deviations away after a quarter, 1 after years.
    assert moved["slow"].probability_cheapest > 0.99
    ages = (30, 30 * 12 * 4)
    odds = [
        next(
            row.probability_cheapest
            for row in ranked(observations, job, today=day + dt.timedelta(days=days)).offers
            if row.instance == "single"
        )
        for days in ages
    ]
    assert odds[0] < 0.01 < odds[1]
    owned = spec_of(TEXT.replace("provider: pub", "provider: own"))
    rows = ranked(observations, job, spec=owned, today=day).offers
    (row,) = (row for row in rows if row.provider == "own")
    assert (row.usd_low, row.usd_high) == (as_quoted["slow"].usd_low, as_quoted["slow"].usd_high)
    assert 0.99 < sum(row.probability_cheapest for row in moved.values()) < 1.01


def test_comparable_offers_are_numbered_from_the_cheapest_across_gpus() -> None:
    """Ranks start anew for another sequence length, model or weights."""
    text = TEXT.replace("[16]", "[16, 32]").replace("[desk, lap, attic]", "[desk, lap]")
    spec = spec_of(text)
    seconds = {"desk": 0.1, "lap": 0.6}
    observations = [
        timed(8, seconds[cell.gpu] * cell.seq_len / 16, cell=cell) for cell in spec.all_cells()
    ]
    ranking = ranked(observations, spec=spec)
    assert [
        (row.cell.seq_len, row.rank, row.cell.gpu, row.instance, round(row.usd, 6))
        for row in ranking.offers
    ] == [
        (16, 1, "desk", "single", 0.0375),
        (16, 2, "lap", "slow", 0.05625),
        (16, 3, "desk", "whole", 0.075),
        (32, 1, "desk", "single", 0.075),
        (32, 2, "lap", "slow", 0.1125),
        (32, 3, "desk", "whole", 0.15),
    ]
