"""Fits the clock's constants to steps that were measured: what a stack reaches of a GPU's peaks.

The same constants are asked to serve every GPU; what differs between machines is how fast their
hosts are, one factor each. How far they serve a GPU that had no part in it is what leaving out one
GPU after another tells.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fitting.calibration_points import Point
from fitting.laws.fit_result import Interval
from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import Solution, solve_nonlinear, t_quantile
from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from trials.simulation.timing_model import EfficiencyConstants, step_time, timeline_of

# Constants that are fitted, and the fields of each: attention's forward and backward efficiency
# move together, since no step has one without the other.
FITTED: dict[str, tuple[str, ...]] = {
    "matrix_product": ("matrix_product",),
    "memory": ("memory",),
    "attention": ("attention_forward", "attention_backward"),
    "dequantisation": ("dequantisation",),
    "scan": ("scan",),
}
FURTHEST = 5.0  # a constant moves by this factor from its start at most
FURTHEST_HOST = 20.0
SEEN = 0.02  # a constant that moves no step by this part of it when it doubles is not fitted
TOLERANCE = 1e-6
LEAST_NOISE = 0.01  # a step that is measured twice hardly comes out nearer than that
HOSTS_TRIED = 61  # factors of a host, over the whole range
MOST_TURNS = 4  # of fitting all, then trying every host's factors


class CalibrationError(UserError):
    """There is nothing to calibrate on; one line on why."""


class CalibratedConstant(Record):
    """One constant, as it came out.

    Attributes:
        name: of the constant; ``host_factor of NAME`` for a machine's.
        start: before.
        value: after.
        interval: 95 % of it; absent where the points do not tell.
        fitted: whether the points had a say in it.
    """

    name: str
    start: float
    value: float
    interval: Interval | None = None
    fitted: bool


class HeldOutGpu(Record):
    """How far constants of all other GPUs are off on one, its host's speed told by one point.

    Attributes:
        gpu: the one left out.
        points: that it was judged by.
        mean_error, worst_error: absolute, relative.
    """

    gpu: str
    points: int
    mean_error: float
    worst_error: float


class Calibration(Record):
    """EfficiencyConstants, and how well they do.

    Attributes:
        constants: to be used.
        fitted: one by one.
        points: measured steps they were fitted to.
        gpus: of those steps.
        mean_error: absolute, relative, in sample.
        left_out: out of sample; empty with one GPU.
        note: what else a reader must know.
    """

    constants: EfficiencyConstants
    fitted: tuple[CalibratedConstant, ...]
    points: int
    gpus: tuple[str, ...]
    mean_error: float
    left_out: tuple[HeldOutGpu, ...]
    note: str | None = None


def calibrate(points: Sequence[Point], start: EfficiencyConstants) -> Calibration:
    """The constants that serve the points best, in the logarithm of the step time.

    Args:
        points: measured steps.
        start: where to begin; what the points do not tell stays there.

    Raises:
        CalibrationError: there are no points.
    """
    if not points:
        raise CalibrationError("no measured step of a CUDA GPU: measure some first")
    problem = _problem(points, start)
    solution = problem.solved()
    fitted = problem.constants(solution.values)
    errors = _errors(problem, solution.values)
    left_out = _leaving_one_gpu_out(points, start)
    # Mean absolute error to a 90 % interval, as of normal errors: 1.64 / 0.80.
    if left_out:
        interval = max(0.02, 2.06 * float(np.mean([each.mean_error for each in left_out])))
        above = None
    else:
        # Points that the constants were fitted to say nothing of another GPU.
        interval = max(start.error, 2.06 * float(np.mean(errors)))
        above = start.error_above
    gpus = tuple(sorted({point.gpu.key for point in points}))
    source = f"calibrated on {len(points)} measured steps of {', '.join(gpus)}"
    return Calibration(
        constants=fitted.model_copy(
            update={"error": interval, "error_above": above, "source": source}
        ),
        fitted=tuple(problem.told(solution)),
        points=len(points),
        gpus=gpus,
        mean_error=float(np.mean(errors)),
        left_out=tuple(left_out),
        note=problem.note,
    )


@dataclass(frozen=True, slots=True)
class CalibrationProblem:
    """What is fitted to which points."""

    points: Sequence[Point]
    start: EfficiencyConstants
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    note: str | None

    def solved(self) -> Solution:
        """The minimum, of those that a host's factor has where it begins to tell."""
        bounds = np.array(
            [np.log(FURTHEST)] * len(self.names) + [np.log(FURTHEST_HOST)] * len(self.hosts)
        )
        begin = self._with_best_hosts(np.zeros(len(bounds)))
        for _ in range(MOST_TURNS):
            solution = solve_nonlinear(
                self.residuals, begin, lower=-bounds, upper=bounds, tolerance=TOLERANCE
            )
            begin = self._with_best_hosts(solution.values)
            if np.array_equal(begin, solution.values):
                break
        return solution

    def _with_best_hosts(self, moved: FloatArray) -> FloatArray:
        """The same, each host's factor the best of all that are tried; as it is among equals."""
        best = moved.copy()
        for host in self.hosts:
            tried, sums = self._by_factor(host, moved)
            if sums[1:].min(initial=np.inf) < (1 - TOLERANCE) * sums[0]:
                best[self._place(host)] = tried[sums.argmin()]
        return best

    def _by_factor(self, host: str, moved: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Sums of a host's squared residuals by its factor, all else as it is; the first as it is.

        A host that the GPU hardly ever waits for makes no step longer, until its factor is so large
        that it does: a search that goes by slopes does not see that far.
        """
        own = [point for point in self.points if point.host == host]
        now = float(moved[self._place(host)])
        lanes = [timeline_of(p.operators, p.gpu, self.of(host, moved)) for p in own]
        measured = np.array([p.seconds for p in own])
        # Within the bounds, not on them: it is begun from.
        most = np.log(FURTHEST_HOST) * (1 - TOLERANCE)
        tried = np.array([now, *np.linspace(-most, most, HOSTS_TRIED)])
        told = np.array([[each.seconds(float(np.exp(by - now))) for each in lanes] for by in tried])
        sums: FloatArray = np.square(np.log(told / measured)).sum(axis=1)
        return tried, sums

    def _place(self, host: str) -> int:
        return len(self.names) + self.hosts.index(host)

    def residuals(self, moved: FloatArray) -> FloatArray:
        """Simulated over measured step times, in the logarithm."""
        return np.array(
            [
                np.log(step_time(p.operators, p.gpu, self.of(p.host, moved)).seconds / p.seconds)
                for p in self.points
            ]
        )

    def of(self, host: str, moved: FloatArray) -> EfficiencyConstants:
        """The constants on one machine."""
        common = _moved(self.start, self.names, moved)
        if host not in self.hosts:
            return common
        factor = float(np.exp(moved[self._place(host)]))
        return common.model_copy(update={"host_factor": self.start.host_factor * factor})

    def constants(self, moved: FloatArray) -> EfficiencyConstants:
        """The constants for a machine that nothing is known of: as fast as the middle one."""
        factors = [self.of(host, moved).host_factor for host in self.hosts]
        middle = statistics.median(factors) if factors else self.start.host_factor
        return _moved(self.start, self.names, moved).model_copy(update={"host_factor": middle})

    def told(self, solution: Solution) -> list[CalibratedConstant]:
        """Each constant, with what the points say of it."""
        labels = [*self.names, *(f"host_factor of {host}" for host in self.hosts)]
        found = [
            CalibratedConstant(
                name=name,
                start=self._start(name),
                value=self._start(name) * float(np.exp(solution.values[place])),
                interval=self._interval(place, name, solution),
                fitted=True,
            )
            for place, name in enumerate(labels)
        ]
        left = [name for name in FITTED if name not in self.names]
        starts = [(name, self._start(name)) for name in left]
        return found + [
            CalibratedConstant(name=name, start=start, value=start, fitted=False)
            for name, start in starts
        ]

    def _interval(self, place: int, name: str, solution: Solution) -> Interval | None:
        """95 % of a constant, by how the points scatter, which they do by ``LEAST_NOISE`` at least.

        A few points can lie on a law with many kinks by chance, as if they did not scatter.
        """
        freedom, now = solution.degrees_of_freedom, float(solution.values[place])
        if freedom < 1 or solution.rmse is None:
            return None
        scatter = solution.rmse * float(np.sqrt(solution.points / freedom))
        noise = max(scatter, LEAST_NOISE)
        allowed = t_quantile(0.975, freedom) * noise
        ends = []
        error = solution.standard_errors[place]
        if error is not None and scatter > 0:
            ends = [now - allowed * error / scatter, now + allowed * error / scatter]
        if place >= len(self.names):
            host = self.hosts[place - len(self.names)]
            ends += self._factors_within(host, solution.values, allowed)
        if not ends:
            return None
        low, high = np.exp([min(ends), max(ends)]) * self._start(name)
        return Interval(low=float(low), high=float(high))

    def _factors_within(self, host: str, moved: FloatArray, allowed: float) -> list[float]:
        """The ends of what a host's factor may be for its residuals not to grow by more."""
        tried, sums = self._by_factor(host, moved)
        within = np.flatnonzero(sums[1:] <= sums[0] + allowed**2)
        if not len(within):
            return []
        # It ends somewhere before the next that was tried.
        first, last = max(within[0] - 1, 0), min(within[-1] + 1, HOSTS_TRIED - 1)
        return [float(tried[1 + first]), float(tried[1 + last])]

    def _start(self, name: str) -> float:
        if name not in FITTED:
            return self.start.host_factor
        return float(getattr(self.start, FITTED[name][0]))


def _problem(points: Sequence[Point], start: EfficiencyConstants) -> CalibrationProblem:
    """All constants that the points have a say in; with few points, the hosts' speed alone."""
    hosts = tuple(sorted({point.host for point in points}))
    names = tuple(name for name in FITTED if _is_seen(points, start, name))
    if len(points) <= len(names) + len(hosts):
        note = (
            f"{len(points)} measured steps do not tell {len(names) + len(hosts)} constants: the "
            "speed of each host alone is fitted"
        )
        return CalibrationProblem(points, start, (), hosts, note)
    return CalibrationProblem(points, start, names, hosts, None)


def _is_seen(points: Sequence[Point], start: EfficiencyConstants, name: str) -> bool:
    doubled = _moved(start, (name,), np.array([-np.log(2.0)]))
    return any(
        step_time(p.operators, p.gpu, doubled).seconds
        > (1 + SEEN) * step_time(p.operators, p.gpu, start).seconds
        for p in points
    )


def _moved(
    start: EfficiencyConstants, names: Sequence[str], moved: FloatArray
) -> EfficiencyConstants:
    return start.model_copy(
        update={
            field: getattr(start, field) * float(np.exp(by))
            for name, by in zip(names, moved, strict=False)
            for field in FITTED[name]
        }
    )


def _errors(problem: CalibrationProblem, moved: FloatArray) -> FloatArray:
    errors: FloatArray = np.abs(np.expm1(problem.residuals(moved)))
    return errors


def _leaving_one_gpu_out(points: Sequence[Point], start: EfficiencyConstants) -> list[HeldOutGpu]:
    """Each GPU by the constants of the others, its hosts' speed by its first point: a probe."""
    keys = sorted({point.gpu.key for point in points})
    found = []
    for key in keys if len(keys) > 1 else ():
        others = [point for point in points if point.gpu.key != key]
        own = [point for point in points if point.gpu.key == key]
        problem = _problem(others, start)
        constants = problem.constants(problem.solved().values)
        hosts = {point.host: point for point in reversed(own)}
        known = set(problem.hosts)
        probes = [probe for host, probe in hosts.items() if host not in known]
        judged = [point for point in own if all(point is not probe for probe in probes)]
        if not judged:
            continue
        probed = CalibrationProblem(probes, constants, (), tuple(p.host for p in probes), None)
        moved = probed.solved().values if probes else np.zeros(0)
        check = CalibrationProblem(judged, constants, (), probed.hosts, None)
        errors = _errors(check, moved)
        found.append(
            HeldOutGpu(
                gpu=key,
                points=len(judged),
                mean_error=float(errors.mean()),
                worst_error=float(errors.max()),
            )
        )
    return found
