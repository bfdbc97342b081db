"""Calibration of the timing model to measured steps: efficiencies of a stack and host factors.

All GPUs share the efficiencies; each host has a factor for its speed. Leaving out one GPU after
another estimates the error on a GPU without measurements.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fitting.calibration_points import Point, PointTimelines
from fitting.laws.fit_result import Interval
from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import Solution, solve_nonlinear, t_quantile
from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from trials.simulation.clock.time_error import time_errors
from trials.simulation.timing_model import (
    MOST_FRACTION,
    EfficiencyConstants,
    HostDeviceTimeline,
    step_time,
)

# Fitted constants and the fields of each. Attention's forward and backward efficiency share one
# factor, because no step has one without the other.
FITTED: dict[str, tuple[str, ...]] = {
    "matrix_product": ("product_speed",),
    "memory": ("memory_speed",),
    "attention": ("attention_speed", "attention_backward"),
    "dequantisation": ("dequantisation",),
    "scan": ("scan",),
}
FRACTIONS = frozenset(FITTED) - {"dequantisation"}  # of a rate that the GPU has
LARGEST_FACTOR = 5.0  # bound of a constant's change from its start
LARGEST_HOST_FACTOR = 20.0
LEAST_EFFECT = 0.02  # a constant is fitted if halving it lengthens a step by more than this
TOLERANCE = 1e-6
LEAST_NOISE = 0.01  # repeated measurements of a step differ by about this much
HOST_FACTORS = 61  # grid of a host's factors over the whole range
MOST_ROUNDS = 4  # of a fit followed by a grid search of the hosts' factors


class CalibrationError(UserError):
    """No measured step to calibrate on; the message is one line."""


class CalibratedConstant(Record):
    """One constant before and after calibration.

    Attributes:
        name: name of the constant; ``host_factor of NAME`` for a host's factor.
        interval: 95 % interval; None where the points do not determine one.
    """

    name: str
    start: float
    value: float
    interval: Interval | None = None
    fitted: bool


class HeldOutGpu(Record):
    """Absolute relative errors on one GPU by the constants of all others.

    Each host's factor comes from one point, which is not among ``points``.
    """

    gpu: str
    points: int
    mean_error: float
    worst_error: float


class Calibration(Record):
    """Calibrated constants and their errors.

    Attributes:
        points: number of measured steps.
        mean_error: mean absolute relative error in sample.
        left_out: errors on each GPU left out; empty with one GPU.
    """

    constants: EfficiencyConstants
    fitted: tuple[CalibratedConstant, ...]
    points: int
    gpus: tuple[str, ...]
    mean_error: float
    left_out: tuple[HeldOutGpu, ...]
    note: str | None = None


def calibrate(points: Sequence[Point], start: EfficiencyConstants) -> Calibration:
    """Fit the constants by least squares of the logarithm of the step time.

    Args:
        points: measured steps.
        start: start of the fit; constants that the points do not determine keep it.

    Raises:
        CalibrationError: there are no points.
    """
    if not points:
        raise CalibrationError("there is no measured step of a CUDA GPU: measure some first")
    problem = _problem(points, start)
    solution = problem.solved()
    fitted = problem.constants(solution.values)
    errors = _errors(problem, solution.values)
    left_out = _leaving_one_gpu_out(points, start)
    # For normal errors the 90 % interval is 1.645 / 0.798 = 2.06 mean absolute errors.
    changes: dict[str, object] = {}
    if left_out:
        interval = max(0.02, 2.06 * float(np.mean([gpu.mean_error for gpu in left_out])))
        changes = {"error": interval, "error_above": None}
    elif (interval := 2.06 * float(np.mean(errors))) > (start.error or time_errors().of_gpu.below):
        # Errors in sample do not bound those on another GPU: they can only widen an interval.
        above = start.error_above or start.error or time_errors().of_host.above
        changes = {"error": interval, "error_above": max(above, interval)}
    gpus = tuple(sorted({point.gpu.key for point in points}))
    source = f"calibrated on {len(points)} measured steps of {', '.join(gpus)}"
    linked = sorted({link.name for link in start.links})
    source += f"; links measured on {', '.join(linked)}" * bool(linked)
    return Calibration(
        constants=fitted.model_copy(update={**changes, "source": source}),
        fitted=tuple(problem.calibrated(solution)),
        points=len(points),
        gpus=gpus,
        mean_error=float(np.mean(errors)),
        left_out=tuple(left_out),
        note=problem.note,
    )


@dataclass(frozen=True, slots=True)
class CalibrationProblem:
    """Least-squares problem of the named constants and host factors on points.

    Its parameters are the logarithms of the factors by which these differ from their start.
    """

    points: Sequence[Point]
    start: EfficiencyConstants
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    note: str | None
    _timelines: PointTimelines = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_timelines", PointTimelines(self.points))

    def solved(self) -> Solution:
        """Find the minimum, by turns of a fit and a grid search of the host factors."""
        hosts = [LARGEST_HOST_FACTOR] * len(self.hosts)
        lower = -np.log([LARGEST_FACTOR] * len(self.names) + hosts)
        upper = np.log([_largest_factor(self.start, name) for name in self.names] + hosts)
        begin = self._with_best_hosts(np.zeros(len(upper)))
        for _ in range(MOST_ROUNDS):
            solution = solve_nonlinear(
                self.residuals, begin, lower=lower, upper=upper, tolerance=TOLERANCE
            )
            begin = self._with_best_hosts(solution.values)
            if np.array_equal(begin, solution.values):
                break
        return solution

    def _with_best_hosts(self, moved: FloatArray) -> FloatArray:
        """Parameters with the best host factors of the grid, where these improve the fit."""
        best = moved.copy()
        for host in self.hosts:
            grid, sums = self._by_factor(host, moved)
            if sums[1:].min(initial=np.inf) < (1 - TOLERANCE) * sums[0]:
                best[self._place(host)] = grid[sums.argmin()]
        return best

    def _by_factor(self, host: str, moved: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Log factors of a host, the present one first, and the sums of its squared residuals.

        A grid is needed because a host that the GPU never waits for has no gradient: its factor
        changes step times only once it is large enough.
        """
        own = [place for place, point in enumerate(self.points) if point.host == host]
        timelines = self._of_all_hosts(moved)
        now = float(moved[self._place(host)])
        measured = np.array([self.points[place].seconds for place in own])
        # A fit may start here, so the grid lies strictly inside the bounds.
        most = np.log(LARGEST_HOST_FACTOR) * (1 - TOLERANCE)
        grid = np.array([now, *np.linspace(-most, most, HOST_FACTORS)])
        simulated = np.array(
            [[timelines[place].seconds(float(np.exp(log))) for place in own] for log in grid]
        )
        sums: FloatArray = np.square(np.log(simulated / measured)).sum(axis=1)
        return grid, sums

    def _place(self, host: str) -> int:
        return len(self.names) + self.hosts.index(host)

    def residuals(self, moved: FloatArray) -> FloatArray:
        """(points,) logarithms of simulated over measured step times."""
        factors = {h: float(np.exp(moved[self._place(h)])) for h in self.hosts}
        timelines = self._of_all_hosts(moved)
        pairs = zip(timelines, self.points, strict=True)
        return np.log([line.seconds(factors.get(p.host, 1.0)) / p.seconds for line, p in pairs])

    def _of_all_hosts(self, moved: FloatArray) -> list[HostDeviceTimeline]:
        """Timelines of the points by the start's host factor."""
        return self._timelines.of(_moved(self.start, self.names, moved))

    def of(self, host: str, moved: FloatArray) -> EfficiencyConstants:
        """Constants on one host; the start's host factor for one that is not fitted."""
        common = _moved(self.start, self.names, moved)
        if host not in self.hosts:
            return common
        factor = float(np.exp(moved[self._place(host)]))
        return common.model_copy(update={"host_factor": self.start.host_factor * factor})

    def constants(self, moved: FloatArray) -> EfficiencyConstants:
        """Constants for an unknown host, with the median host factor."""
        factors = [self.of(host, moved).host_factor for host in self.hosts]
        middle = statistics.median(factors) if factors else self.start.host_factor
        return _moved(self.start, self.names, moved).model_copy(update={"host_factor": middle})

    def calibrated(self, solution: Solution) -> list[CalibratedConstant]:
        """Every constant before and after, the fitted ones with their intervals."""
        labels = [*self.names, *(f"host_factor of {host}" for host in self.hosts)]
        constants = []
        for place, name in enumerate([*labels, *(n for n in FITTED if n not in self.names)]):
            start = float(getattr(self.start, FITTED.get(name, ("host_factor",))[0]))
            value, interval = start, None
            if place < len(labels):
                value = start * float(np.exp(solution.values[place]))
                interval = self._interval(place, start, solution)
            constants.append(
                CalibratedConstant(
                    name=name,
                    start=start,
                    value=value,
                    interval=interval,
                    fitted=place < len(labels),
                )
            )
        return constants

    def _interval(self, place: int, start: float, solution: Solution) -> Interval | None:
        """95 % interval of a constant, from the scatter of the points.

        The scatter is at least ``LEAST_NOISE``: a few points can fit a law with many kinks by
        chance.
        """
        freedom, now = solution.degrees_of_freedom, float(solution.values[place])
        if freedom < 1 or solution.rmse is None:
            return None
        scatter = solution.rmse * float(np.sqrt(solution.points / freedom))
        allowed = t_quantile(0.975, freedom) * max(scatter, LEAST_NOISE)
        ends = []
        error = solution.standard_errors[place]
        if error is not None and scatter > 0:
            ends = [now - allowed * error / scatter, now + allowed * error / scatter]
        if place >= len(self.names):
            host = self.hosts[place - len(self.names)]
            ends += self._factors_within(host, solution.values, allowed)
        if not ends:
            return None
        low, high = np.exp([min(ends), max(ends)]) * start
        return Interval(low=float(low), high=float(high))

    def _factors_within(self, host: str, moved: FloatArray, allowed: float) -> list[float]:
        """Ends of the range of a host's factor with an allowed increase of the residuals."""
        grid, sums = self._by_factor(host, moved)
        within = np.flatnonzero(sums[1:] <= sums[0] + allowed**2)
        if not len(within):
            return []
        # The range ends between grid points: take the outer ones.
        first, last = max(within[0] - 1, 0), min(within[-1] + 1, HOST_FACTORS - 1)
        return [float(grid[1 + first]), float(grid[1 + last])]


def _problem(points: Sequence[Point], start: EfficiencyConstants) -> CalibrationProblem:
    """Problem of all constants that affect the points; with few points, of the hosts alone."""
    hosts = tuple(sorted({point.host for point in points}))
    names = tuple(name for name in FITTED if _has_effect(points, start, name))
    note = None
    if len(points) <= len(names) + len(hosts):
        note = (
            f"{len(points)} measured steps cannot determine {len(names) + len(hosts)} constants: "
            "only the speed of each host is fitted"
        )
    return CalibrationProblem(points, start, () if note else names, hosts, note)


def _has_effect(points: Sequence[Point], start: EfficiencyConstants, name: str) -> bool:
    halved = _moved(start, (name,), np.array([-np.log(2.0)]))
    return any(
        step_time(p.operators, p.gpu, halved).seconds
        > (1 + LEAST_EFFECT) * step_time(p.operators, p.gpu, start).seconds
        for p in points
    )


def _largest_factor(start: EfficiencyConstants, name: str) -> float:
    """Bound of a constant's growth, within which its record is valid."""
    if name not in FRACTIONS:
        return LARGEST_FACTOR
    most = max(float(getattr(start, field)) for field in FITTED[name])
    return min(LARGEST_FACTOR, MOST_FRACTION * (1 - TOLERANCE) / most)


def _moved(
    start: EfficiencyConstants, names: Sequence[str], moved: FloatArray
) -> EfficiencyConstants:
    return start.model_copy(
        update={
            field: getattr(start, field) * float(np.exp(log))
            for name, log in zip(names, moved, strict=False)
            for field in FITTED[name]
        }
    )


def _errors(problem: CalibrationProblem, moved: FloatArray) -> FloatArray:
    errors: FloatArray = np.abs(np.expm1(problem.residuals(moved)))
    return errors


def _leaving_one_gpu_out(points: Sequence[Point], start: EfficiencyConstants) -> list[HeldOutGpu]:
    """Error on each GPU by the constants of the others, with new hosts' factors from one point."""
    keys = sorted({point.gpu.key for point in points})
    held_out = []
    for key in keys if len(keys) > 1 else ():
        others = [point for point in points if point.gpu.key != key]
        own = [point for point in points if point.gpu.key == key]
        problem = _problem(others, start)
        constants = problem.constants(problem.solved().values)
        hosts = {point.host: point for point in reversed(own)}
        probes = [probe for host, probe in hosts.items() if host not in problem.hosts]
        judged = [point for point in own if all(point is not probe for probe in probes)]
        if not judged:
            continue
        probed = CalibrationProblem(probes, constants, (), tuple(p.host for p in probes), None)
        moved = probed.solved().values if probes else np.zeros(0)
        errors = _errors(replace(probed, points=judged), moved)
        mean, worst = float(errors.mean()), float(errors.max())
        held_out.append(HeldOutGpu(gpu=key, points=len(judged), mean_error=mean, worst_error=worst))
    return held_out
