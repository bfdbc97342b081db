"""Law of the step time of each family, chosen among the forms by errors on left-out points.

The record of a family has the chosen form and the reason for the choice, and is all that
``fitting.families.predict`` needs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

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
from fitting.laws.forms import EQUATIONS, SHAPES, FittedForm, Grouping
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
from fitting.points.fit_points import PointSource, ladders
from fitting.points.observation_columns import Columns, columns_of
from fitting.points.step_time_rows import StepTimes
from trials.records.observation import Observation

# Nested residuals choose the law anew without each point, which takes seconds for a family of this
# many points; they are computed for the smallest families of a run, up to this many points in all.
MOST_NESTED = 60
MOST_NESTED_OF_RUN = 200
MOST_LENGTHS = 10  # folds of lengths left out together

A = TypeVar("A")
B = TypeVar("B")


class Map(Protocol):
    """Function with the signature of ``map`` for one iterable; it keeps the order of the items."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterable[B]:
        """Call the function on every item."""


def fit_families(observations: Iterable[Observation]) -> tuple[FamilyFit, ...]:
    """Fit the law of every family of a run, failures included."""
    return fit_columns(columns_of(observations))


def fit_columns(columns: Columns, run_map: Map = map) -> tuple[FamilyFit, ...]:
    """Fit the law of every family, as ``fit_families``, in several processes by ``run_map``."""
    return fit_each(((_name_of(source), rows) for source, rows in ladders(columns)), run_map)


def _name_of(source: PointSource) -> FamilyName:
    group = source.group
    return FamilyName(
        model=group.model,
        weights=group.weights,
        recipe=group.recipe.key,
        basis=source.basis,
        software=source.stack,
        layout=None if group.parallel is None else group.parallel.key,
    )


def fit_each(
    families: Iterable[tuple[FamilyName, StepTimes]], run_map: Map = map
) -> tuple[FamilyFit, ...]:
    """Fit the law of each family, with nested residuals for the smaller families."""
    to_fit = [_Family(name, len(rows), merged(rows)) for name, rows in families]
    counts = np.sort([len(family.points) for family in to_fit])
    within = counts[np.cumsum(counts) <= MOST_NESTED_OF_RUN]
    most_nested = min(MOST_NESTED, int(within.max(initial=0)))
    to_fit = [replace(f, is_nested=len(f.points) <= most_nested) for f in to_fit]
    return tuple(run_map(_fitted, to_fit))


@dataclass(frozen=True, slots=True)
class _Family:
    """A family to fit: its merged points, its visits, and whether its residuals are nested."""

    name: FamilyName
    visits: int
    points: StepTimes
    is_nested: bool = False


def _fitted(family: _Family) -> FamilyFit:
    points = family.points
    candidates = [c for c in candidate_fits(points) if np.isfinite(c.error)] if len(points) else []
    best = one_standard_error_choice(candidates)
    if best is None:
        return _failed(family)
    fitted = best.fitted
    left_out, is_nested = _left_out(fitted, points, nested=family.is_nested)
    scale = scales(points.series, left_out)
    outs = [~smaller_half(points), *_by_length(points)]
    judged = [_scores(c, points, outs) for c in candidates]
    return FamilyFit(
        name=family.name,
        visits=family.visits,
        points=len(points),
        form=fitted.form,
        equation=EQUATIONS[fitted.form],
        why=_why(best, candidates),
        candidates=tuple(
            sorted((s.record for s in judged), key=lambda c: round(c.error, ERROR_DECIMALS))
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
    """Merge the visits of each series, sparsity and batch size into one row with their median.

    A repeated visit left in the fit would leak the point that is left out.
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


def _failed(family: _Family) -> FamilyFit:
    failure = family_fit_failure(family.points)
    return FamilyFit(
        name=family.name,
        visits=family.visits,
        points=len(family.points),
        why=failure.reason,
        remedy=failure.remedy,
        series=observed_series(family.points, None),
    )


def _left_out(fitted: FittedForm, points: StepTimes, *, nested: bool) -> tuple[FloatArray, bool]:
    """(points,) left-out residuals, and whether they are nested."""
    first_order = fitted.left_out_residuals
    if not nested:
        return first_order, False
    refitted = held_out_residuals(points, np.arange(len(points)), fit_chosen)
    is_finite = np.isfinite(refitted)
    return np.where(is_finite, refitted, first_order), bool(is_finite.any())


def _why(best: CandidateFit, candidates: Sequence[CandidateFit]) -> str:
    if len(candidates) == 1:
        return "the only form that the points identify"
    least = min(candidates, key=lambda c: round(c.error, ERROR_DECIMALS))
    if round(least.error, ERROR_DECIMALS) == round(best.error, ERROR_DECIMALS):
        return "least held-out error"
    return f"the simplest within one standard error of the best, {least.fitted.form}"


class _Scores(NamedTuple):
    """Scores of a candidate on left-out points.

    Attributes:
        unseen_length: (points,) residuals by fits without the point's length; nan for a form by
            series and where there is no prediction.
    """

    fitted: FittedForm
    record: LawCandidate
    unseen_length: FloatArray


def _scores(candidate: CandidateFit, points: StepTimes, outs: Sequence[BoolArray]) -> _Scores:
    """Refit the candidate's form without larger batches, ``outs[0]``, and without each length."""
    fitted = candidate.fitted
    shape = SHAPES.get(fitted.form)
    if shape is None or shape.grouping is Grouping.SERIES:  # it predicts no other length
        outs = outs[:1]
    laws = fit_values(fitted.form, points, [~out for out in outs])
    unseen = np.full(len(points), np.nan)
    for law, out in zip(laws[1:], outs[1:], strict=True):
        unseen[out] = log_residuals(law, points.where(out))
    record = LawCandidate(
        form=fitted.form,
        error=candidate.error,
        standard_error=candidate.standard_error,
        growing_error=_mean_error(log_residuals(laws[0], points.where(outs[0]))),
        length_error=_mean_error(unseen),
        parameters=fitted.parameters,
        condition=fitted.condition if np.isfinite(fitted.condition) else None,
    )
    return _Scores(fitted, record, unseen)


def _law_of_lengths(judged: Sequence[_Scores], points: StepTimes) -> LengthLaw | None:
    """Form with the least error on lengths left out; of equal ones the simplest."""
    candidates = [
        (round(error, ERROR_DECIMALS), scores.fitted.parameters, error, scores, scale)
        for scores in judged
        if (error := scores.record.length_error) is not None
        and (scale := scales(points.series, scores.unseen_length)) is not None
    ]
    if not candidates:
        return None
    *_, error, best, scale = min(candidates, key=lambda candidate: candidate[:2])
    return LengthLaw(
        form=best.fitted.form,
        error=error,
        half_width=scale.half_width(None, LEVEL),
        exponent=exponent_parameter(best.fitted),
        groups=group_laws(best.fitted, points),
    )


def _by_length(points: StepTimes) -> list[BoolArray]:
    """(points,) mask of each length, or of each fold of lengths; none for a single length."""
    _, series = np.unique(points.series, return_inverse=True)
    total = np.bincount(series, weights=points.tokens / points.batch_size)
    _, length = np.unique(np.rint(total / np.bincount(series))[series], return_inverse=True)
    fold = length % MOST_LENGTHS
    return [fold == number for number in range(fold.max() + 1)] if length.max() > 0 else []


def _mean_error(residuals: FloatArray) -> float | None:
    """Mean throughput error over the points with a prediction; None without any."""
    predicted = residuals[np.isfinite(residuals)]
    return float(throughput_errors(predicted).mean()) if len(predicted) else None
