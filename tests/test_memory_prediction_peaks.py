"""Peak memory affine in padded tokens: recovered, inverted for largest batch sizes, or failed."""

import pytest
from builders.mixtral_probes import (
    cell,
    environment,
    fits_of,
    ladder,
    limit,
    measurement,
    only,
    probe,
    value,
)

from fitting.laws.fit_result import Law
from fitting.memory_prediction import predict_largest_batch
from fitting.numerics.least_squares import Status
from trials.records.cell import Cell
from trials.records.observation import Basis, MemoryReading, Observation, Outcome

GIB = 2**30
HELD, PER_TOKEN = 27.5, 0.02  # GiB


def peak(
    probed_cell: Cell,
    batch_size: int,
    *,
    off: float = 0.0,
    repeat: int = 0,
    basis: Basis = Basis.MEASURED,
) -> Observation:
    """A probe that fits, with the law's peak off by a share."""
    gib = (HELD + PER_TOKEN * batch_size * probed_cell.seq_len) * (1 + off)
    memory = MemoryReading(peak_allocated_bytes=round(gib * GIB))
    counted = measurement(()).model_copy(update={"memory": memory})
    return probe(probed_cell, batch_size, measurement=counted, repeat=repeat, basis=basis)


def peaks(*, off: float = 0.0) -> list[Observation]:
    """Peaks on two GPUs at two lengths, alternately above and below the law by a share."""
    return [
        peak(cell(gpu=gpu, seq_len=length), size, off=off * (-1) ** place)
        for gpu in ("a40", "h100")
        for length in (128, 256)
        for place, size in enumerate((1, 2, 4))
    ]


def test_memory_held_and_per_token_are_recovered_across_gpus_and_lengths() -> None:
    """Each number of active experts has a law of its own."""
    fit = only(Law.MEMORY_AFFINE, peaks())
    assert fit.status is Status.OK
    assert (value(fit, "m0"), value(fit, "m")) == pytest.approx((HELD, PER_TOKEN))
    assert [p.unit for p in fit.parameters] == ["GiB", "GiB/token"]
    assert fit.group.key == "mixtral-8x7b/qlora-r16-bf16-checkpointed/top2"
    assert (fit.group.gpu, fit.group.seq_len) == (None, None)
    assert [(r.name, r.low, r.high) for r in fit.input_range] == [
        ("seq_len", 128, 256),
        ("tokens", 128, 1024),
    ]
    both = fits_of(Law.MEMORY_AFFINE, [*peaks(), *(peak(cell(8), size) for size in (1, 2, 4))])
    assert sorted(str(fit.group.active_experts) for fit in both) == ["2", "8"]


def test_simulated_peaks_and_other_software_are_never_mixed_in() -> None:
    """Simulated and capped peaks and other software have laws of their own."""
    newer = environment(torch="2.10.0")
    observations = peaks()
    others = [
        o.model_copy(update=changed)
        for o in observations
        for changed in (
            {"basis": Basis.SIMULATED},
            {"basis": Basis.CAPPED},
            {"environment": newer},
        )
    ]
    fits = fits_of(Law.MEMORY_AFFINE, [*observations, *others])
    assert [fit.points for fit in fits] == [len(observations)] * 4
    assert len({fit.key for fit in fits}) == 4


def test_the_highest_peak_of_several_visits_counts_and_no_miss_does() -> None:
    """Every purpose of a probe counts; misses do not."""
    observations = [*peaks(), *(peak(cell(), size, repeat=1, off=-0.1) for size in (1, 2, 4))]
    thrashing = peak(cell(), 64).model_copy(update={"outcome": Outcome.THRASHING})
    fit = only(Law.MEMORY_AFFINE, [*observations, thrashing])
    assert fit.points == len(peaks())
    assert value(fit, "m0") == pytest.approx(HELD)


@pytest.mark.parametrize(
    ("usable_gib", "seq_len", "batch_size", "extrapolated"),
    [
        (HELD + 4 * 256 * PER_TOKEN, 256, 4, False),
        (HELD + 3.99 * 256 * PER_TOKEN, 256, 3, False),
        (HELD + 9 * 128 * PER_TOKEN, 128, 9, True),
        (HELD + 4 * 512 * PER_TOKEN, 512, 4, True),
        (20.0, 128, 0, True),
    ],
)
def test_the_largest_batch_is_rounded_down(
    usable_gib: float, seq_len: int, batch_size: int, *, extrapolated: bool
) -> None:
    """It is never below zero, and extrapolated beyond the measured tokens or lengths."""
    prediction = predict_largest_batch(only(Law.MEMORY_AFFINE, peaks()), usable_gib, seq_len)
    assert (prediction.value, prediction.extrapolated) == (batch_size, extrapolated)


def test_scatter_widens_the_interval_of_the_largest_batch() -> None:
    """The bounds are the batch sizes that fit in less and in more memory."""
    steady, loose = (
        predict_largest_batch(only(Law.MEMORY_AFFINE, peaks(off=off)), 48.0, 64)
        for off in (1e-4, 0.02)
    )
    assert steady.low <= steady.value <= steady.high
    assert loose.high - loose.low > steady.high - steady.low
    assert loose.low < loose.value < loose.high


def test_the_note_compares_the_law_with_measured_largest_batches() -> None:
    """The note also says what the law does not include."""
    usable = (HELD + 8.5 * 128 * PER_TOKEN) * GIB / 1e9
    observations = [
        o.model_copy(update={"memory_limit_bytes": round(usable * 1e9)})
        for o in (*(peak(cell(), size) for size in (1, 2, 4, 8)), *limit(cell(), 8)[1:])
    ]
    note = str(only(Law.MEMORY_AFFINE, observations).note)
    assert "1 of 1 largest batches" in note
    assert "allocator" in note


@pytest.mark.parametrize(
    ("observations", "status", "note", "remedy"),
    [
        (limit(cell(), 0), Status.NO_DATA, "no probe fits", "shorten the examples"),
        (
            [peak(cell(), 1), peak(cell(), 2)],
            Status.TOO_FEW_POINTS,
            "2 points",
            "probe at least 3 batch sizes or sequence lengths that fit",
        ),
        (
            [peak(cell(gpu=gpu), 2) for gpu in ("a", "b", "c")],
            Status.RANK_DEFICIENT,
            "every step had 256 tokens",
            "probe another batch size",
        ),
    ],
)
def test_a_failed_fit_has_a_reason_and_a_remedy(
    observations: list[Observation], status: Status, note: str, remedy: str
) -> None:
    """It predicts no largest batch size."""
    fit = only(Law.MEMORY_AFFINE, observations)
    assert (fit.status, fit.parameters) == (status, ())
    assert str(fit.note).startswith(note)
    assert str(fit.remedy).startswith(remedy)
    with pytest.raises(ValueError, match=f"predicts nothing .*{status}"):
        predict_largest_batch(fit, 48.0, 128)


def test_memory_that_does_not_grow_predicts_no_largest_batch() -> None:
    """A law of throughput predicts none either."""
    flat = [probe(cell(), size) for size in (1, 2, 4)]
    with pytest.raises(ValueError, match="do not grow with the tokens"):
        predict_largest_batch(only(Law.MEMORY_AFFINE, flat), 48.0, 128)
    eq2 = only(Law.THROUGHPUT_EQ2, ladder(cell(), (1, 2, 4), 2.0, 0.5))
    with pytest.raises(ValueError, match="predicts no memory"):
        predict_largest_batch(eq2, 48.0, 128)


def test_a_parameter_held_at_zero_is_noted() -> None:
    """Peaks below the tokens' share would need a negative constant."""
    observations = [peak(cell(), size, off=off) for size, off in ((1, -0.9), (2, -0.5), (4, 0.0))]
    fit = only(Law.MEMORY_AFFINE, observations)
    assert fit.status is Status.BOUND_HIT
    assert (fit.parameters[0].value, fit.parameters[0].standard_error) == (0, None)
    assert fit.covariance[0] == (0.0, 0.0)
    assert "m0 held at its bound 0" in str(fit.note)
