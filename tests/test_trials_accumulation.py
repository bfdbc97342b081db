"""Whole trials of recipes with an effective batch, on a simulated device."""

from collections.abc import Sequence

import pytest
from builders.observations import cpu, recipe, tiny_cell
from fakes.law_prober import BUDGET_BYTES, LawProber, miss

from trials.child_process.forked_child import ProbeEnd
from trials.records.messages import ProbeRequest
from trials.records.model import find_model
from trials.records.observation import Observation, largest_batch
from trials.records.timing_rule import TimingRule
from trials.run_trial import run_trial
from trials.search import LikelyLargest
from trials.trial import TrialTask, next_probe

# Bytes that an example and the accumulated gradients take, and the largest micro-batch that leaves.
ACCUMULATED = [
    (500, 0, 16),
    (500, 1000, 16),
    (500, 7000, 16),
    (500, 8990, 16),
    (600, 500, 14),
    (600, 8000, 1),
    (600, 9000, 0),
    (562, 1000, 16),
    (563, 1000, 14),
    (9000, 10, 0),
]


def accumulating(done: Sequence[Observation] = ()) -> TrialTask:
    """A trial whose effective batch is 16."""
    return TrialTask(
        cell=tiny_cell(recipe=recipe("full", effective_batch=16)),
        model=find_model("llama-tiny"),
        gpu=cpu(BUDGET_BYTES),
        seed=7,
        batch_limit=16,
        timing=TimingRule(),
        build_timeout_seconds=60,
        probe_timeout_seconds=60,
        done=tuple(done),
    )


@pytest.mark.parametrize(("example_bytes", "gradient_bytes", "largest"), ACCUMULATED)
@pytest.mark.parametrize(
    "likely", [None, LikelyLargest(8), LikelyLargest(16), LikelyLargest(15, 0.2, 0.06)]
)
def test_the_effective_batch_may_fit_where_smaller_micro_batches_do_not(
    example_bytes: int, gradient_bytes: int, largest: int, likely: LikelyLargest | None
) -> None:
    """It accumulates no gradients; the ladder has what fits, and a resumed trial does the same."""
    prober = LawProber(example_bytes, effective_batch=16, gradient_bytes=gradient_bytes)
    observed: list[Observation] = []
    begun = accumulating().model_copy(update={"likely_largest": likely})
    run_trial(begun, prober, observed.append)
    result = largest_batch(observed)
    assert result is not None
    assert result[0] == largest
    assert (result[1] is None) == (largest == 16)
    timed = {o.batch_size for o in observed if o.is_timing}
    fitting = {b for b in (1, 2, 4, 8, 16) if prober.peak_bytes(b) <= BUDGET_BYTES}
    assert timed == fitting
    assert len(observed) == len({o.key for o in observed})
    assert next_probe(accumulating(), observed) is None
    for length in range(len(observed)):
        resumed = list(observed[:length])
        run_trial(accumulating(resumed), prober, resumed.append)
        assert (largest_batch(resumed) or (None,))[0] == largest


def test_an_effective_batch_that_misses_once_reopens_the_search_below() -> None:
    """The repeat of the largest batch misses: a smaller micro-batch is the result."""
    observed: list[Observation] = []

    def repeated(request: ProbeRequest) -> ProbeEnd | None:
        earlier = {o.batch_size for o in observed}
        return miss() if request.batch_size == 16 and 16 in earlier else None

    prober = LawProber(500, repeated, effective_batch=16, gradient_bytes=5000)
    run_trial(accumulating(), prober, observed.append)
    assert (largest_batch(observed) or (None,))[0] == 8
