"""The paper's results (arXiv 2408.04693) reproduced: by its laws, and by ours."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from fitting.laws.equations import (
    TransferCoefficients,
    max_batch_affine,
    max_batch_eq1,
    step_seconds_transferred,
)
from fitting.laws.forms import SHAPES, FittedForm, Form, Grouping
from fitting.laws.model_selection import (
    FitFunction,
    candidate_fits,
    fit_chosen,
    held_out_residuals,
    larger_batch_residuals,
    one_standard_error_choice,
    smaller_half,
    throughput_errors,
)
from fitting.laws.robust_fit import fit_form
from fitting.numerics.arrays import FloatArray
from fitting.numerics.intervals import LEVEL, coverage
from fitting.numerics.least_squares import solve_most_agreed, solve_nonlinear
from fitting.paper.published import (
    AS_PCIE,
    BLACKMAMBA,
    CS,
    EPOCHS,
    EQ1_FIGURE,
    FIGURE_LENGTH,
    GPUS,
    MATH,
    MIXTRAL,
    NOMINAL_GB,
    OPENORCA_QUERIES,
    SPARSE,
    TABLE_IV,
    TABLE_IV_QUERIES,
    WEIGHTS_GB,
    Points,
    dataset_lengths,
    table,
    throughput_points,
)
from fitting.points.fit_points import GIB
from fitting.points.step_time_rows import StepTimes
from gpu_catalog.catalog import load_catalog
from trials.records.model import find_model

PERCENT = 100.0
SECONDS_PER_HOUR = 3600.0
# A step of QLoRA reads the experts' weights thrice (forward, again for the checkpoints, gradient of
# the input), and each time 0.5 bytes to unpack, 2 to write and 2 to multiply.
PASSES, BYTES_A_PASS = 3, 4.5
REACHED = 0.83  # of the bandwidth
MOST_RATIO, RATIO_STEP = 2.5, 0.01  # grid of the ratio of the two data sets' lengths


class Throughput:
    """Errors of laws on the paper's points that were left out of the fit."""

    def __init__(self) -> None:
        self.points = throughput_points()

    def by_family(self, fit: FitFunction) -> FloatArray:
        """(points,) ``log(fitted / measured)``, each by a fit to the model's other points."""
        residuals = np.full(len(self.points.rows), np.nan)
        for rows in self._families():
            own = self.points.rows.where(rows)
            residuals[rows] = held_out_residuals(own, np.arange(len(own)), fit)
        return residuals

    def growing(self, fit: FitFunction, *, without: str | None = None) -> float:
        """Mean error in per cent on the larger batches of each curve by a fit to the smaller half.

        The points of the GPU ``without`` are fitted but not counted.
        """
        counted_residuals = []
        for rows in self._families():
            own = self.points.rows.where(rows)
            residuals = larger_batch_residuals(own, fit)
            larger = own.where(~smaller_half(own))
            if without is not None:
                residuals = residuals[np.char.find(larger.gpu, without) < 0]
            counted_residuals.append(residuals)
        return _mean_percent(np.concatenate(counted_residuals))

    def to_other_dataset(self, model: str, *, by_median: bool = False) -> dict[str, float]:
        """Mean error in per cent on one data set by a fit to the other, on the A40.

        ``by_median``, every query has the median length of its data set, as in the paper's text,
        instead of the length of the longest query in its batch.
        """
        points, lengths = self.points, dataset_lengths()
        rows = points.rows
        if by_median:
            median = np.array([lengths[name].median for name in points.dataset])
            rows = replace(rows, tokens=rows.batch_size * median)
        own = (points.model == model) & (points.gpu == "A40")
        errors = {}
        for one, other in ((CS, MATH), (MATH, CS)):
            fitted = _across_series(rows.where(own & (points.dataset == one)))
            left_out = rows.where(own & (points.dataset == other))
            errors[other] = _mean_percent(np.log(fitted.seconds(left_out) / left_out.seconds))
        return errors

    @cached_property
    def chosen(self) -> FloatArray:
        """(points,) residuals of the law that is chosen without the point."""
        return self.by_family(fit_chosen)

    @cached_property
    def paper(self) -> FloatArray:
        """(points,) residuals of the paper's law."""
        return self.by_family(_fit_logarithm)

    def coverage(self) -> tuple[float, float]:
        """Share of the points inside their 90 % intervals, and the median relative half-width."""
        inside, widths = coverage(self.points.rows.series, self.chosen, LEVEL)
        return inside, float(np.median(np.exp(widths) - 1))

    def _families(self) -> Iterator[np.ndarray]:
        for model in np.unique(self.points.model):
            yield np.flatnonzero(self.points.model == model)


class Transfer:
    """Mixtral's step time on GPUs that were left out of the fit, by their catalog keys."""

    def __init__(self, points: Points, forms: Mapping[str, str]) -> None:
        own = np.flatnonzero(points.model == MIXTRAL)
        self._rows = points.rows.where(own)
        self._names = points.gpu[own]
        catalog = load_catalog()
        gpus = [catalog.gpu(forms[name]) for name in self._names]
        self._bandwidth = np.array([_required(g.memory_bandwidth_gb_per_second) for g in gpus])
        self._rate = np.array([_required(g.bf16_dense_tflops) for g in gpus])

    def from_one(self, name: str = "A40") -> dict[str, float]:
        """Mean error in per cent on each other GPU by a fit to one."""
        seconds = self._seconds(self._names == name)
        return {other: self._off(seconds, other) for other in GPUS if other != name}

    def leaving_one_out(self) -> dict[str, float]:
        """Mean error in per cent on each GPU by a fit to the others."""
        return {name: self._off(self._seconds(self._names != name), name) for name in GPUS}

    def _seconds(self, is_fitted: np.ndarray) -> FloatArray:
        """(rows,) by the law: host time, cost of a token and exponent fitted to some rows."""
        measured = self._rows.seconds
        moved = moved_gb() / REACHED

        def law(values: FloatArray) -> FloatArray:
            coefficients = TransferCoefficients(moved, *map(float, values))
            tokens, sparsity = self._rows.tokens, self._rows.sparsity
            return step_seconds_transferred(
                tokens, sparsity, self._bandwidth, self._rate, coefficients
            )

        solution = solve_nonlinear(
            lambda values: np.log(law(values)[is_fitted] / measured[is_fitted]),
            np.array([1.0, 0.5, 0.7]),
            lower=np.zeros(3),
            upper=np.array([100.0, 100.0, 2.0]),
        )
        return law(solution.values)

    def _off(self, seconds: FloatArray, name: str) -> float:
        own = self._names == name
        return _mean_percent(np.log(seconds[own] / self._rows.seconds[own]))


def moved_gb() -> float:
    """10**9 bytes that a step of Mixtral moves for its experts' weights at any batch size."""
    config = find_model(MIXTRAL).config
    names = ("num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size")
    weights = 3 * math.prod(int(str(config[name])) for name in names)
    return weights * PASSES * BYTES_A_PASS / 1e9


@dataclass(frozen=True, slots=True)
class LargestBatches:
    """Mixtral's 12 largest batches, in queries, published and by the laws.

    Attributes:
        eq1: (12,) sizes by the best fit of Eq. 1: nominal memory, weights alone, median lengths.
        eq1_constants: c0 and c1 of that fit.
        ours: (12,) sizes by memory affine in padded tokens.
        model_gib: M0 of that law.
        ratio: fitted ratio of the lengths of MATH's batches to CS's.
    """

    rows: tuple[dict[str, str], ...]
    published: FloatArray
    eq1: FloatArray
    eq1_constants: tuple[float, float]
    ours: FloatArray
    model_gib: float
    ratio: float

    def exact(self, law: FloatArray) -> int:
        """Number of sizes that a law gives exactly."""
        return int((law == self.published).sum())


def largest_batches() -> LargestBatches:
    """Fit Eq. 1 and ``max_batch_affine``, each so that most sizes agree."""
    rows = tuple(r for r in table("largest_batches.csv") if r["model"] == MIXTRAL)
    catalog, lengths = load_catalog(), dataset_lengths()
    gpus = [catalog.gpu(GPUS[r["gpu"]]) for r in rows]
    usable = np.array([_required(gpu.usable_memory_bytes) / GIB for gpu in gpus])
    nominal = np.array([NOMINAL_GB[r["gpu"]] for r in rows])
    median = np.array([lengths[r["dataset"]].median for r in rows])
    sparsity = np.array([float(r["sparsity"]) for r in rows])
    published = np.array([float(r["largest_batch"]) for r in rows])
    is_math = np.array([r["dataset"] == MATH for r in rows])
    at, beyond = (_memory_terms(b * median, sparsity)[:, 1:] for b in (published, published + 1))
    q0, q1 = solve_most_agreed(at, beyond, nominal - WEIGHTS_GB)
    constants = (float(1 / (q0 + q1)), float(q1 / (q0 + q1)))
    attempts = []
    for ratio in np.arange(1.0, MOST_RATIO, RATIO_STEP):
        length = np.where(is_math, ratio, 1.0)
        at, beyond = (_memory_terms(b * length, sparsity) for b in (published, published + 1))
        values = solve_most_agreed(at, beyond, usable)
        margins = np.minimum(usable - at @ values, beyond @ values - usable) / usable
        agreeing = margins[margins > 0]
        score = (len(agreeing), float(agreeing.min(initial=1.0)))
        attempts.append((score, float(ratio), values))
    _, ratio, (model_gib, p0, p1) = max(attempts, key=lambda attempt: attempt[0])
    length = np.where(is_math, ratio, 1.0)
    return LargestBatches(
        rows=rows,
        published=published,
        eq1=np.floor(max_batch_eq1(nominal, WEIGHTS_GB, median, sparsity, *constants)),
        eq1_constants=constants,
        ours=np.floor(max_batch_affine(usable, model_gib, length, sparsity, p0, p1)),
        model_gib=float(model_gib),
        ratio=ratio,
    )


def projected_max_batch(memory_gb: float, constants: tuple[float, float] = EQ1_FIGURE) -> float:
    """Fig. 13's projection of sparse Mixtral, before rounding."""
    return float(max_batch_eq1(memory_gb, WEIGHTS_GB, FIGURE_LENGTH, SPARSE, *constants))


def job_usd(queries: float, queries_per_second: float, usd_per_hour: float) -> float:
    """Cost of ten epochs."""
    return queries * EPOCHS / queries_per_second / SECONDS_PER_HOUR * usd_per_hour


def _across_series(rows: StepTimes) -> FittedForm:
    """Chosen law among those that predict other data sets: by GPU and padded tokens."""
    by_gpu = {form for form, shape in SHAPES.items() if shape.grouping is Grouping.GPU}
    best = one_standard_error_choice([c for c in candidate_fits(rows) if c.fitted.form in by_gpu])
    assert best is not None
    return best.fitted


def _memory_terms(tokens: FloatArray, sparsity: FloatArray) -> FloatArray:
    return np.stack([np.ones_like(tokens), tokens, tokens * sparsity], axis=1)


def _required(value: float | None) -> float:
    if value is None:
        raise ValueError("the catalog lacks a figure of one of the paper's GPUs")
    return float(value)


def _mean_percent(residuals: FloatArray) -> float:
    return float(throughput_errors(residuals).mean()) * PERCENT


def rmse_eq2(rows: StepTimes) -> float:
    """Root mean square error of the paper's law in sample, in queries per second."""
    fitted = _fit_logarithm(rows)
    assert fitted is not None
    rate = rows.batch_size / rows.seconds
    return float(np.sqrt(np.mean((rows.batch_size / fitted.seconds(rows) - rate) ** 2)))


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Everything that ``reproduce`` prints.

    ``transfer`` has the SXM variants of the 80 GB GPUs. ``figures`` has errors in per cent, dollars
    and queries by flat name.
    """

    throughput: Throughput
    transfer: Transfer
    transfer_as_pcie: Transfer
    largest: LargestBatches
    figures: dict[str, float]


@cache
def reproduction() -> Reproduction:
    """Compute the reproduction, which takes some seconds, once."""
    throughput = Throughput()
    transfer, largest = Transfer(throughput.points, GPUS), largest_batches()
    table_iv = {
        f"table_iv_usd.{gpu}": job_usd(TABLE_IV_QUERIES, rate, price)
        for gpu, (_, rate, price, _) in TABLE_IV.items()
    }
    figures = {
        **_throughput_figures(throughput),
        **_transfer_figures(transfer),
        "max_batch_exact_of_12": float(largest.exact(largest.ours)),
        "max_batch_exact_of_12.paper": float(largest.exact(largest.eq1)),
        **table_iv,
        "openorca_usd": job_usd(OPENORCA_QUERIES, TABLE_IV["H100"][1], TABLE_IV["H100"][2]),
        "projected_max_batch.100GB": projected_max_batch(100.0),
        "projected_max_batch.120GB": projected_max_batch(120.0),
    }
    as_pcie = Transfer(throughput.points, AS_PCIE)
    return Reproduction(throughput, transfer, as_pcie, largest, figures)


def _throughput_figures(throughput: Throughput) -> dict[str, float]:
    """Errors in per cent on left-out points, larger batches and data sets; interval coverage."""
    inside, half_width = throughput.coverage()
    figures = {
        "loo_mape_pct.paper": _mean_percent(throughput.paper),
        "loo_mape_pct.chosen": _mean_percent(throughput.chosen),
    }
    for name, fit in (("paper", _fit_logarithm), ("chosen", fit_chosen)):
        figure = f"extrapolation_mape_pct.{name}"
        figures[figure] = throughput.growing(fit)
        figures[f"{figure}_without_h100"] = throughput.growing(fit, without="H100")
    for suffix, by_median in ((".by_median_length", True), ("", False)):
        for name, model in (("mixtral", MIXTRAL), ("blackmamba", BLACKMAMBA)):
            errors = throughput.to_other_dataset(model, by_median=by_median)
            figures[f"dataset_transfer_mape_pct.{name}{suffix}"] = max(errors.values())
    return figures | {
        "interval_coverage_pct": inside * PERCENT,
        "interval_half_width_pct": half_width * PERCENT,
    }


def _transfer_figures(transfer: Transfer) -> dict[str, float]:
    """Errors in per cent on GPUs left out of the fit."""
    from_a40, left_out = transfer.from_one(), transfer.leaving_one_out()
    return {
        "gpu_transfer_mape_pct.a40_only_mean": float(np.mean(list(from_a40.values()))),
        "gpu_transfer_mape_pct.a40_only_worst": max(from_a40.values()),
        "leave_one_gpu_out_mape_pct.mean": float(np.mean(list(left_out.values()))),
        "leave_one_gpu_out_mape_pct.worst": max(left_out.values()),
    }


def _fit_logarithm(rows: StepTimes) -> FittedForm | None:
    """Fit the paper's law."""
    return fit_form(Form.LOGARITHM, rows)
