"""Points of a calibration: measured steps with their traced operators."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from trials.records.cell import Cell
from trials.records.model import Model
from trials.records.observation import Basis, Observation, Outcome
from trials.simulation.recording import Operators
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.trace_cache import TraceError, Traces


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step with its traced operators."""

    gpu: Gpu
    host: str
    operators: Operators
    seconds: float


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
