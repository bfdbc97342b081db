from collections.abc import Callable
from functools import partial

import pytest
from benchmarks.search_probes import (
    ESTIMATES,
    KINDS,
    Kind,
    Law,
    draw_laws,
    drive,
    our_search,
    ours,
    score,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.search import (
    EXTRA_PROBES,
    LikelyLargest,
    ProbeResult,
    Search,
    _guided,
    _predicted_largest,
    doubling_and_bisection,
    search_largest_batch,
)

GIB = 2**30


class Probes:
    """A device with a largest batch size that records its probes."""

    def __init__(self, largest: int, peak: Callable[[int], int | None] = lambda _: None) -> None:
        self.largest = largest
        self.peak = peak
        self.asked: list[int] = []

    def __call__(self, batch: int) -> ProbeResult:
        self.asked.append(batch)
        fits = batch <= self.largest
        return ProbeResult(fits=fits, peak_memory_bytes=self.peak(batch) if fits else None)


def run(search: Search, probes: Probes) -> list[int]:
    """Run a search, check what holds for every search, and return the probed batch sizes."""
    assert drive(search, probes) == probes.largest
    fit, probed = 0, set[int]()
    miss: float = float("inf")
    for batch in probes.asked:
        assert fit < batch < miss, f"{batch} was implied by {fit} and {miss}"
        assert batch not in probed
        probed.add(batch)
        fit, miss = (batch, miss) if batch <= probes.largest else (fit, batch)
    return probes.asked


def probes_of_plain(largest: int, limit: int) -> int:
    """Count what doubling and bisection takes."""
    return len(run(doubling_and_bisection(limit=limit), Probes(largest)))


@st.composite
def monotone_laws(draw: st.DrawFn) -> tuple[int, int, int, Callable[[int], int | None]]:
    """Draw a limit, a largest batch from 0 to it, a memory limit, and peaks that may be absurd."""
    limit = draw(st.integers(1, 20) | st.integers(1, 10_000))
    largest = draw(st.integers(0, limit) | st.just(limit) | st.just(0))
    memory = draw(st.integers(1, 100) | st.integers(1, 10**12))
    absurd = st.none() | st.integers(-5, 200) | st.integers(-(10**13), 10**13)
    wild = draw(st.lists(absurd, min_size=1, max_size=12))
    fixed, slope = draw(st.integers(0, memory)), memory // (largest + 1) + 1

    def line(batch: int) -> int:
        return fixed + (memory - fixed) * batch // (largest + 1)

    peak = draw(
        st.sampled_from(
            [
                line,
                lambda batch: wild[batch % len(wild)],
                lambda batch: line(batch) + (wild[batch % len(wild)] or 0) % slope,
                lambda batch: memory - batch,  # falling: every line points nowhere
                lambda batch: memory * batch,  # all above the limit they are said to fit in
                lambda batch: 1 + batch // 1000,  # almost flat: every line points far away
            ]
        )
    )
    return limit, largest, memory, peak


SHARES = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
FIXED_SHARES = st.floats(-2, 1) | SHARES
ANY_ESTIMATES = st.none() | st.builds(
    LikelyLargest,
    batch=st.integers(1, 40) | st.integers(1, 20_000),
    fixed_share=FIXED_SHARES,
    error=SHARES,
)


@settings(max_examples=1200)
@given(monotone_laws(), ANY_ESTIMATES)
def test_any_law_is_searched_exactly_within_two_probes_of_plain(
    law: tuple[int, int, int, Callable[[int], int | None]], estimate: LikelyLargest | None
) -> None:
    """For any peaks and estimate, the result is exact for at most two probes over the plain."""
    limit, largest, memory, peak = law
    search = search_largest_batch(limit=limit, memory_limit_bytes=memory, estimate=estimate)
    probed = run(search, Probes(largest, peak))
    assert len(probed) <= probes_of_plain(largest, limit) + EXTRA_PROBES


@settings(max_examples=400)
@given(
    largest=st.integers(1, 5000),
    fraction=st.floats(0.001, 0.999),
    fixed_share=st.floats(0.05, 0.9),
    factor=st.floats(0.94, 1.06),
)
def test_an_estimate_within_its_error_takes_three_probes_on_an_affine_law(
    largest: int, fraction: float, fixed_share: float, factor: float
) -> None:
    """One below the estimate, then the limit that its peak predicts, then the miss above it.

    Rounding of the estimate to a whole batch size and of the peak cost one more at most.
    """
    law = Law("affine", "drawn", largest, largest + fraction, fixed_share, 80 * GIB)
    probes = Probes(largest, lambda batch: law.probe(batch).peak_memory_bytes)
    assert len(run(our_search(law, law.estimate(factor)), probes)) <= 4


class Adversary:
    """A device that chooses each outcome and peak only when it is probed."""

    def __init__(self, limit: int, choices: list[tuple[bool, int | None]]) -> None:
        self.fit, self.miss = 0, limit + 1
        self.choices = choices
        self.asked = 0

    def __call__(self, batch: int) -> ProbeResult:
        fits, peak = self.choices[self.asked % len(self.choices)]
        self.asked += 1
        self.fit, self.miss = (batch, self.miss) if fits else (self.fit, batch)
        return ProbeResult(fits=fits, peak_memory_bytes=peak if fits else None)


@settings(max_examples=800)
@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.booleans(), st.none() | st.integers(1, 2000)), min_size=1, max_size=20),
    ANY_ESTIMATES,
)
def test_an_adaptive_adversary_does_not_break_the_bound(
    limit: int, choices: list[tuple[bool, int | None]], estimate: LikelyLargest | None
) -> None:
    """It costs the search at most two probes more than the plain one."""
    adversary = Adversary(limit, choices)
    search = search_largest_batch(limit=limit, memory_limit_bytes=1000, estimate=estimate)
    result = drive(search, adversary)
    assert (result, result + 1) == (adversary.fit, adversary.miss)
    assert adversary.asked <= probes_of_plain(result, limit) + EXTRA_PROBES


def test_every_limit_up_to_64_is_found_exactly() -> None:
    """Every pair of largest batch and limit, with an exact line and without peaks."""
    for limit in range(1, 65):
        for largest in range(limit + 1):
            plain = probes_of_plain(largest, limit)
            for peak in (lambda batch: 3 * GIB + batch * GIB, lambda _: None):
                search = search_largest_batch(
                    limit=limit, memory_limit_bytes=(3 + largest) * GIB + GIB // 2
                )
                assert len(run(search, Probes(largest, peak))) <= plain + EXTRA_PROBES


def test_an_exact_line_takes_four_probes() -> None:
    """Two small batches, then the limit that they predict, then the miss above it."""
    probes = Probes(100, lambda batch: 20 * GIB + batch * GIB)
    probed = run(search_largest_batch(limit=8192, memory_limit_bytes=120 * GIB + 1), probes)
    assert probed == [1, 11, 100, 101]


def test_nothing_above_a_limit_that_fits_is_probed() -> None:
    """A stated limit needs no miss above it."""
    probes = Probes(40, lambda batch: GIB + batch)
    probed = run(search_largest_batch(limit=40, memory_limit_bytes=80 * GIB), probes)
    assert probed == [1, 40]


def test_nothing_that_fits_takes_one_probe() -> None:
    """A miss at batch size 1 ends the search, even where the memory limit is a single byte."""
    for memory in (1, GIB):
        assert run(search_largest_batch(limit=64, memory_limit_bytes=memory), Probes(0)) == [1]


def test_without_peaks_the_search_is_doubling_and_bisection() -> None:
    """Prediction needs peaks."""
    probed = run(search_largest_batch(limit=100, memory_limit_bytes=GIB), Probes(21))
    assert probed == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]
    assert probed == run(doubling_and_bisection(limit=100), Probes(21))


@pytest.mark.parametrize(("limit", "memory"), [(0, 1), (-3, 1), (1, 0)])
def test_limits_below_one_are_an_error(limit: int, memory: int) -> None:
    """The message names both values."""
    search = search_largest_batch(limit=limit, memory_limit_bytes=memory)
    with pytest.raises(ValueError, match=f"limit {limit} and memory_limit_bytes {memory}"):
        drive(search, Probes(0))


def test_an_exception_of_a_probe_is_passed_on() -> None:
    """Even StopIteration, which ends generators, leaves drive as the probe raised it."""

    def broken(batch: int) -> ProbeResult:
        raise StopIteration(batch)

    with pytest.raises(StopIteration):
        drive(doubling_and_bisection(limit=4), broken)


@pytest.mark.parametrize("seed", range(5))
def test_affine_laws_take_four_and_a_half_probes_and_one_miss(seed: int) -> None:
    """Limits from 1 to 256: exact always, at most 4.5 probes and 1.2 misses on average."""
    result = score(ours, draw_laws("affine", seed=seed, number=1000))
    assert result.exact == 1
    assert result.probes <= 4.5
    assert result.misses <= 1.2


@pytest.mark.parametrize(
    ("kind", "probes", "misses"),
    [("nearly affine", 7.6, 2.1), ("convex", 8.5, 3.2), ("concave", 8, 1.1)],
)
def test_other_laws_cost_less_than_two_thirds_of_plain(
    kind: Kind, probes: float, misses: float
) -> None:
    """Noise and curvature cost probes, but less than the plain search's 13.9 (4.1 misses)."""
    result = score(ours, draw_laws(kind, number=1000))
    assert result.exact == 1
    assert result.probes <= probes
    assert result.misses <= misses


@pytest.mark.parametrize(
    ("estimate", "bounds"),
    [
        ("right", (3.0, 3.7, 3.9, 4.7)),
        ("within 6 %", (3.0, 3.7, 3.7, 4.6)),
        ("within 6 %, fixed share too", (3.3, 3.8, 3.9, 4.6)),
        ("20 % high", (4.2, 5, 6.3, 6.4)),
        ("20 % low", (3.1, 4, 4.6, 6)),
        ("50 % high", (4.2, 5.1, 6.6, 6.6)),
        ("50 % low", (3.4, 4.1, 5.4, 6)),
        ("3 times too high", (4.1, 4.9, 5.3, 6.5)),
        ("3 times too low", (3.7, 4.2, 6.1, 5.6)),
    ],
)
def test_an_estimate_saves_probes_even_where_it_is_three_times_wrong(
    estimate: str, bounds: tuple[float, ...]
) -> None:
    """Average probes on affine, nearly affine, convex and concave laws, each found exactly."""
    for kind, bound in zip(KINDS, bounds, strict=False):
        result = score(partial(ours, estimated=ESTIMATES[estimate]), draw_laws(kind, number=1000))
        assert result.exact == 1
        assert result.probes <= bound


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("largest", [32, 256])
def test_an_estimate_within_six_percent_takes_three_probes_on_average(
    seed: int, largest: int
) -> None:
    """Other seeds and small limits, too."""
    within = partial(ours, estimated=ESTIMATES["within 6 %"])
    laws = draw_laws("affine", seed=seed, number=1000, largest=largest)
    assert score(within, laws).probes <= 3.0


@pytest.mark.parametrize(("largest", "noisy"), [(256, 3.7), (32, 2.7)])
def test_an_estimate_within_six_percent_at_every_batch_size_takes_three_probes_on_curves_too(
    largest: int, noisy: float
) -> None:
    """On average over the laws without noise, which costs more."""
    estimated = partial(ours, estimated=ESTIMATES["within 6 % at every batch size"])
    laws = {kind: draw_laws(kind, number=1000, largest=largest) for kind in KINDS}
    results = {kind: score(estimated, laws[kind]) for kind in KINDS}
    assert all(result.exact == 1 for result in results.values())
    exact_peaks: tuple[Kind, ...] = ("affine", "convex", "concave")
    assert sum(results[kind].probes for kind in exact_peaks) / len(exact_peaks) <= 3.0
    assert results["nearly affine"].probes <= noisy


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_law_in_the_benchmark_exceeds_the_bound(kind: Kind) -> None:
    """The bound holds for each kind of law in the published tables, with and without estimates."""

    def probes(law: Law) -> Probes:
        return Probes(law.largest, lambda batch: law.probe(batch).peak_memory_bytes)

    for law in draw_laws(kind):
        most = probes_of_plain(law.largest, 8192) + EXTRA_PROBES
        factors = (1 / 10, 1 / 3, 0.8, 1, 1.2, 3, 10)
        estimates = (*map(law.estimate, factors), *map(law.estimate_of_all, factors))
        for estimate in (None, *estimates):
            assert len(run(our_search(law, estimate), probes(law))) <= most


@pytest.mark.parametrize(
    ("largest", "estimate", "probed"),
    [
        (100, LikelyLargest(100, fixed_share=20 / 120), [100, 101]),
        (100, LikelyLargest(50, fixed_share=20 / 70), [50, 51, 100, 101]),
        (100, LikelyLargest(100, fixed_share=20 / 120, error=0.06), [94, 100, 101]),
        (100, LikelyLargest(105, fixed_share=20 / 125, error=0.06), [99, 100, 101]),
        (100, LikelyLargest(150, fixed_share=20 / 170, error=0.06), [141, 42, 100, 101]),
        (100, LikelyLargest(20, fixed_share=20 / 40, error=0.06), [19, 100, 101]),
        (100, LikelyLargest(900, error=1), [1, 5, 100, 101]),
        (40, LikelyLargest(10**6), [8192, 2458, 1, 2, 4, 8, 16, 32, 64, 48, 40, 44, 42, 41]),
        (0, LikelyLargest(4), [4, 1]),
        (0, LikelyLargest(2), [2, 1]),
    ],
)
def test_a_search_begins_at_its_estimate_less_the_expected_error(
    largest: int, estimate: LikelyLargest, probed: list[int]
) -> None:
    """The first fit shows the limit by the estimate's fixed share; a miss sends it far below."""
    memory = 20 * GIB + largest * GIB + GIB // 2
    search = search_largest_batch(limit=8192, memory_limit_bytes=memory, estimate=estimate)
    probes = Probes(largest, lambda batch: 20 * GIB + batch * GIB)
    assert run(search, probes) == probed


@pytest.mark.parametrize(
    ("peaks", "predicted"),
    [
        ({}, None),
        ({4: 0}, None),
        ({4: 1}, 8000),
        ({4: 40}, 200),
        ({4: 40, 8: 100}, 68),
        ({5: 40, 8: 100}, 53),
        ({1: 5, 3: 40, 4: 45, 5: 99, 9: 105}, 83),
        ({4: 80, 8: 80}, None),
        ({4: 79, 8: 80}, 3688),
        ({4: 81, 8: 80}, None),
    ],
)
def test_peaks_predict_the_limit_by_the_line_from_half_of_the_largest(
    peaks: dict[int, int], predicted: int | None
) -> None:
    """By hand, in a memory of 1,000; one peak predicts twice its share, a flat line nothing."""
    assert _predicted_largest(peaks, 1000, None) == predicted


@pytest.mark.parametrize(
    ("peaks", "share", "predicted"),
    [
        ({}, 0.5, None),
        ({4: 0}, 0.5, None),
        ({10: 500}, 0.0, 20),
        ({10: 500}, 0.5, 30),
        ({5: 500}, 1 / 3, 15),
        ({10: 500}, 1.0, None),
        ({1: 100, 10: 500}, 0.5, 21),
        ({4: 200, 5: 500}, 1 / 3, 15),
        ({10: 500}, -0.25, 18),
        ({5: 500}, -0.25, 9),
    ],
)
def test_an_estimate_replaces_the_smaller_point_of_the_line(
    peaks: dict[int, int], share: float, predicted: int | None
) -> None:
    """By hand, in a memory of 1,000, with a share at batch 10: of that peak, or scaled to it."""
    assert _predicted_largest(peaks, 1000, LikelyLargest(10, share)) == predicted


@pytest.mark.parametrize(
    ("fit", "miss", "limit", "probe"),
    [
        (2, 101, 200, 96),
        (20, 101, 200, 100),
        (20, 100, 200, 46),
        (100, 200, 400, 101),
        (20, 80, 400, 65),
        (20, 81, 400, 40),
        (98, 100, 400, 99),
        (20, 61, 60, 60),
        (20, 60, 60, 50),
    ],
)
def test_a_guided_probe_follows_the_prediction_until_a_miss_contradicts_it(
    fit: int, miss: int, limit: int, probe: int
) -> None:
    """Growth per probe is limited; after a miss, probes go well inside, then near."""
    assert _guided(100, fit, miss, limit) == probe
