"""The largest batch of each cell, foretold by the others: what its own probes say is left out."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.fit import fit_peaks
from fitting.laws.fit_result import Fit, Prediction
from fitting.memory_prediction import predict_largest_batch, predict_peak
from fitting.points.fit_points import GIB, Peaks, peaks
from fitting.points.observation_columns import columns_of
from trials.records.cell import Cell
from trials.records.observation import MEMORY_MISSES, Observation, largest_batch


def held_out_largest(observations: Sequence[Observation]) -> dict[Cell, Prediction]:
    """The largest batch of each cell by the probes of the others, with a 90 % interval.

    By MEMORY_AFFINE of the same model, recipe, active experts, basis and software, fitted without
    the cell. Not all of the limit goes to tensors: an allocator and a context take some. The part
    that the others filled at their limits, half an example beyond their largest batch by the law,
    is taken for this one's: its median, and the least and the most for the ends of the interval.
    A cell of which the others tell nothing is not in it.
    """
    pools: defaultdict[tuple[object, ...], dict[Cell, list[Observation]]] = defaultdict(dict)
    for o in observations:
        if o.environment is not None:
            cell = o.cell
            of = (cell.model, cell.weights, cell.recipe, cell.active_experts)
            pools[*of, o.basis, o.environment.software].setdefault(cell, []).append(o)
    found = {}
    for seen in pools.values():
        known = {cell: _known(of) for cell, of in seen.items()}
        for cell in known:
            told = _foretold(cell, known)
            if told is not None:
                found[cell] = told
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """What one cell says of memory.

    Attributes:
        peaks: of what fitted.
        limit_gib: that its probes were held against.
        largest: its largest batch, where memory set it; else None.
    """

    peaks: Peaks
    limit_gib: float
    largest: int | None


def _known(seen: Sequence[Observation]) -> _Known:
    (points,) = peaks(columns_of(seen))
    limit = min(o.memory_limit_bytes for o in seen) / GIB
    largest, miss = largest_batch(seen) or (0, None)
    by_memory = largest > 0 and miss is not None and miss.outcome in MEMORY_MISSES
    return _Known(points, limit, largest if by_memory else None)


def _foretold(cell: Cell, known: Mapping[Cell, _Known]) -> Prediction | None:
    others = {other: of for other, of in known.items() if other != cell}
    closed = {other: of for other, of in others.items() if of.largest is not None}
    if not closed:
        return None
    law = fit_peaks(_together([of.peaks for of in others.values()]))
    if not law.status.is_usable or law.parameters[1].value == 0:
        return None
    filled = [_filled(law, other, of) for other, of in closed.items()]
    low, told, high = (
        predict_largest_batch(law, known[cell].limit_gib * part, cell.seq_len)
        for part in (min(filled), statistics.median(filled), max(filled))
    )
    return told.model_copy(update={"low": low.low, "high": high.high})


def _together(each: Sequence[Peaks]) -> Peaks:
    """The peaks of several cells; the limits are of the first alone, and unused."""
    return replace(
        each[0],
        seq_len=np.concatenate([one.seq_len for one in each]),
        tokens=np.concatenate([one.tokens for one in each]),
        peak_gib=np.concatenate([one.peak_gib for one in each]),
    )


def _filled(law: Fit, cell: Cell, known: _Known) -> float:
    """The part of the limit that tensors have at it."""
    assert known.largest is not None
    return predict_peak(law, (known.largest + 0.5) * cell.seq_len).value / known.limit_gib
