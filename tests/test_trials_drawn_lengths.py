"""Drawn lengths: they have the expected padding, and trials search for the batch that survives."""

from collections.abc import Sequence

import numpy as np
import pytest
from builders.observations import environment, measurement, observation, recipe
from fakes.law_prober import BUDGET_BYTES, LawProber, miss
from test_trials_trial import ladder_fits, task

from fitting.points.batch_lengths import Lengths
from trials.child_process.forked_child import ProbeEnd
from trials.drawn_lengths import MICRO_BATCHES, DrawnLengths, next_size, sizes_to_try
from trials.records.messages import ProbeRequest
from trials.records.observation import Observation, Outcome, largest_batch, trainable_batch
from trials.run_trial import run_trial
from trials.trial import ATTEMPTS, next_probe

LENGTHS = DrawnLengths(
    histogram=((30, 2), (50, 5), (90, 1)),
    examples=80_000,
    grouped=False,
    multiple=8,
    most_tokens=96,
)
GROUPED = LENGTHS.model_copy(update={"grouped": True})


@pytest.mark.parametrize("batch_size", [1, 4])
def test_drawn_batches_have_the_expected_padding(batch_size: int) -> None:
    """The mean of many draws approaches the expectation, random or grouped by length."""
    lengths = Lengths.of(LENGTHS.histogram)
    *drawn, last = LENGTHS.batches(batch_size, seed=0, count=20_000)
    first, *grouped = GROUPED.batches(batch_size, seed=0, count=20_000)
    assert {b.tokens for b in (*drawn, *grouped)} <= {32, 56, 96}
    assert (last.tokens, first.tokens) == (96, 96)  # the longest example comes at some time
    mean, grouped_mean = (np.mean([b.tokens for b in run]) for run in (drawn, grouped))
    assert mean == pytest.approx(lengths.padded(batch_size), rel=0.01)
    assert grouped_mean == pytest.approx(lengths.grouped(batch_size, 80_000), rel=0.01)


def test_a_batch_is_padded_where_an_example_is_shorter_than_its_rows() -> None:
    """Also by rounding up, even of a single example; not where all have the same length."""
    assert all(batch.is_padded for batch in LENGTHS.batches(1, seed=0))
    exact = LENGTHS.model_copy(update={"multiple": 10})
    assert not any(batch.is_padded for batch in exact.batches(1, seed=0))
    *drawn, last = exact.batches(2, seed=0, count=20_000)
    assert np.mean([not b.is_padded for b in drawn]) == pytest.approx(30 / 64, rel=0.05)
    assert last.is_padded


def test_grouped_batches_descend_within_each_sorted_part() -> None:
    """Transformers sorts fifty batches at a time, the longest examples first."""
    every = tuple((tokens, 1) for tokens in range(1, 200))
    changes = {"histogram": every, "examples": 10_000, "multiple": 1, "most_tokens": 199}
    _, *batches = GROUPED.model_copy(update=changes).batches(2, seed=0, count=100)
    drawn = [batch.tokens for batch in batches]
    assert (np.diff(drawn[:50]) <= 0).all()
    assert (np.diff(drawn[50:]) <= 0).all()
    assert drawn[50] > drawn[49]


def test_lengths_that_are_padded_alike_do_not_vary() -> None:
    """Rounding up, or the limit of a batch, may make all batches equal."""
    assert LENGTHS.vary
    assert not LENGTHS.model_copy(update={"multiple": 96}).vary
    assert not LENGTHS.model_copy(update={"most_tokens": 32}).vary


@pytest.mark.parametrize("surviving", [0, 1, 7, 40, 99, 100])
def test_the_search_ends_with_the_largest_batch_that_survives(surviving: int) -> None:
    """It tries the largest first, and few others: to 3 %, or whole parts of the effective batch."""
    for settings in (recipe("full"), recipe("full", effective_batch=100)):
        sizes, survived = sizes_to_try(settings, 100), dict[int, bool]()
        while (size := next_size(sizes, survived)) is not None:
            survived[size] = size <= surviving
        assert next(iter(survived)) == 100
        found = max((size for size, survives in survived.items() if survives), default=0)
        assert found == max((size for size in sizes if size <= surviving), default=0)
        assert len(survived) <= 8
    assert sizes_to_try(recipe("full"), 100)[-2:] == [97, 100]


class FragmentingProber(LawProber):
    """A device on which examples of drawn lengths take half as much again."""

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        end = super().probe(request, fresh=fresh)
        grown = 1.5 * self.peak_bytes(request.batch_size)
        if not request.lengths or end.outcome is not Outcome.FITS or grown <= BUDGET_BYTES:
            return end
        return miss()


def drawing(prober: LawProber, done: Sequence[Observation] = ()) -> list[Observation]:
    """All observations of a trial that draws lengths, when it has ended."""
    trial = task(done).model_copy(update={"drawn": LENGTHS})
    emitted: list[Observation] = []
    run_trial(trial, prober, emitted.append)
    return [*done, *emitted]


def test_a_trial_finds_the_batch_that_survives_and_times_no_larger_one() -> None:
    """After the search; its runs are recorded with their lengths, and start in fresh children."""
    prober = FragmentingProber(180)
    observed = drawing(prober)
    surviving, lowest_miss = trainable_batch(observed) or (None, None)
    assert largest_batch(observed) == (50, next(o for o in observed if o.batch_size == 51))
    assert surviving == 31
    assert lowest_miss is not None
    assert lowest_miss.is_drawn
    assert max(size for size, _ in ladder_fits(observed)) == surviving
    runs = [o for o in observed if o.is_drawn]
    assert runs[0].batch_size == 50
    for run in runs:
        assert run.lengths == tuple(b.tokens for b in LENGTHS.batches(run.batch_size, seed=0))
    assert all(len(o.lengths) == MICRO_BATCHES + 1 for o in runs)
    assert [r.batch_size for r in prober.fresh] == [o.batch_size for o in runs]
    assert not any(o.lengths for o in observed if not o.is_drawn)


def test_a_trial_that_draws_lengths_continues_wherever_it_died() -> None:
    """After any probe it ends with the observations of an uninterrupted one."""
    whole = drawing(FragmentingProber(900))
    for length in range(len(whole) + 1):
        resumed = drawing(FragmentingProber(900), whole[:length])
        assert [o.key for o in resumed] == [o.key for o in whole]
    done = task(whole).model_copy(update={"drawn": LENGTHS})
    assert next_probe(done, whole) is None


def test_runs_without_a_verdict_leave_the_largest_batch_of_the_full_length() -> None:
    """A crash says nothing of memory; the attempts are recorded and the ladder is timed."""
    crash = ProbeEnd(Outcome.FAILED, "it crashed", environment=environment())
    observed = drawing(LawProber(900, lambda request: crash if request.lengths else None))
    assert sum(o.is_drawn for o in observed) == ATTEMPTS
    assert trainable_batch(observed) == largest_batch(observed)
    assert max(size for size, _ in ladder_fits(observed)) == 10


def test_drawn_lengths_change_no_result_of_the_full_length() -> None:
    """Their misses end no search, and their memory enters no law."""
    fits = observation(4, batch_limit=4)
    drawn = observation(4, Outcome.OUT_OF_MEMORY, purpose="drawn", batch_limit=4, lengths=(8, 16))
    assert largest_batch([fits, drawn]) == (4, None)
    assert trainable_batch([fits, drawn]) == (0, drawn)
    survives = observation(4, purpose="drawn", batch_limit=4, measurement=measurement())
    assert trainable_batch([fits, survives]) == (4, None)


def test_a_log_without_lengths_can_be_read() -> None:
    """Observations of earlier versions have no such field."""
    text = observation(4).model_dump(mode="json")
    del text["lengths"]
    assert Observation.model_validate(text) == observation(4)
