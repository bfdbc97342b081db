"""Choice of a family's law by its errors on points left out of the fit."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fitting.laws.forms import FittedForm, FittedValues, Form
from fitting.laws.robust_fit import fit_form
from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.points.step_time_rows import StepTimes

Fitting = Callable[[StepTimes], FittedValues | None]
ALIKE = 9  # decimals of an error: two forms may be one law, as of a single length, but for rounding
UNSPOKEN = 1.0  # the error of a law on a point that it does not speak of without it


@dataclass(frozen=True, slots=True)
class CandidateFit:
    """A form, and its errors on points left out of the fit.

    Attributes:
        fitted: by all rows.
        errors: (rows,) of throughput, as a part of it: each point's without the point, to first
            order; ``UNSPOKEN`` where it then speaks of none.
    """

    fitted: FittedForm
    errors: FloatArray

    @property
    def error(self) -> float:
        """Mean of the errors."""
        return float(self.errors.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, over points with a prediction: ``UNSPOKEN`` is no noise."""
        errors = self.errors[np.isfinite(self.fitted.left_out_residuals)]
        return float(errors.std(ddof=1) / np.sqrt(len(errors))) if len(errors) > 1 else 0.0


def tried(rows: StepTimes) -> list[CandidateFit]:
    """Every form with at least one identified group."""
    found = []
    for form in Form:
        fitted = fit_form(form, rows)
        if fitted is not None:
            errors = throughput_errors(fitted.left_out_residuals)
            found.append(CandidateFit(fitted, errors))
    return found


def chosen(candidates: list[CandidateFit]) -> CandidateFit | None:
    """The simplest candidate whose error is within one standard error of the least.

    The one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984, 3.4.3):
    the difference to the best cannot be distinguished from noise, and a law with fewer parameters
    bends less where there are no points. The noise is that of the best candidate's mean error.
    """
    if not candidates:
        return None
    best = min(candidates, key=lambda c: c.error)
    good = [c for c in candidates if c.error <= best.error + best.standard_error]
    return min(good, key=lambda c: (c.fitted.parameters, round(c.error, ALIKE)))


def fit_chosen(rows: StepTimes) -> FittedForm | None:
    """Fit the form chosen for the rows; None where no group is identified."""
    best = chosen(tried(rows))
    return None if best is None else best.fitted


def throughput_errors(residuals: FloatArray) -> FloatArray:
    """(rows,) relative errors of throughput, from residuals ``log(fitted / measured)`` of times."""
    return np.asarray(np.nan_to_num(np.abs(np.exp(-residuals) - 1), nan=UNSPOKEN))


def smaller_half(rows: StepTimes) -> BoolArray:
    """(rows,) the smaller batch sizes of each curve of one series and sparsity, at least half."""
    _, series = np.unique(rows.series, return_inverse=True)
    order = np.lexsort((rows.batch_size, rows.sparsity, series))
    keys = np.stack([series, rows.sparsity], axis=1)
    _, curve, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    curve, starts = curve.ravel(), np.cumsum(sizes) - sizes
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows)) - starts[curve[order]]
    return np.asarray(place < (sizes[curve] + 1) // 2)


def off(fitted: FittedValues | None, rows: StepTimes) -> FloatArray:
    """(rows,) ``log(fitted / measured)``; nan where no law speaks."""
    if fitted is None:
        return np.full(len(rows), np.nan)
    return np.asarray(np.log(fitted.seconds(rows) / rows.seconds))


def held_out(rows: StepTimes, groups: np.ndarray, fit: Fitting) -> FloatArray:
    """(rows,) ``log(fitted / measured)``, each group of rows by a fit to all others."""
    residuals = np.full(len(rows), np.nan)
    for group in np.unique(groups):
        out = groups == group
        residuals[out] = off(fit(rows.where(~out)), rows.where(out))
    return residuals


def growing(rows: StepTimes, fit: Fitting) -> FloatArray:
    """(larger rows,) ``log(fitted / measured)`` of larger batches, fitted to the smaller half."""
    is_small = smaller_half(rows)
    larger = rows.where(~is_small)
    return off(fit(rows.where(is_small)) if len(larger) else None, larger)
