"""Fits of real observation records: recovered, refused with a reason, and never mixed."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import built
from pydantic import ValidationError

from fitting.fit import (
    Fit,
    Fits,
    Law,
    Status,
    fit_observations,
    predict_step_seconds,
)
from fitting.laws import max_batch_eq1, step_seconds_affine, throughput_eq2
from trials.observation import (
    Basis,
    Environment,
    Measurement,
    MemoryReading,
    Observation,
    Outcome,
    ParameterCounts,
)
from trials.recipe import Recipe
from trials.workload import Cell

RECIPE = Recipe(method="qlora", lora_rank=16, precision="bf16", gradient_checkpointing=True)
GB = 10**9

# arXiv 2408.04693, Fig. 14: Mixtral-8x7B, Commonsense-15k, A40: (batch, sparsity, queries/s).
A40_MIXTRAL_CS = (
    (1, 1.0, 0.3213791846),
    (2, 1.0, 0.5138618605),
    (1, 0.25, 0.341252845),
    (2, 0.25, 0.6567373669),
    (3, 0.25, 0.9263685242),
    (4, 0.25, 1.134794525),
    (5, 0.25, 1.306288801),
    (6, 0.25, 1.460184208),
    (7, 0.25, 1.578898838),
    (8, 0.25, 1.655243555),
)


def cell(active: int | None = 2, *, gpu: str = "a40", seq_len: int = 128, rank: int = 16) -> Cell:
    """Mixtral with so many of its 8 experts active; None for a model without experts."""
    return Cell(
        gpu=gpu,
        model="llama-7b" if active is None else "mixtral-8x7b",
        recipe=RECIPE.model_copy(update={"lora_rank": rank}),
        experts=None if active is None else 8,
        active_experts=active,
        seq_len=seq_len,
    )


def environment(device_name: str = "NVIDIA A40", torch: str = "2.9.0") -> Environment:
    """Where a probe ran: another device or another torch is another stack."""
    return Environment(
        versions=(("python", "3.11"), ("torch", torch)),
        device_name=device_name,
        threads=8,
        host="h",
    )


def measurement(step_seconds: tuple[float, ...]) -> Measurement:
    """What a probe that fits measured, with 24 GB of weights."""
    return Measurement(
        memory_steps=3,
        memory=MemoryReading(peak_allocated_bytes=30 * GB),
        model_memory_bytes=24 * GB,
        step_seconds=step_seconds,
        stop_reason="precise" if step_seconds else None,
        built=built(
            parameters=ParameterCounts(total=47 * 10**9, trainable=10**8, four_bit=46 * 10**9)
        ),
    )


def probe(
    of: Cell,
    batch_size: int,
    step_seconds: tuple[float, ...] = (),
    *,
    outcome: Outcome = Outcome.FITS,
    basis: Basis = Basis.MEASURED,
    memory_gb: int = 48,
    at: Environment | None = None,
    **fields: object,
) -> Observation:
    """One probe; timed ones are on the ladder."""
    fits = outcome is Outcome.FITS
    values = {
        "cell": of,
        "purpose": "ladder" if step_seconds else "search",
        "batch_size": batch_size,
        "outcome": outcome,
        "basis": basis,
        "memory_limit_bytes": memory_gb * GB,
        "batch_limit": 1000,
        "seed": 0,
        "measurement": measurement(step_seconds) if fits else None,
        "environment": at or environment(),
        "started_at": "2026-01-01T00:00:00Z",
        "seconds": 9.0,
    }
    return Observation.model_validate(values | fields)


def ladder(
    of: Cell, batches: Iterable[int], t0: float, k: float, **fields: object
) -> list[Observation]:
    """Exact affine step times, with an outlier on either side for the median to ignore."""
    return [
        probe(of, b, ((t0 + b * k) / 9, t0 + b * k, (t0 + b * k) * 9), **fields)  # type: ignore[arg-type]
        for b in batches
    ]


def limit(of: Cell, largest: int, *, memory_gb: int = 48, **fields: object) -> list[Observation]:
    """A closed search: the largest batch fits and one more does not."""
    miss = {"outcome": Outcome.OUT_OF_MEMORY} | fields
    return [
        *([probe(of, largest, memory_gb=memory_gb)] if largest else []),
        probe(of, largest + 1, memory_gb=memory_gb, **miss),  # type: ignore[arg-type]
    ]


def fits_of(law: Law, observations: list[Observation]) -> list[Fit]:
    """All fits of one law."""
    return [fit for fit in fit_observations(observations) if fit.law is law]


def only(law: Law, observations: list[Observation]) -> Fit:
    """The one fit of a law."""
    (fit,) = fits_of(law, observations)
    return fit


def value(fit: Fit, name: str) -> float:
    """One parameter by name."""
    (found,) = (p.value for p in fit.parameters if p.name == name)
    return found


def test_affine_law_is_recovered_across_sparsities() -> None:
    """Median step times of two sparsities give t0, k0 and k1 with a zero error."""
    observations = ladder(cell(2), (1, 2, 4), t0=2.0, k=0.5 + 0.25 * 0.8)
    observations += ladder(cell(8), (1, 2), t0=2.0, k=0.5 + 0.8)
    fit = only(Law.STEP_SECONDS_AFFINE, observations)
    assert fit.status is Status.OK
    assert [p.name for p in fit.parameters] == ["t0", "k0", "k1"]
    assert [p.value for p in fit.parameters] == pytest.approx([2.0, 0.5, 0.8])
    assert fit.rmse == pytest.approx(0, abs=1e-12)
    assert (fit.points, fit.rank, fit.degrees_of_freedom) == (5, 3, 2)
    assert fit.group.key == "a40/mixtral-8x7b/qlora-r16-bf16-checkpointed/seq128"


seconds = st.floats(min_value=1e-3, max_value=1e3)


@given(
    t0=seconds,
    k0=seconds,
    k1=seconds,
    batches=st.sets(st.integers(min_value=1, max_value=512), min_size=2, max_size=8),
)
def test_affine_law_is_recovered_whatever_its_coefficients(
    t0: float, k0: float, k1: float, batches: set[int]
) -> None:
    """Over six orders of magnitude the fitted law gives back the step times it was fitted to."""
    observations = [
        probe(of, b, (float(step_seconds_affine(b, of.sparsity, t0, k0, k1)),))
        for of in (cell(2), cell(8))
        for b in batches
    ]
    fit = only(Law.STEP_SECONDS_AFFINE, observations)
    assert fit.status.is_usable
    for b in batches:
        predicted = predict_step_seconds(fit, b, 0.25).value
        assert predicted == pytest.approx(float(step_seconds_affine(b, 0.25, t0, k0, k1)), rel=1e-6)


def test_eq2_is_recovered() -> None:
    """Queries per second are the batch over the median step time."""
    observations = [
        probe(of, b, (b / float(throughput_eq2(b, of.sparsity, 0.2, 0.3)),))
        for of in (cell(2), cell(8))
        for b in (1, 2, 4)
    ]
    fit = only(Law.THROUGHPUT_EQ2, observations)
    assert fit.status is Status.OK
    assert (value(fit, "c2_over_c3"), value(fit, "c4")) == pytest.approx((0.2, 0.3))


def test_the_papers_points_fit_eq2_as_it_claims_and_the_affine_law_better() -> None:
    """Fig. 14 claims an RMSE under 0.8 queries/s; in that same unit the affine law errs less."""
    observations = [
        probe(cell(round(8 * sparsity)), b, (b / queries,))
        for b, sparsity, queries in A40_MIXTRAL_CS
    ]
    eq2 = only(Law.THROUGHPUT_EQ2, observations)
    affine = only(Law.STEP_SECONDS_AFFINE, observations)
    errors = [b / predict_step_seconds(affine, b, s).value - q for b, s, q in A40_MIXTRAL_CS]
    assert eq2.rmse is not None
    assert math.sqrt(np.mean(np.square(errors))) < eq2.rmse < 0.8
    assert eq2.rmse_unit == "queries/s"


def test_repeats_are_points_of_their_own() -> None:
    """An anchor measured twice counts twice, so that its scatter shows."""
    observations = ladder(cell(), (1, 2, 4), 2.0, 0.5) + ladder(cell(), (1,), 2.1, 0.5, repeat=1)
    fit = only(Law.STEP_SECONDS_AFFINE, observations)
    assert fit.points == 4
    assert fit.rmse is not None
    assert fit.rmse > 0


@pytest.mark.parametrize(
    ("active", "says"), [(2, "nothing is known of other sparsities"), (None, "without experts")]
)
def test_one_sparsity_reduces_the_affine_law_and_says_so(active: int | None, says: str) -> None:
    """All that one sparsity can tell is t = t0 + b * k."""
    fit = only(Law.STEP_SECONDS_AFFINE, ladder(cell(active), (1, 2, 4), 2.0, 0.5))
    assert fit.status is Status.OK
    assert (value(fit, "t0"), value(fit, "k")) == pytest.approx((2.0, 0.5))
    assert fit.note is not None
    assert says in fit.note


def test_a_negative_fixed_cost_is_held_at_zero_and_told() -> None:
    """Step times that would need t0 < 0 give t0 = 0 without a standard error."""
    fit = only(Law.STEP_SECONDS_AFFINE, ladder(cell(), (1, 2, 4), -0.1, 0.5))
    assert fit.status is Status.BOUND_HIT
    assert fit.parameters[0].value == 0
    assert fit.parameters[0].standard_error is None
    assert fit.covariance[0] == (0.0, 0.0)
    assert "t0 held at its bound 0" in str(fit.note)


def test_unfit_untimed_and_searching_probes_are_no_points_of_time() -> None:
    """Only a ladder probe that fits and has step times is a point."""
    observations = ladder(cell(), (1, 2, 4), 2.0, 0.5)
    observations += [
        probe(cell(), 8, outcome=Outcome.OUT_OF_MEMORY, purpose="ladder"),
        probe(cell(), 7, (99.0,), purpose="search"),
        probe(cell(), 6, purpose="ladder"),
    ]
    assert only(Law.STEP_SECONDS_AFFINE, observations).points == 3


def test_no_timed_probe_is_told_with_a_remedy() -> None:
    """A searched cell without a ladder is a refusal, not a silence."""
    fit = only(Law.STEP_SECONDS_AFFINE, limit(cell(), 4))
    assert fit.status is Status.NO_DATA
    assert (fit.points, fit.parameters, fit.input_range, fit.rmse) == (0, (), (), None)
    assert "time at least 3 ladder probes" in str(fit.remedy)


@pytest.mark.parametrize("law", [Law.STEP_SECONDS_AFFINE, Law.THROUGHPUT_EQ2])
@pytest.mark.parametrize("batches", [(1, 2), (4, 4, 4)])
def test_two_points_or_one_batch_size_are_too_few(law: Law, batches: tuple[int, ...]) -> None:
    """Neither an exact line nor a pile of repeats is a fit."""
    fit = only(law, ladder(cell(), batches, 2.0, 0.5))
    assert fit.status is Status.TOO_FEW_POINTS
    assert fit.parameters == ()
    assert "at least 3 points, among them two batch sizes" in str(fit.remedy)


def test_two_sparsities_need_four_points() -> None:
    """The full form has three parameters."""
    observations = ladder(cell(2), (1, 2), 2.0, 0.5) + ladder(cell(8), (1,), 2.0, 0.9)
    fit = only(Law.STEP_SECONDS_AFFINE, observations)
    assert fit.status is Status.TOO_FEW_POINTS
    assert "at least 4 points" in str(fit.remedy)


def test_batches_that_mirror_the_sparsities_are_rank_deficient() -> None:
    """Batch 4 of 2 experts and batch 1 of 8 do the same expert work: repeats do not help."""
    observations = ladder(cell(2), (4, 4), 2.0, 0.5) + ladder(cell(8), (1, 1), 2.0, 0.9)
    fit = only(Law.STEP_SECONDS_AFFINE, observations)
    assert fit.status is Status.RANK_DEFICIENT
    assert (fit.rank, fit.parameter_count, fit.parameters) == (2, 3, ())
    assert fit.note == "the batch sizes and sparsities measured tell only 2 of 3 parameters apart"
    assert fit.remedy == "measure two different batch sizes at the same sparsity"


def test_stacks_bases_recipes_lengths_and_gpus_are_never_mixed() -> None:
    """Each differs in one respect from the first, and each has coefficients of its own."""
    kinds: list[tuple[Cell, dict[str, object]]] = [
        (cell(), {}),
        (cell(), {"at": environment(torch="2.10.0")}),
        (cell(), {"basis": Basis.SIMULATED}),
        (cell(rank=8), {}),
        (cell(seq_len=256), {}),
        (cell(gpu="h100"), {}),
    ]
    observations = [
        o
        for k, (of, fields) in enumerate(kinds, start=1)
        for o in ladder(of, (1, 2, 4), 2.0, float(k), **fields)
    ]
    fits = fits_of(Law.STEP_SECONDS_AFFINE, observations)
    assert sorted(value(fit, "k") for fit in fits) == pytest.approx([1, 2, 3, 4, 5, 6])
    assert len({fit.key for fit in fits}) == len(kinds)


def test_the_order_of_the_log_does_not_matter() -> None:
    """A resumed run appends in another order and must give the same file."""
    observations = ladder(cell(2), (1, 2, 4), 2.0, 0.5) + limit(cell(8), 3) + limit(cell(2), 9)
    assert fit_observations(observations) == fit_observations(observations[::-1])


LIMITS = tuple(
    (active, gpu, memory_gb, seq_len)
    for active in (2, 8)
    for gpu, memory_gb in (("a40", 48), ("h100", 80))
    for seq_len in (64, 128)
)


def eq1_observations(c0: float, c1: float) -> list[Observation]:
    """Closed searches whose largest batches are those of Eq. 1, rounded down."""
    return [
        o
        for active, gpu, memory_gb, seq_len in LIMITS
        for o in limit(
            cell(active, gpu=gpu, seq_len=seq_len),
            math.floor(max_batch_eq1(memory_gb, 24, seq_len, active / 8, c0, c1)),
            memory_gb=memory_gb,
        )
    ]


def test_eq1_is_recovered_across_gpus_sparsities_and_lengths() -> None:
    """From rounded batches, c0 and c1 come back within what rounding hides."""
    fit = only(Law.MAX_BATCH_EQ1, eq1_observations(c0=82, c1=0.88))
    assert fit.status is Status.OK
    assert value(fit, "c0") == pytest.approx(82, rel=0.05)
    assert value(fit, "c1") == pytest.approx(0.88, abs=0.02)
    assert fit.group.key == "mixtral-8x7b/qlora-r16-bf16-checkpointed"
    assert "fitted to b + 0.5" in str(fit.note)
    assert "of 8 cells exactly; GPUs: a40, h100" in str(fit.note)
    assert [(r.name, r.low, r.high) for r in fit.input_range] == [
        ("memory_gb", 48, 80),
        ("model_memory_gb", 24, 24),
        ("seq_len", 64, 128),
        ("sparsity", 0.25, 1),
    ]


def test_eq1_crosses_devices_but_not_software() -> None:
    """A stack names its device, and Eq. 1 is about all devices; another torch is another law."""
    observations = limit(cell(8), 3, memory_gb=48) + [
        o.model_copy(update={"environment": environment(device_name="NVIDIA H100")})
        for o in limit(cell(8, gpu="h100"), 9, memory_gb=80)
    ]
    assert [fit.points for fit in fits_of(Law.MAX_BATCH_EQ1, observations)] == [2]
    observations += [
        o.model_copy(update={"environment": environment(torch="2.10.0")})
        for o in limit(cell(8, seq_len=64), 6)
    ]
    assert sorted(fit.points for fit in fits_of(Law.MAX_BATCH_EQ1, observations)) == [1, 2]


def test_another_driver_is_no_other_law_of_what_fits() -> None:
    """Each cloud has its own; step times stay apart all the same."""
    driven = environment().model_copy(
        update={"versions": (("driver", "580"), *environment().versions)}
    )
    observations = limit(cell(8), 3) + [
        o.model_copy(update={"environment": driven}) for o in limit(cell(8, seq_len=64), 6)
    ]
    assert [fit.points for fit in fits_of(Law.MAX_BATCH_EQ1, observations)] == [2]
    assert driven.stack != environment().stack


def test_a_capped_gpu_has_limits_and_no_speed() -> None:
    """Its steps were a larger GPU's; its largest batches are a group of their own."""
    alike = cell().model_copy(update={"capped_on": "H200-SXM"})
    capped = [
        o.model_copy(update={"cell": alike, "basis": Basis.CAPPED})
        for o in (*limit(cell(), 8), *ladder(cell(), (1, 2, 4, 8), 0.1, 0.1))
    ]
    fits = fit_observations(capped)
    assert {fit.law for fit in fits} == {Law.MAX_BATCH_EQ1}
    both = fit_observations([*capped, *limit(cell(), 9)])
    assert {(fit.basis, fit.points) for fit in both if fit.law is Law.MAX_BATCH_EQ1} == {
        (Basis.CAPPED, 1),
        (Basis.MEASURED, 1),
    }


def test_one_sparsity_cannot_tell_c0_from_c1() -> None:
    """However many cells: the remedy is a second sparsity, in words."""
    observations = [o for n in (64, 128, 256) for o in limit(cell(seq_len=n), 1024 // n)]
    fit = only(Law.MAX_BATCH_EQ1, observations)
    assert fit.status is Status.RANK_DEFICIENT
    assert (fit.rank, fit.parameter_count, fit.parameters) == (1, 2, ())
    assert fit.note == (
        "every cell has sparsity 0.25, and at one sparsity c0 and c1 cannot be told apart"
    )
    assert str(fit.remedy).startswith("measure a second sparsity")


def test_a_model_without_experts_has_no_c1() -> None:
    """Sparsity is 1 whatever one does, so c0 is the whole law."""
    observations = [o for n in (64, 128, 256) for o in limit(cell(None, seq_len=n), 1024 // n)]
    fit = only(Law.MAX_BATCH_EQ1, observations)
    assert fit.status is Status.OK
    assert [p.name for p in fit.parameters] == ["c0"]


def test_too_few_cells_name_lengths_gpus_and_sparsities() -> None:
    """One cell gives one point."""
    fit = only(Law.MAX_BATCH_EQ1, limit(cell(), 8))
    assert fit.status is Status.TOO_FEW_POINTS
    assert "at least 3 cells: two sequence lengths or GPUs are needed" in str(fit.remedy)
    assert "two sparsities" in str(fit.remedy)


@pytest.mark.parametrize(
    "unknown",
    [
        limit(cell(), 0),
        limit(cell(), 8, outcome=Outcome.TIMED_OUT),
        limit(cell(), 8, outcome=Outcome.HOST_OUT_OF_MEMORY),
        [probe(cell(), 8)],
        [probe(cell(), 8, batch_limit=8)],
    ],
    ids=["none fits", "time ran out", "host ran out", "still searching", "limit reached"],
)
def test_a_largest_batch_that_memory_did_not_set_is_left_out(unknown: list[Observation]) -> None:
    """It is no point of Eq. 1: alone it is no data, among others it is counted in the note."""
    alone = only(Law.MAX_BATCH_EQ1, unknown)
    assert alone.status is Status.NO_DATA
    assert "none of 1 cell has a largest batch" in str(alone.note)
    known = [o for n in (64, 256) for active in (2, 8) for o in limit(cell(active, seq_len=n), 4)]
    beside = only(Law.MAX_BATCH_EQ1, known + unknown)
    assert beside.points == 4
    assert "1 of 5 cells left out" in str(beside.note)


def test_a_probe_killed_with_its_child_belongs_to_the_only_stack() -> None:
    """A miss that cannot say where it ran still bounds the search of its cell."""
    fits, miss = limit(cell(), 8)
    killed = miss.model_copy(update={"environment": None})
    assert only(Law.MAX_BATCH_EQ1, [fits, killed]).points == 1
    elsewhere = limit(cell(8), 2)[0].model_copy(update={"environment": environment(torch="2.10")})
    assert {f.points for f in fits_of(Law.MAX_BATCH_EQ1, [fits, killed, elsewhere])} == {0}


def test_a_group_that_never_says_where_it_ran_has_no_stack() -> None:
    """Absent is None, and nothing is fitted to it."""
    lost = limit(cell(), 0)[0].model_copy(update={"environment": None})
    assert {(fit.stack, fit.status) for fit in fit_observations([lost])} == {(None, Status.NO_DATA)}


def test_a_model_larger_than_the_memory_it_fits_in_is_named() -> None:
    """A broken record is an error with the cell's name, not a negative coefficient."""
    with pytest.raises(ValueError, match=r"2of8/seq128: 8 queries are said to fit"):
        fit_observations(limit(cell(), 8, memory_gb=20))


def noisy_ladder(batches: Iterable[int]) -> list[Observation]:
    """Two sparsities, two visits of each batch, 2 % noise on every step time."""
    generator = np.random.default_rng(1)
    return [
        probe(of, b, (float(step_seconds_affine(b, of.sparsity, 2, 0.4, 0.8) * factor),))
        for of in (cell(2), cell(8))
        for b in batches
        for factor in generator.normal(1, 0.02, size=2)
    ]


def test_prediction_interval_covers_what_it_says() -> None:
    """Of fresh steps with 2 % noise, 95 % lie inside, within what 400 draws can tell."""
    fit = only(Law.STEP_SECONDS_AFFINE, noisy_ladder((1, 2, 3, 4, 6, 8, 12, 16)))
    predicted = predict_step_seconds(fit, 5, 0.25)
    fresh = float(step_seconds_affine(5, 0.25, 2, 0.4, 0.8)) * np.random.default_rng(2).normal(
        1, 0.02, size=400
    )
    assert predicted.low < predicted.value < predicted.high
    assert 0.9 < np.mean((fresh > predicted.low) & (fresh < predicted.high)) < 0.99


def test_few_points_make_a_wide_interval() -> None:
    """Student's t, not 1.96: with one degree of freedom the interval is many times wider."""
    few, many = (
        only(Law.STEP_SECONDS_AFFINE, noisy_ladder(batches)) for batches in ((1, 4), range(1, 17))
    )
    wide, narrow = (predict_step_seconds(fit, 2, 0.25) for fit in (few, many))
    assert wide.high - wide.low > narrow.high - narrow.low


@pytest.mark.parametrize(
    ("batch_size", "sparsity", "extrapolated"),
    [(1, 0.25, False), (8, 1.0, False), (3, 0.5, False), (9, 0.25, True), (2, 0.125, True)],
)
def test_outside_the_measured_range_is_marked(
    batch_size: int, sparsity: float, *, extrapolated: bool
) -> None:
    """A batch or a sparsity beyond the points is extrapolation, in between is not."""
    fit = only(Law.STEP_SECONDS_AFFINE, noisy_ladder((1, 8)))
    assert predict_step_seconds(fit, batch_size, sparsity).extrapolated is extrapolated


def test_a_refusal_predicts_nothing_and_says_why() -> None:
    """The error carries the remedy."""
    fit = only(Law.STEP_SECONDS_AFFINE, ladder(cell(), (1, 2), 2.0, 0.5))
    with pytest.raises(ValueError, match=r"TOO_FEW_POINTS.*measure at least 3 points"):
        predict_step_seconds(fit, 1, 0.25)


def test_another_law_does_not_predict_step_times() -> None:
    """Eq. 2 speaks of queries per second."""
    fit = only(Law.THROUGHPUT_EQ2, ladder(cell(), (1, 2, 4), 2.0, 0.5))
    with pytest.raises(ValueError, match="does not predict step times"):
        predict_step_seconds(fit, 1, 0.25)


def test_fits_survive_the_disk_to_the_last_bit() -> None:
    """Fits and refusals come back equal from JSON."""
    observations = noisy_ladder((1, 2, 4)) + eq1_observations(82, 0.88) + limit(cell(rank=8), 3)
    fits = Fits(fits=tuple(fit_observations(observations)))
    assert {fit.status for fit in fits.fits} >= {Status.OK, Status.NO_DATA}
    assert Fits.model_validate_json(fits.model_dump_json()) == fits


def test_a_refusal_with_parameters_is_no_record() -> None:
    """The record itself keeps a refusal from being read as a fit."""
    fit = only(Law.STEP_SECONDS_AFFINE, noisy_ladder((1, 2, 4)))
    with pytest.raises(ValidationError, match="only a remedy"):
        Fit.model_validate(fit.model_dump() | {"status": "RANK_DEFICIENT"})
    with pytest.raises(ValidationError, match="covariance is not 3 by"):
        Fit.model_validate(fit.model_dump() | {"covariance": ((1.0,),)})
