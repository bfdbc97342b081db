"""Step times made by known laws: forms are tested on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from builders.step_time_equations import step_seconds_smooth, throughput_eq2
from fitting.laws.forms import (
    SHAPES,
    FittedForm,
    Form,
    Grouping,
    Shape,
    Sparsity,
    WorkUnit,
    group_of,
)
from fitting.laws.robust_fit import fit_form
from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.points.step_time_rows import StepTimes

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
OURS = tuple(SHAPES)  # all forms but the paper's


@dataclass(frozen=True, slots=True)
class Truth:
    """A family of step times, and the law that made it.

    Attributes:
        rows: step times without noise.
        values: (groups, terms) in the order of the sorted names of the groups.
        exponent: exponent of the sparsity, where the form shares one.
    """

    rows: StepTimes
    values: FloatArray
    exponent: float | None


def visits(
    gpus: Sequence[str] = ("A40", "H100"),
    lengths: Sequence[int] = (64, 256),
    sparsities: Sequence[float] = (0.25, 1.0),
    batches: Sequence[int] = BATCHES,
) -> StepTimes:
    """One second per step, for every batch size and sparsity on every GPU at every length."""
    grid = [(g, n, s, b) for g in gpus for n in lengths for s in sparsities for b in batches]
    batch = np.array([float(b) for _, _, _, b in grid])
    return StepTimes(
        gpu=np.array([g for g, _, _, _ in grid]),
        series=np.array([f"{g}/{n}" for g, n, _, _ in grid]),
        batch_size=batch,
        tokens=batch * np.array([float(n) for _, n, _, _ in grid]),
        sparsity=np.array([s for _, _, s, _ in grid]),
        seconds=np.ones(len(grid)),
    )


def made(form: Form, random: np.random.Generator, rows: StepTimes | None = None) -> Truth:
    """A family with random floors, slopes and exponent; a full batch takes 1 to 5 floors more."""
    rows = visits() if rows is None else rows
    shape = SHAPES.get(form)
    exponent = None
    if shape is not None and shape.sparsity is Sparsity.SHARED:
        exponent = float(random.uniform(0.3, 0.9))
    groups, seconds, values = group_of(form, rows), np.empty(len(rows)), []
    for name in np.unique(groups):
        own = groups == name
        times, values_of = _drawn(shape, random, rows.where(own), exponent)
        seconds[own] = times
        values.append(values_of)
    return Truth(replace(rows, seconds=seconds), np.array(values), exponent)


def noisy(rows: StepTimes, random: np.random.Generator, sigma: float) -> StepTimes:
    """Step times with a random error of each logarithm."""
    return replace(rows, seconds=rows.seconds * np.exp(random.normal(0, sigma, len(rows))))


def work_of(shape: Shape, rows: StepTimes) -> FloatArray:
    """Work of each step, (rows,): its examples or its tokens."""
    return rows.batch_size if shape.work is WorkUnit.EXAMPLES else rows.tokens


def _drawn(
    shape: Shape | None, random: np.random.Generator, rows: StepTimes, exponent: float | None
) -> tuple[FloatArray, tuple[float, ...]]:
    """Step times of one random group, and the values that made them."""
    if shape is None:
        c2_over_c3, c4 = random.uniform(0.1, 0.4), random.uniform(0.5, 2.0)
        rate = throughput_eq2(rows.batch_size, rows.sparsity, c2_over_c3, c4)
        return rows.batch_size / rate, (c2_over_c3, c4)
    power, work = shape.power, work_of(shape, rows)
    t0 = random.uniform(0.3, 3.0)
    k = t0 * random.uniform(1.0, 5.0) / work.max()
    if exponent is not None:
        seconds = step_seconds_smooth(work, rows.sparsity, t0, k, exponent, power)
        return seconds, (t0**power, k**power)
    dense = random.uniform(0.2, 0.8)
    k0, k1 = (1 - dense) * k**power, dense * k**power
    seconds = (t0**power + work**power * (k0 + k1 * rows.sparsity)) ** (1 / power)
    return seconds, (t0**power, k0, k1)


def is_by_series(form: Form) -> bool:
    """Whether each series has a floor and slope of its own."""
    return form is Form.LOGARITHM or SHAPES[form].grouping is Grouping.SERIES


def fitted_law(form: Form, rows: StepTimes) -> FittedForm:
    """The fit of a form that the rows identify."""
    fit = fit_form(form, rows)
    assert fit is not None
    return fit


def with_bad_points(
    rows: StepTimes, random: np.random.Generator, share: float, factor: float
) -> tuple[StepTimes, BoolArray]:
    """Multiply the seconds of a share of each series by a factor; (rows,) mask of these rows."""
    bad = np.zeros(len(rows), bool)
    for name in np.unique(rows.series):
        own = np.flatnonzero(rows.series == name)
        bad[random.choice(own, round(share * len(own)), replace=False)] = True
    return replace(rows, seconds=rows.seconds * np.where(bad, factor, 1.0)), bad
