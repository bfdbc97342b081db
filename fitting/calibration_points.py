"""Points of a calibration: measured steps with their traced operators."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gpu_catalog.gpu import Gpu
from trials.records.cell import Cell
from trials.records.model import Model
from trials.records.observation import Basis, Observation, Outcome
from trials.simulation.clock.operators import Operators
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import (
    EfficiencyConstants,
    HostDeviceTimeline,
    timeline_of,
    with_grouped_fallback,
)
from trials.simulation.trace_cache import TraceError, Traces

MOST_KNOWN = 8  # timelines by constants: more than a fit moves in turn


@dataclass(frozen=True)
class Point:
    """A measured step with its traced operators."""

    gpu: Gpu
    host: str
    operators: Operators
    seconds: float

    @cached_property
    def order(self) -> HostDeviceTimeline:
        """Timeline of the step, of which durations alone depend on the constants."""
        return timeline_of(self.operators, self.gpu, EfficiencyConstants())

    @cached_property
    def run(self) -> Operators:
        """Operators that the GPU runs."""
        return with_grouped_fallback(self.operators, self.gpu)


class PointTimelines:
    """Timelines of points by constants; equal operators, such as those of all layers, count once.

    Those of the last constants are kept: most steps of a fit change a host's factor alone.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._by_gpu: dict[str, list[int]] = defaultdict(list)
        for place, point in enumerate(points):
            self._by_gpu[point.gpu.key].append(place)
        self._known: dict[EfficiencyConstants, list[HostDeviceTimeline]] = {}

    def of(self, constants: EfficiencyConstants) -> list[HostDeviceTimeline]:
        """Timeline of each point."""
        if constants not in self._known:
            if len(self._known) == MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[constants] = self._timed(constants)
        return self._known[constants]

    def _timed(self, constants: EfficiencyConstants) -> list[HostDeviceTimeline]:
        timelines = {}
        for places in self._by_gpu.values():
            own = [self._points[place] for place in places]
            timed = timeline_of(_joined([point.run for point in own]), own[0].gpu, constants)
            begin = 0
            for place, point in zip(places, own, strict=True):
                at = begin + point.run.events
                begin += len(point.run.kinds)
                timelines[place] = replace(
                    point.order,
                    host=timed.host[at],
                    device=timed.device[at],
                    overlapped=constants.overlapped,
                )
        return [timelines[place] for place in range(len(self._points))]


def _joined(steps: Sequence[Operators]) -> Operators:
    """All operators of several steps, each once."""
    return Operators(
        np.concatenate([step.kinds for step in steps]),
        np.concatenate([step.names for step in steps]),
        np.concatenate([step.numbers for step in steps]),
    )


def measured_points(
    observations: Sequence[Observation],
    models: Mapping[str, Model],
    gpus: Mapping[str, Gpu],
    traces: Traces,
) -> tuple[list[Point], list[str]]:
    """Collect the measured steps on CUDA GPUs, one for each cell, batch size, host and stack.

    Returns:
        The points, and a line for each cell that is left out.
    """
    by_step: dict[tuple[Cell, int, str, str], list[float]] = defaultdict(list)
    for o in observations:
        is_cuda = o.cell.gpu in gpus and gpus[o.cell.gpu].kind == "cuda"
        fits = o.basis is Basis.MEASURED and o.outcome is Outcome.FITS
        if is_cuda and fits and o.measurement is not None and o.measurement.step_seconds:
            assert o.environment is not None
            key = (o.cell, o.batch_size, o.environment.host, o.environment.stack)
            by_step[key] += o.measurement.step_seconds
    cells = {cell for cell, *_ in by_step}
    simulated = {
        cell: SimulatedCell(cell, models[cell.model], traces)
        for cell in sorted(cells, key=lambda cell: cell.key)
        if cell.model in models
    }
    ones = {cell for cell, batch_size, *_ in by_step if batch_size == 1}
    traces.prepare([r for c, s in simulated.items() for r in s.requests(alone=c in ones)])
    points: list[Point] = []
    reasons = {
        cell.key: f"{cell.key}: no specification has its model, so its steps are left out"
        for cell in sorted(cells - set(simulated), key=lambda cell: cell.key)
    }
    for (cell, batch_size, host, _), seconds in by_step.items():
        if cell not in simulated:
            continue
        try:
            operators = simulated[cell].operators(batch_size)
        except TraceError as error:
            reasons[cell.key] = f"{cell.key}: {error}"
            continue
        points.append(Point(gpus[cell.gpu], host, operators, statistics.median(seconds)))
    return points, list(reasons.values())
