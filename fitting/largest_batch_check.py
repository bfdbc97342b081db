"""Largest batch of each cell as predicted from the probes of the other cells."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.fit import fit_peaks
from fitting.laws.fit_result import Prediction
from fitting.memory_prediction import predict_largest_batch, predict_peak
from fitting.points.fit_points import GIB, Peaks, peaks
from fitting.points.observation_columns import columns_of
from trials.records.cell import Cell
from trials.records.observation import MEMORY_MISSES, Observation, largest_batch


def held_out_largest_batches(observations: Sequence[Observation]) -> dict[Cell, Prediction]:
    """Predict the largest batch of each cell from the other cells, with a 90 % interval.

    The law is MEMORY_AFFINE of the same model, recipe, active experts, basis and software, fitted
    without the cell. An allocator and a context take a part of the limit: the share that tensors
    can fill is estimated at the limits of the other cells, half an example beyond their largest
    batch. The prediction takes the median share, the ends of the interval the extremes. Cells
    without a prediction are absent.
    """
    pools: defaultdict[tuple[object, ...], dict[Cell, list[Observation]]] = defaultdict(dict)
    for o in observations:
        if o.environment is not None:
            cell = o.cell
            law = (cell.model, cell.weights, cell.recipe, cell.active_experts)
            pools[*law, o.basis, o.environment.software].setdefault(cell, []).append(o)
    predictions = {}
    for pool in pools.values():
        memory = {cell: _memory_of(probes) for cell, probes in pool.items()}
        for cell in memory:
            prediction = _held_out_prediction(cell, memory)
            if prediction is not None:
                predictions[cell] = prediction
    return predictions


@dataclass(frozen=True, slots=True)
class _CellMemory:
    """Memory of one cell."""

    peaks: Peaks
    limit_gib: float
    largest: int | None


def _memory_of(probes: Sequence[Observation]) -> _CellMemory:
    (points,) = peaks(columns_of(probes))
    limit = min(o.memory_limit_bytes for o in probes) / GIB
    largest, miss = largest_batch(probes) or (0, None)
    by_memory = largest > 0 and miss is not None and miss.outcome in MEMORY_MISSES
    return _CellMemory(points, limit, largest if by_memory else None)


def _held_out_prediction(cell: Cell, memory: Mapping[Cell, _CellMemory]) -> Prediction | None:
    others = {other: m for other, m in memory.items() if other != cell}
    law = fit_peaks(_joined([m.peaks for m in others.values()])) if others else None
    if law is None or not law.status.is_usable or law.parameters[1].value == 0:
        return None
    shares = [
        predict_peak(law, (m.largest + 0.5) * other.seq_len).value / m.limit_gib
        for other, m in others.items()
        if m.largest is not None
    ]
    if not shares:
        return None
    low, middle, high = (
        predict_largest_batch(law, memory[cell].limit_gib * share, cell.seq_len)
        for share in (min(shares), statistics.median(shares), max(shares))
    )
    return middle.model_copy(update={"low": low.low, "high": high.high})


def _joined(parts: Sequence[Peaks]) -> Peaks:
    """Peaks of several cells; the limits, which are not read, are those of the first."""
    return replace(
        parts[0],
        seq_len=np.concatenate([part.seq_len for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        peak_gib=np.concatenate([part.peak_gib for part in parts]),
    )
