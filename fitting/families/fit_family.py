"""The law of the step time that a family's own points speak for.

Every form of ``fitting.laws.forms`` is judged by points left out of its fit; the record holds the
form chosen and why, and is all that ``family_predictions`` needs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from fitting.families.fitted_groups import (
    exponent_parameter,
    family_intervals,
    group_laws,
    observed_series,
    suspect_points,
)
from fitting.families.records import FamilyFit, FamilyName, LawCandidate, LengthLaw
from fitting.laws.fit_failure import family_fit_failure
from fitting.laws.forms import EQUATIONS, SHAPES, FittedForm, Form, Grouping
from fitting.laws.model_selection import (
    ERROR_DECIMALS,
    CandidateFit,
    candidate_fits,
    fit_chosen,
    held_out_residuals,
    log_residuals,
    one_standard_error_choice,
    smaller_half,
    throughput_errors,
)
from fitting.laws.robust_fit import fit_values
from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.numerics.intervals import LEVEL, scales
from fitting.points.fit_points import ladders
from fitting.points.observation_columns import Columns, columns_of
from fitting.points.step_time_rows import StepTimes
from trials.records.observation import Observation

MOST_NESTED = 60  # points of a family whose law is chosen anew without each: some seconds
MOST_NESTED_OF_RUN = 200  # points of such families in a run, smaller ones first
MOST_LENGTHS = 10  # fits with lengths left out; more lengths are left out several at once

A = TypeVar("A")
B = TypeVar("B")


class Each(Protocol):
    """Calls a function on each of several items, in order, as ``map`` does."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterable[B]:
        """What it returns of each."""


def fit_families(observations: Iterable[Observation]) -> tuple[FamilyFit, ...]:
    """The law of every family of a run, refusals included."""
    return fit_columns(columns_of(observations))


def fit_columns(columns: Columns, each: Each = map) -> tuple[FamilyFit, ...]:
    """The law of every family, as ``fit_families``.

    Args:
        columns: of the observations.
        each: ``map``, or what does as it does in several processes.
    """
    return fit_each(
        (
            (
                FamilyName(
                    model=source.group.model,
                    weights=source.group.weights,
                    recipe=source.group.recipe.key,
                    basis=source.basis,
                    software=source.stack,
                ),
                rows,
            )
            for source, rows in ladders(columns)
        ),
        each,
    )


def fit_each(
    families: Iterable[tuple[FamilyName, StepTimes]], each: Each = map
) -> tuple[FamilyFit, ...]:
    """The law of each family.

    Intervals are nested for the smaller families, until that would take too long.

    Args:
        families: their names and timed steps.
        each: as in ``fit_columns``.
    """
    asked = [_Family(name, len(rows), merged(rows)) for name, rows in families]
    counts = np.sort([len(family.points) for family in asked])
    within = counts[np.cumsum(counts) <= MOST_NESTED_OF_RUN]
    most_nested = min(MOST_NESTED, int(within.max(initial=0)))
    is_nested = [replace(one, nested=len(one.points) <= most_nested) for one in asked]
    return tuple(each(_fitted, is_nested))


@dataclass(frozen=True, slots=True)
class _Family:
    """A family to fit: its merged points, its visits, and whether its intervals are nested."""

    name: FamilyName
    visits: int
    points: StepTimes
    nested: bool = False


def _fitted(family: _Family) -> FamilyFit:
    points = family.points
    candidates = [c for c in candidate_fits(points) if np.isfinite(c.error)] if len(points) else []
    best = one_standard_error_choice(candidates)
    if best is None:
        return _refused(family.name, family.visits, points)
    fitted = best.fitted
    left_out, is_nested = _left_out(fitted, points, nested=family.nested)
    scale = scales(points.series, left_out)
    judged = [_Judged.of(c, points) for c in candidates]
    return FamilyFit(
        name=family.name,
        visits=family.visits,
        points=len(points),
        form=fitted.form,
        equation=EQUATIONS[fitted.form],
        why=_why(best, candidates),
        remedy=None,
        candidates=tuple(
            sorted((j.candidate for j in judged), key=lambda c: round(c.error, ERROR_DECIMALS))
        ),
        exponent=exponent_parameter(fitted),
        groups=group_laws(fitted, points),
        spread=fitted.spread,
        suspects=suspect_points(fitted, points),
        series=observed_series(points, scale),
        intervals=None
        if scale is None
        else family_intervals(points, left_out, scale, nested=is_nested),
        by_length=_law_of_lengths(judged, points),
    )


def merged(rows: StepTimes) -> StepTimes:
    """A row for each series, sparsity and batch size, its seconds the median of its visits'.

    A visit that stayed while its twin is left out would leak what is predicted.
    """
    if len(rows) == 0:
        return rows
    _, series = np.unique(rows.series, return_inverse=True)
    keys = np.stack([series, rows.sparsity, rows.batch_size], axis=1)
    _, first, at, counts = np.unique(
        keys, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    ordered = rows.seconds[np.lexsort((rows.seconds, at.ravel()))]
    starts = np.cumsum(counts) - counts
    middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2
    return replace(rows.where(first), seconds=middle)


def _refused(name: FamilyName, visits: int, points: StepTimes) -> FamilyFit:
    refusal = family_fit_failure(points)
    return FamilyFit(
        name=name,
        visits=visits,
        points=len(points),
        form=None,
        equation=None,
        why=refusal.reason,
        remedy=refusal.remedy,
        candidates=(),
        exponent=None,
        groups=(),
        spread=None,
        suspects=(),
        series=observed_series(points, None),
        intervals=None,
    )


def _left_out(fitted: FittedForm, points: StepTimes, *, nested: bool) -> tuple[FloatArray, bool]:
    """(points,) residuals without each point, and whether any choice was made without it."""
    first_order = fitted.left_out_residuals
    if not nested:
        return first_order, False
    refitted = held_out_residuals(points, np.arange(len(points)), fit_chosen)
    is_finite = np.isfinite(refitted)
    return np.where(is_finite, refitted, first_order), bool(is_finite.any())


def _why(best: CandidateFit, candidates: Sequence[CandidateFit]) -> str:
    if len(candidates) == 1:
        return "the only form that the points can carry"
    least = min(candidates, key=lambda c: round(c.error, ERROR_DECIMALS))
    if round(least.error, ERROR_DECIMALS) == round(best.error, ERROR_DECIMALS):
        return "least held-out error"
    return f"the simplest within one standard error of the best, {least.fitted.form}"


@dataclass(frozen=True, slots=True)
class _Judged:
    """A form, its record as a candidate, and (points,) residuals by fits without their length.

    Residuals are nan for a form by series, and where there is no prediction.
    """

    fitted: FittedForm
    candidate: LawCandidate
    unseen: FloatArray

    @classmethod
    def of(cls, one: CandidateFit, points: StepTimes) -> "_Judged":
        fitted = one.fitted
        lengths = _by_length(fitted.form, points)
        outs = [~smaller_half(points), *lengths]
        laws = fit_values(fitted.form, points, [~out for out in outs])
        unseen = np.full(len(points), np.nan)
        for law, out in zip(laws[1:], lengths, strict=True):
            unseen[out] = log_residuals(law, points.where(out))
        candidate = LawCandidate(
            form=fitted.form,
            error=one.error,
            standard_error=one.standard_error,
            growing_error=_mean_error(log_residuals(laws[0], points.where(outs[0]))),
            length_error=_mean_error(unseen),
            parameters=fitted.parameters,
            condition=fitted.condition if np.isfinite(fitted.condition) else None,
        )
        return cls(fitted, candidate, unseen)


def _law_of_lengths(judged: Sequence[_Judged], points: StepTimes) -> LengthLaw | None:
    """The form with the least error on lengths left out; of equal ones the simplest."""
    speaking = [
        (round(one.candidate.length_error, ERROR_DECIMALS), one.fitted.parameters, one, scale)
        for one in judged
        if one.candidate.length_error is not None
        and (scale := scales(points.series, one.unseen)) is not None
    ]
    if not speaking:
        return None
    _, _, best, scale = min(speaking, key=lambda each: each[:2])
    assert best.candidate.length_error is not None
    return LengthLaw(
        form=best.fitted.form,
        error=best.candidate.length_error,
        half_width=scale.half_width(None, LEVEL),
        exponent=exponent_parameter(best.fitted),
        groups=group_laws(best.fitted, points),
    )


def _by_length(form: Form, points: StepTimes) -> list[BoolArray]:
    """(points,) a mask of each length, or of several; no masks for a form by series."""
    if form not in SHAPES or SHAPES[form].grouping is Grouping.SERIES:
        return []
    _, series = np.unique(points.series, return_inverse=True)
    total = np.bincount(series, weights=points.tokens / points.batch_size)
    _, length = np.unique(np.rint(total / np.bincount(series))[series], return_inverse=True)
    fold = length % MOST_LENGTHS
    return [fold == one for one in range(fold.max() + 1)] if length.max() > 0 else []


def _mean_error(residuals: FloatArray) -> float | None:
    """Mean over the points with a prediction; None without any."""
    spoken = residuals[np.isfinite(residuals)]
    return float(throughput_errors(spoken).mean()) if len(spoken) else None
