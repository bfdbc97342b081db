"""Fits of observations: laws are recovered, fit failures have a reason, groups are never mixed."""

import pytest
from builders.mixtral_probes import (
    cell,
    environment,
    eq1_observations,
    fits_of,
    ladder,
    limit,
    measurement,
    noisy_ladder,
    only,
    probe,
    value,
)
from builders.step_time_equations import throughput_eq2
from pydantic import ValidationError

from fitting.fit import Fits, fit_observations
from fitting.laws.fit_result import Fit, Law
from fitting.numerics.least_squares import Status
from trials.records.cell import Cell
from trials.records.observation import Basis, Outcome

# arXiv 2408.04693, Fig. 14: Mixtral-8x7B, Commonsense-15k, A40: (batch, sparsity, examples/s).
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


def test_eq2_is_recovered() -> None:
    """Throughput is the batch size over the median step time."""
    observations = [
        probe(probed_cell, b, (b / float(throughput_eq2(b, probed_cell.sparsity, 0.2, 0.3)),))
        for probed_cell in (cell(2), cell(8))
        for b in (1, 2, 4)
    ]
    fit = only(Law.THROUGHPUT_EQ2, observations)
    assert fit.status is Status.OK
    assert (value(fit, "c2_over_c3"), value(fit, "c4")) == pytest.approx((0.2, 0.3))


def test_the_papers_points_fit_eq2_as_it_claims() -> None:
    """Fig. 14 claims an RMSE under 0.8 examples/s."""
    observations = [
        probe(cell(round(8 * sparsity)), b, (b / examples,))
        for b, sparsity, examples in A40_MIXTRAL_CS
    ]
    eq2 = only(Law.THROUGHPUT_EQ2, observations)
    assert eq2.rmse is not None
    assert 0 < eq2.rmse < 0.8
    assert eq2.rmse_unit == "examples/s"


def test_repeats_are_points_of_their_own() -> None:
    """A batch size measured twice counts twice, so that its scatter shows."""
    observations = ladder(cell(), (1, 2, 4), 2.0, 0.5) + ladder(cell(), (1,), 2.1, 0.5, repeat=1)
    fit = only(Law.THROUGHPUT_EQ2, observations)
    assert fit.points == 4
    assert fit.rmse is not None
    assert fit.rmse > 0


def test_only_timed_ladder_probes_that_fit_are_points() -> None:
    """Probes that miss, thrash, search or have no step times are not points."""
    observations = ladder(cell(), (1, 2, 4), 2.0, 0.5)
    observations += [
        probe(cell(), 8, outcome=Outcome.OUT_OF_MEMORY, purpose="ladder"),
        probe(
            cell(), 5, outcome=Outcome.THRASHING, purpose="ladder", measurement=measurement((9.0,))
        ),
        probe(cell(), 7, (99.0,), purpose="search"),
        probe(cell(), 6, purpose="ladder"),
    ]
    assert only(Law.THROUGHPUT_EQ2, observations).points == 3


def test_a_cell_without_timed_probes_is_a_failure_with_a_remedy() -> None:
    """A searched cell without a ladder stays visible."""
    fit = only(Law.THROUGHPUT_EQ2, limit(cell(), 4))
    assert fit.status is Status.NO_DATA
    assert (fit.points, fit.parameters, fit.input_range, fit.rmse) == (0, (), (), None)
    assert "3 ladder" in str(fit.remedy)


@pytest.mark.parametrize("batches", [(1, 2), (4, 4, 4)])
def test_two_points_or_one_batch_size_are_too_few(batches: tuple[int, ...]) -> None:
    """Neither two points nor repeats of one batch size are a fit."""
    fit = only(Law.THROUGHPUT_EQ2, ladder(cell(), batches, 2.0, 0.5))
    assert fit.status is Status.TOO_FEW_POINTS
    assert fit.parameters == ()
    assert "at least 3 points" in str(fit.remedy)


def test_batches_that_mirror_the_sparsities_are_rank_deficient() -> None:
    """Eq. 2 has one term for batch 2 of 2 experts and batch 16 of 8; repeats do not help."""
    observations = ladder(cell(2), (2, 2), 2.0, 0.5) + ladder(cell(8), (16, 16), 2.0, 0.9)
    fit = only(Law.THROUGHPUT_EQ2, observations)
    assert fit.status is Status.RANK_DEFICIENT
    assert (fit.rank, fit.parameter_count, fit.parameters) == (1, 2, ())
    assert "1 of 2 parameters" in str(fit.note)
    assert "two different" in str(fit.remedy)


def test_stacks_bases_weights_recipes_lengths_and_gpus_are_never_mixed() -> None:
    """Each group differs from the first in one respect and has coefficients of its own."""
    kinds: list[tuple[Cell, dict[str, object]]] = [
        (cell(), {}),
        (cell(), {"at": environment(torch="2.10.0")}),
        (cell(), {"basis": Basis.SIMULATED}),
        (cell(rank=8), {}),
        (cell(seq_len=256), {}),
        (cell(gpu="h100"), {}),
        (cell().model_copy(update={"weights": "pretrained"}), {}),
    ]
    observations = [
        o
        for k, (probed_cell, fields) in enumerate(kinds, start=1)
        for b in (1, 2, 4)
        for o in [
            probe(
                probed_cell,
                b,
                (b / float(throughput_eq2(b, probed_cell.sparsity, 0.1, k)),),
                **fields,
            )
        ]  # type: ignore[arg-type]
    ]
    fits = fits_of(Law.THROUGHPUT_EQ2, observations)
    assert sorted(value(fit, "c4") for fit in fits) == pytest.approx([1, 2, 3, 4, 5, 6, 7])
    assert len({fit.key for fit in fits}) == len(kinds)


def test_the_order_of_the_log_does_not_matter() -> None:
    """A resumed run appends in another order and must give the same file."""
    observations = ladder(cell(2), (1, 2, 4), 2.0, 0.5) + limit(cell(8), 3) + limit(cell(2), 9)
    assert fit_observations(observations) == fit_observations(observations[::-1])


def test_fits_survive_the_disk_to_the_last_bit() -> None:
    """Fits and failures are equal after a round trip through JSON."""
    observations = noisy_ladder((1, 2, 4)) + eq1_observations(82, 0.88) + limit(cell(rank=8), 3)
    fits = fit_observations(observations)
    assert {fit.status for fit in fits.fits} >= {Status.OK, Status.NO_DATA}
    assert Fits.model_validate_json(fits.model_dump_json()) == fits


def test_a_failed_fit_with_parameters_is_invalid() -> None:
    """The record's validation keeps a failure from being read as a fit."""
    fit = only(Law.THROUGHPUT_EQ2, noisy_ladder((1, 2, 4)))
    with pytest.raises(ValidationError, match="only a remedy"):
        Fit.model_validate(fit.model_dump() | {"status": "RANK_DEFICIENT"})
    with pytest.raises(ValidationError, match="covariance is not 2 by"):
        Fit.model_validate(fit.model_dump() | {"covariance": ((1.0,),)})
