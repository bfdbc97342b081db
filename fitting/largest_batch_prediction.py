"""Largest batch of a cell as predicted from the probes of other cells."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.fit import fit_peaks
from fitting.laws.fit_result import Fit, Prediction
from fitting.memory_prediction import predict_largest_batch, predict_peak
from fitting.points.fit_points import GIB, Peaks, peaks
from fitting.points.observation_columns import columns_of
from trials.records.cell import Cell, by_cell
from trials.records.observation import MEMORY_MISSES, Basis, Observation, largest_batch
from trials.search import LikelyLargest

LEAST_ERROR = 0.06  # of an estimate that a search begins with, however narrow its interval


def held_out_largest_batches(observations: Sequence[Observation]) -> dict[Cell, Prediction]:
    """Predict the largest batch of each cell from the other cells, with a 90 % interval.

    The law is MEMORY_AFFINE of the same model, recipe, active experts, basis and software, fitted
    without the cell. An allocator and a context take a part of the limit: the share that tensors
    can fill is estimated at the limits of the other cells, half an example beyond their largest
    batch. The prediction takes the median share, the ends of the interval the extremes. Cells
    without a prediction are absent.
    """
    predictions = {}
    for pool in _pools(observations).values():
        memory = {cell: _memory_of(cell, probes) for cell, probes in pool.items()}
        for cell, own in memory.items():
            law = _law_of([m for m in memory.values() if m is not own])
            if law is not None:
                predictions[cell] = law.largest_batch(own.limit_gib, cell.seq_len)
    return predictions


def likely_largest(
    cell: Cell, limit_bytes: int, observations: Iterable[Observation]
) -> LikelyLargest | None:
    """Estimate the largest batch of a cell before its search; None where no law can.

    The law is that of ``held_out_largest_batches``, from the measured software with most cells.

    Args:
        cell: cell to measure.
        limit_bytes: its memory limit by the catalog.
        observations: observations of the run; those of the cell are ignored.
    """
    others = by_cell(observations).items()
    alike = [
        probes for c, probes in others if c != cell and memory_subject(c) == memory_subject(cell)
    ]
    measured = (o for probes in alike for o in probes if o.basis is not Basis.SIMULATED)
    pool = max(_pools(measured).values(), key=len, default={})
    law = _law_of([_memory_of(other, probes) for other, probes in pool.items()])
    if law is None:
        return None
    prediction = law.largest_batch(limit_bytes / GIB, cell.seq_len)
    if prediction.value < 1:
        return None
    peak = predict_peak(law.fit, prediction.value * cell.seq_len)
    return LikelyLargest(
        batch=int(prediction.value),
        fixed_share=law.fit.parameters[0].value / peak.value,
        error=max(LEAST_ERROR, 1 - prediction.low / prediction.value),
    )


def memory_subject(cell: Cell) -> tuple[object, ...]:
    """Fields of a cell that a memory law depends on."""
    return cell.model, cell.weights, cell.recipe, cell.active_experts, cell.parallel


@dataclass(frozen=True, slots=True)
class _CellMemory:
    """Memory of one cell."""

    seq_len: int
    peaks: Peaks
    limit_gib: float
    largest: int | None


def _pools(
    observations: Iterable[Observation],
) -> dict[tuple[object, ...], dict[Cell, list[Observation]]]:
    """Observations by what a memory law depends on, and by cell."""
    pools: defaultdict[tuple[object, ...], dict[Cell, list[Observation]]] = defaultdict(dict)
    for o in observations:
        if o.environment is not None and not o.is_drawn:
            key = (*memory_subject(o.cell), o.basis, o.environment.software)
            pools[key].setdefault(o.cell, []).append(o)
    return pools


def _memory_of(cell: Cell, probes: Sequence[Observation]) -> _CellMemory:
    (points,) = peaks(columns_of(probes))
    limit = min(o.memory_limit_bytes for o in probes) / GIB
    largest, miss = largest_batch(probes) or (0, None)
    by_memory = largest > 0 and miss is not None and miss.outcome in MEMORY_MISSES
    return _CellMemory(cell.seq_len, points, limit, largest if by_memory else None)


@dataclass(frozen=True, slots=True)
class _MemoryLaw:
    """Law of memory that grows with the tokens, and the shares of the limits that tensors fill."""

    fit: Fit
    shares: Sequence[float]

    def largest_batch(self, limit_gib: float, seq_len: int) -> Prediction:
        low, middle, high = (
            predict_largest_batch(self.fit, limit_gib * share, seq_len)
            for share in (min(self.shares), statistics.median(self.shares), max(self.shares))
        )
        return middle.model_copy(update={"low": low.low, "high": high.high})


def _law_of(cells: Sequence[_CellMemory]) -> _MemoryLaw | None:
    """Law of the peaks of cells; None where none can be fitted or no cell reached its limit."""
    fit = fit_peaks(_joined([m.peaks for m in cells])) if cells else None
    if fit is None or not fit.status.is_usable or fit.parameters[1].value == 0:
        return None
    shares = [
        predict_peak(fit, (m.largest + 0.5) * m.seq_len).value / m.limit_gib
        for m in cells
        if m.largest is not None
    ]
    return _MemoryLaw(fit, shares) if shares else None


def _joined(parts: Sequence[Peaks]) -> Peaks:
    """Peaks of several cells; the limits, which are not read, are those of the first."""
    return replace(
        parts[0],
        seq_len=np.concatenate([part.seq_len for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        peak_gib=np.concatenate([part.peak_gib for part in parts]),
    )
