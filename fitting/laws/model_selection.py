"""Choice of a family's law by its errors on points left out of the fit."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fitting.laws.forms import FittedForm, FittedValues, Form
from fitting.laws.robust_fit import fit_form
from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.points.step_time_rows import StepTimes

FitFunction = Callable[[StepTimes], FittedValues | None]
# Two forms can be one law but for rounding, as at a single sequence length, where tokens count
# examples: errors are compared to this many decimals.
ERROR_DECIMALS = 9
NO_PREDICTION_ERROR = 1.0  # error of a law on a point that it cannot predict without that point


@dataclass(frozen=True, slots=True)
class CandidateFit:
    """A fitted form and its errors on points left out of the fit.

    Attributes:
        errors: (rows,) relative error of the throughput at each point by a fit without the point,
            to first order; ``NO_PREDICTION_ERROR`` where that fit has no prediction.
    """

    fitted: FittedForm
    errors: FloatArray

    @property
    def error(self) -> float:
        """Mean of the errors."""
        return float(self.errors.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, over points with a prediction.

        ``NO_PREDICTION_ERROR`` is a penalty, not noise.
        """
        errors = self.errors[np.isfinite(self.fitted.left_out_residuals)]
        return float(errors.std(ddof=1) / np.sqrt(len(errors))) if len(errors) > 1 else 0.0


def candidate_fits(rows: StepTimes) -> list[CandidateFit]:
    """Fit every form; those with at least one identified group are candidates."""
    fits = (fit_form(form, rows) for form in Form)
    return [
        CandidateFit(fitted, throughput_errors(fitted.left_out_residuals))
        for fitted in fits
        if fitted is not None
    ]


def one_standard_error_choice(candidates: list[CandidateFit]) -> CandidateFit | None:
    """Simplest candidate whose error is within one standard error of the least.

    The one-standard-error rule of Breiman et al., Classification and Regression Trees (1984): such
    a candidate cannot be distinguished from the best, and fewer parameters extrapolate more safely.
    The standard error is that of the best candidate's mean error.
    """
    if not candidates:
        return None
    best = min(candidates, key=lambda c: c.error)
    within = [c for c in candidates if c.error <= best.error + best.standard_error]
    return min(within, key=lambda c: (c.fitted.parameters, round(c.error, ERROR_DECIMALS)))


def fit_chosen(rows: StepTimes) -> FittedForm | None:
    """Fit the form chosen for the rows; None where no group is identified."""
    choice = one_standard_error_choice(candidate_fits(rows))
    return None if choice is None else choice.fitted


def throughput_errors(residuals: FloatArray) -> FloatArray:
    """(rows,) relative errors of throughput, from residuals ``log(fitted / measured)`` of times."""
    return np.asarray(np.nan_to_num(np.abs(np.exp(-residuals) - 1), nan=NO_PREDICTION_ERROR))


def smaller_half(rows: StepTimes) -> BoolArray:
    """(rows,) mask of the smaller batch sizes, at least half, of each series and sparsity."""
    _, series = np.unique(rows.series, return_inverse=True)
    order = np.lexsort((rows.batch_size, rows.sparsity, series))
    keys = np.stack([series, rows.sparsity], axis=1)
    _, curve, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    curve, starts = curve.ravel(), np.cumsum(sizes) - sizes
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows)) - starts[curve[order]]
    return np.asarray(place < (sizes[curve] + 1) // 2)


def log_residuals(fitted: FittedValues | None, rows: StepTimes) -> FloatArray:
    """(rows,) ``log(fitted / measured)``; nan where there is no prediction."""
    if fitted is None:
        return np.full(len(rows), np.nan)
    return np.asarray(np.log(fitted.seconds(rows) / rows.seconds))


def held_out_residuals(rows: StepTimes, groups: np.ndarray, fit: FitFunction) -> FloatArray:
    """(rows,) ``log(fitted / measured)``: each group of rows by a fit to all other groups."""
    residuals = np.full(len(rows), np.nan)
    for group in np.unique(groups):
        out = groups == group
        residuals[out] = log_residuals(fit(rows.where(~out)), rows.where(out))
    return residuals


def larger_batch_residuals(rows: StepTimes, fit: FitFunction) -> FloatArray:
    """(larger rows,) ``log(fitted / measured)`` of larger batches by a fit to the smaller half."""
    is_small = smaller_half(rows)
    return log_residuals(fit(rows.where(is_small)), rows.where(~is_small))
