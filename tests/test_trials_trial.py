"""Whole trials on a simulated device, from any starting point to their end."""

from collections.abc import Sequence

import pytest
from builders.observations import cpu, environment, tiny_cell
from fakes.law_prober import BUDGET_BYTES, Interference, LawProber, miss

from gpu_catalog.catalog import load_catalog
from orchestrator.reporting.sections.memory_section import Boundary, boundary
from trials.batch_ladder import batch_ladder
from trials.child_process.forked_child import ProbeEnd, failed
from trials.records.messages import ProbeRequest
from trials.records.model import find_model
from trials.records.observation import (
    Basis,
    Observation,
    Outcome,
    largest_batch,
)
from trials.records.timing_rule import TimingRule
from trials.run_trial import run_trial, trial_results
from trials.search import LikelyLargest
from trials.trial import ATTEMPTS, HANGS, TrialTask, next_probe

LIMIT = 64
MISSES = [o for o in Outcome if o.is_verdict and o is not Outcome.FITS]
SILENT = [o for o in Outcome if not o.is_verdict]


def task(
    done: Sequence[Observation] = (), *, limit: int = LIMIT, boundary_repeats: int = 0
) -> TrialTask:
    """A trial of llama-tiny on a device of 10,000 bytes."""
    return TrialTask(
        cell=tiny_cell(),
        model=find_model("llama-tiny"),
        gpu=cpu(BUDGET_BYTES),
        seed=7,
        batch_limit=limit,
        boundary_repeats=boundary_repeats,
        timing=TimingRule(),
        build_timeout_seconds=60,
        probe_timeout_seconds=60,
        done=tuple(done),
    )


def run(
    prober: LawProber, done: Sequence[Observation] = (), *, limit: int = LIMIT
) -> list[Observation]:
    """All observations of the cell when the trial has ended."""
    emitted: list[Observation] = []
    run_trial(task(done, limit=limit), prober, emitted.append)
    return [*done, *emitted]


def ladder_fits(observed: Sequence[Observation]) -> set[tuple[int, int]]:
    """The visits that were measured."""
    return {
        (o.batch_size, o.repeat)
        for o in observed
        if o.purpose == "ladder" and o.outcome is Outcome.FITS
    }


def visits(largest: int) -> set[tuple[int, int]]:
    """The visits of a complete ladder."""
    steps = batch_ladder(largest, seed_text=f"7/{tiny_cell().key}")
    return {(step.batch_size, step.repeat) for step in steps}


# Bytes an example takes, and the largest batch that leaves.
LAWS = [(9000, 1), (4500, 2), (900, 10), (311, 28), (180, 50), (139, 64)]


@pytest.mark.parametrize(("example_bytes", "largest"), LAWS)
def test_a_trial_ends_with_the_largest_batch_its_miss_and_a_whole_ladder(
    example_bytes: int, largest: int
) -> None:
    """The result is exact, and every size of the ladder is timed once."""
    observed = run(LawProber(example_bytes))
    result = largest_batch(observed)
    assert result is not None
    assert result[0] == largest
    assert (result[1].batch_size if result[1] else None) == (
        largest + 1 if largest < LIMIT else None
    )
    assert ladder_fits(observed) == visits(largest)
    assert len({o.key for o in observed}) == len(observed)
    assert next_probe(task(), observed) is None


def test_the_search_measures_memory_and_the_ladder_time() -> None:
    """The ladder follows in its random order when the search has closed."""
    prober = LawProber(900)
    observed = run(prober)
    assert [r.timing is None for r in prober.requests] == [o.purpose == "search" for o in observed]
    order = [(o.batch_size, o.repeat) for o in observed if o.purpose == "ladder"]
    steps = batch_ladder(10, seed_text=f"7/{tiny_cell().key}")
    assert order == [(step.batch_size, step.repeat) for step in steps]
    assert [o.purpose for o in observed] == sorted((o.purpose for o in observed), reverse=True)


@pytest.mark.parametrize(("example_bytes", "largest"), LAWS)
def test_a_trial_resumed_anywhere_makes_the_probes_that_are_left(
    example_bytes: int, largest: int
) -> None:
    """Interrupted after any probe, it ends with the observations of an uninterrupted trial."""
    whole = run(LawProber(example_bytes))
    assert len(whole) > len(visits(largest))
    for length in range(len(whole) + 1):
        resumed = run(LawProber(example_bytes), whole[:length])
        assert [o.key for o in resumed] == [o.key for o in whole]


def test_a_batch_of_one_that_misses_ends_the_trial_without_a_ladder() -> None:
    """One probe shows that nothing fits."""
    observed = run(LawProber(9001))
    assert [(o.purpose, o.batch_size) for o in observed] == [("search", 1)]
    assert largest_batch(observed) == (0, observed[0])


def test_a_search_that_reaches_its_limit_has_a_ladder_up_to_it() -> None:
    """Nothing above the stated limit is probed."""
    observed = run(LawProber(100), limit=8)
    assert largest_batch(observed) == (8, None)
    assert max(o.batch_size for o in observed) == 8
    assert ladder_fits(observed) == visits(8)


def test_a_trial_times_only_the_requested_sizes() -> None:
    """The largest batch comes first, then other sizes of the ladder, each with its repeats."""
    observed: list[Observation] = []
    for timed, sizes in [((), {28}), ((1,), {1, 28}), (None, {size for size, _ in visits(28)})]:
        requested = task(observed).model_copy(update={"timed": timed})
        run_trial(requested, LawProber(311), observed.append)
        assert largest_batch(observed) is not None
        assert ladder_fits(observed) == {visit for visit in visits(28) if visit[0] in sizes}
    # One that the ladder has not is visited once; one that does not fit is not.
    assert (11, 0) not in visits(28)
    requested = task(observed).model_copy(update={"timed": (11, 29)})
    run_trial(requested, LawProber(311), observed.append)
    assert ladder_fits(observed) == {*visits(28), (11, 0)}


def test_a_trial_whose_time_is_up_begins_no_probe() -> None:
    """Its earlier observations are kept."""
    observed: list[Observation] = []
    run_trial(task().model_copy(update={"most_seconds": -1.0}), LawProber(311), observed.append)
    assert observed == []


@pytest.mark.parametrize("likely", [1, 2, 27, 28, 29, 40, 64, 1000])
def test_a_search_starts_at_a_predicted_batch_size(likely: int) -> None:
    """A right prediction closes it in two probes; a wrong one does not change the result."""
    begun = task().model_copy(update={"likely_largest": LikelyLargest(likely)})
    observed: list[Observation] = []
    run_trial(begun, LawProber(311), observed.append)
    searched = [o.batch_size for o in observed if o.purpose == "search"]
    assert {28, 29} <= set(searched)
    assert len(searched) == len(set(searched))
    assert searched[0] == min(likely, LIMIT)
    if likely == 28:
        assert searched == [28, 29]
    assert ladder_fits(observed) == visits(28)
    assert next_probe(task(), observed) is None  # whoever asks without it has the same answer


@pytest.mark.parametrize("outcome", MISSES)
def test_every_miss_bounds_the_search(outcome: Outcome) -> None:
    """A batch that thrashes from 12 on bounds it like one without memory."""
    observed = run(LawProber(180, lambda r: miss(outcome) if r.batch_size >= 12 else None))
    result = largest_batch(observed)
    assert result is not None
    assert result[1] is not None
    assert (result[0], result[1].outcome, result[1].batch_size) == (11, outcome, 12)
    assert ladder_fits(observed) == visits(11)


def flaky(outcome: Outcome = Outcome.FAILED) -> ProbeEnd:
    """The failure of a probe in a child that had started."""
    return ProbeEnd(outcome, "flaky", None, environment(), BUDGET_BYTES)


def fails_first(times: int) -> Interference:
    """A device that fails its first probes of batch size 2, like a flaky machine."""
    left = iter(range(times))

    def interfere(request: ProbeRequest) -> ProbeEnd | None:
        return flaky() if request.batch_size == 2 and next(left, None) is not None else None

    return interfere


def test_a_failed_probe_is_tried_again_and_the_trial_goes_on() -> None:
    """Each attempt is its own record; after a success, the rest is as without the failure."""
    steady = run(LawProber(4500))
    observed = run(LawProber(4500, fails_first(ATTEMPTS - 1)))
    attempts = [(o.attempt, o.outcome) for o in observed if o.batch_size == 2][:ATTEMPTS]
    assert attempts == [(1, Outcome.FAILED), (2, Outcome.FAILED), (3, Outcome.FITS)]
    assert ladder_fits(observed) == ladder_fits(steady) == visits(2)
    assert largest_batch(observed) == (2, next(o for o in observed if o.batch_size == 3))


def tries(outcome: Outcome) -> int:
    """Number of attempts: fewer for a hang, which costs its whole timeout."""
    return HANGS if outcome is Outcome.TIMED_OUT else ATTEMPTS


@pytest.mark.parametrize("outcome", SILENT)
def test_a_probe_that_keeps_failing_is_given_up_and_the_rest_measured(outcome: Outcome) -> None:
    """There is no limit, and the ladder goes up to the largest fit."""
    observed = run(LawProber(180, lambda r: flaky(outcome) if r.batch_size >= 12 else None))
    tried = [o for o in observed if o.outcome is outcome]
    assert [o.attempt for o in tried] == list(range(1, tries(outcome) + 1))
    assert len({o.batch_size for o in tried}) == 1
    assert largest_batch(observed) is None
    largest = max(o.batch_size for o in observed if o.outcome is Outcome.FITS)
    assert largest < 12
    assert ladder_fits(observed) == visits(largest)


def test_a_ladder_probe_that_keeps_failing_costs_that_step_only() -> None:
    """The limit stands, and every other step is measured."""
    observed = run(LawProber(900, lambda r: flaky() if r.timing and r.batch_size == 2 else None))
    result = largest_batch(observed)
    assert result is not None
    assert result[0] == 10
    assert ladder_fits(observed) == {visit for visit in visits(10) if visit[0] != 2}


@pytest.mark.parametrize("outcome", SILENT)
def test_repeated_build_failures_end_the_trial(outcome: Outcome) -> None:
    """Each further step would wait for builds that hang; the next run makes them."""
    prober = LawProber(900, lambda r: ProbeEnd(outcome, "gone") if r.timing else None)
    observed = run(prober)
    assert [o.outcome for o in observed if o.purpose == "ladder"] == [outcome] * tries(outcome)
    result = largest_batch(observed)
    assert result is not None
    assert result[0] == 10
    assert ladder_fits(run(LawProber(900), observed)) == visits(10)


def test_occasional_build_failures_do_not_end_the_trial() -> None:
    """Only consecutive failures do: here each step of the ladder uses all its attempts."""
    tries = iter(range(1000))
    gone = ProbeEnd(Outcome.FAILED, "gone")
    observed = run(LawProber(900, lambda r: gone if r.timing and next(tries) % 3 < 2 else None))
    assert ladder_fits(observed) == visits(10)
    assert len([o for o in observed if o.purpose == "ladder"]) == 3 * len(visits(10))


def test_a_final_failure_is_tried_once() -> None:
    """A recipe that does not match the model will not match in the next attempt."""
    refused = ProbeEnd(Outcome.FAILED, "RecipeError: no", final=True)
    observed = run(LawProber(900, lambda _: refused))
    assert [o.detail for o in observed] == ["RecipeError: no"]


def test_a_trial_stops_between_probes_on_request() -> None:
    """Under a time budget, the observations so far are complete, and the next run continues."""
    whole = run(LawProber(900))
    emitted: list[Observation] = []
    run_trial(task(), LawProber(900), emitted.append, keep_going=lambda: len(emitted) < 3)
    assert [o.key for o in emitted] == [o.key for o in whole[:3]]


def boundary_run(prober: LawProber, repeats: int) -> list[Observation]:
    """A trial that repeats its largest batch size a number of times."""
    emitted: list[Observation] = []
    run_trial(task(boundary_repeats=repeats), prober, emitted.append)
    return emitted


def test_the_largest_batch_is_tried_again_in_fresh_children_with_other_tokens() -> None:
    """This happens before the ladder, so that its steps use a confirmed size."""
    prober = LawProber(900)
    observed = boundary_run(prober, 3)
    repeats = [o for o in observed if o.purpose == "boundary"]
    assert [(o.batch_size, o.repeat) for o in repeats] == [(10, 0), (10, 1), (10, 2)]
    assert [r.draw for r in prober.fresh] == [1, 2, 3]
    assert {r.draw for r in prober.requests if r not in prober.fresh} == {0}
    assert boundary(observed) == Boundary(safe=10, largest=10, tries=6, misses=0)
    assert ladder_fits(observed) == visits(10)


def test_a_largest_batch_that_sometimes_misses_is_replaced() -> None:
    """All repeats run to count the misses; the search finds a smaller size that always fits."""
    prober = LawProber(900, lambda r: miss() if r.batch_size >= 9 and r.draw == 2 else None)
    observed = boundary_run(prober, 3)
    repeats = [(o.batch_size, o.repeat) for o in observed if o.purpose == "boundary"]
    assert repeats == [(size, repeat) for size in (10, 9, 8) for repeat in range(3)]
    edge = boundary(observed)
    assert edge is not None
    assert (edge.safe, edge.largest, edge.misses) == (8, 10, 1)
    assert ladder_fits(observed) == visits(8)


def test_a_capped_trial_finds_the_limit_of_the_smaller_gpu_and_times_nothing() -> None:
    """Its speed would be that of the larger GPU."""
    small = cpu(5_000).model_copy(update={"key": "small"})
    capped = task(boundary_repeats=1).model_copy(
        update={
            "cell": tiny_cell().model_copy(update={"gpu": "small", "capped_on": "cpu"}),
            "target": small,
        }
    )
    assert capped.setup.memory_cap_bytes == 5_000
    assert task().setup.memory_cap_bytes is None
    emitted: list[Observation] = []
    run_trial(capped, LawProber(900), emitted.append)
    assert {o.basis for o in emitted} == {Basis.CAPPED}
    assert {o.purpose for o in emitted} == {"search", "boundary"}
    assert next_probe(capped, emitted) is None


def test_the_search_uses_the_memory_limit_of_the_device() -> None:
    """The catalog's number is a guess; with the device's own, the second prediction is right."""
    far_off = task().model_copy(update={"gpu": cpu(10**6)})
    emitted: list[Observation] = []
    run_trial(far_off, LawProber(139), emitted.append)
    assert {o.memory_limit_bytes for o in emitted} == {BUDGET_BYTES}
    probes = [o for o in emitted if o.purpose == "search"]
    assert len(probes) == len([o for o in run(LawProber(139)) if o.purpose == "search"])


def test_a_gpu_without_a_measured_memory_is_searched() -> None:
    """Its nominal memory gives the first prediction."""
    unread = load_catalog().gpu("H100-NVL")
    assert unread.usable_memory_bytes is None
    guessed = task().model_copy(update={"gpu": unread})
    assert guessed.memory_guess_bytes == 94_000_000_000
    emitted: list[Observation] = []
    run_trial(guessed, LawProber(900), emitted.append)
    result = largest_batch(emitted)
    assert result is not None
    assert result[0] == 10


def test_the_next_run_continues_with_new_attempt_numbers() -> None:
    """A cell that was given up gets the same number of attempts again."""
    given_up = run(LawProber(4500, fails_first(1000)))
    again = run(LawProber(4500, fails_first(1000)), given_up)
    assert [o.attempt for o in again if o.batch_size == 2] == list(range(1, 2 * ATTEMPTS + 1))
    finished = run(LawProber(4500), again)
    assert finished[len(again)].attempt == 2 * ATTEMPTS + 1
    assert len({o.key for o in finished}) == len(finished)
    assert ladder_fits(finished) == visits(2)


def ladder_misses(batch_size: int) -> Interference:
    """A device with memory for three steps of a large batch, but not for the timed ones."""
    return lambda r: miss() if r.timing is not None and r.batch_size >= batch_size else None


# The search never asked for the small ones: such a miss is evidence all the same.
@pytest.mark.parametrize("threshold", [1, 2, 7, 23, 49, 50])
def test_a_ladder_miss_reopens_the_search_below(threshold: int) -> None:
    """The largest batch size is one that can be timed; no probe is repeated."""
    observed = run(LawProber(180, ladder_misses(threshold)))
    result = largest_batch(observed)
    assert result is not None
    largest, above = result
    assert largest < 50
    assert above is not None
    assert (above.batch_size, above.purpose) == (largest + 1, "ladder")
    assert ladder_fits(observed) >= visits(largest)
    assert len({o.key for o in observed}) == len(observed)


def on_node_3(prober: LawProber) -> list[Observation]:
    """Observations of a trial on a node of Ray."""
    results = trial_results(task(), prober, node_ids=["node-3"])
    return [result for result, _ in results if isinstance(result, Observation)]


def test_an_observation_stands_alone() -> None:
    """It has limits, seed, basis and node."""
    for record in on_node_3(LawProber(4500)):
        assert record.cell == tiny_cell()
        assert (record.memory_limit_bytes, record.batch_limit, record.seed) == (10_000, LIMIT, 7)
        assert record.basis is Basis.MEASURED
        assert record.environment == environment(node_id="node-3")
        assert (record.measurement is None) == (record.outcome is not Outcome.FITS)


def test_a_child_that_died_before_its_first_message_has_no_environment() -> None:
    """The record does not invent one."""
    emitted = on_node_3(LawProber(4500, lambda _: failed("dead")))
    assert [record.environment for record in emitted] == [None] * ATTEMPTS
