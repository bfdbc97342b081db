"""The largest batch of each cell, foretold by the others: what its own probes say is left out."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from fitting.fit import Fit, Prediction, fit_peaks, predict_largest_batch, predict_peak
from fitting.points import GIB, peaks
from trials.observation import MEMORY_MISSES, Observation, largest_batch
from trials.workload import Cell

Seen = Mapping[Cell, Sequence[Observation]]


def held_out_largest(observations: Sequence[Observation]) -> dict[Cell, Prediction]:
    """The largest batch of each cell by the probes of the others, with a 90 % interval.

    By MEMORY_AFFINE of the same model, recipe, active experts, basis and software, fitted without
    the cell. Not all of the limit goes to tensors: an allocator and a context take some. The part
    that the others filled at their own limits, half a query beyond their largest batch by the law,
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
        for cell in seen:
            told = _foretold(cell, seen)
            if told is not None:
                found[cell] = told
    return found


def _foretold(cell: Cell, seen: Seen) -> Prediction | None:
    others = {other: of for other, of in seen.items() if other != cell}
    fits = [fit_peaks(points) for points in peaks([o for of in others.values() for o in of])]
    usable = [fit for fit in fits if fit.status.is_usable and fit.parameters[1].value > 0]
    if len(usable) != 1:
        return None
    (law,) = usable
    filled = [part for other, of in others.items() if (part := _filled(law, other, of)) is not None]
    if not filled:
        return None
    limit = _limit_gib(seen[cell])
    low, told, high = (
        predict_largest_batch(law, limit * part, cell.seq_len)
        for part in (min(filled), statistics.median(filled), max(filled))
    )
    return told.model_copy(update={"low": low.low, "high": high.high})


def _filled(law: Fit, cell: Cell, seen: Sequence[Observation]) -> float | None:
    """The part of the limit that tensors have at it; None where memory did not set the limit."""
    known = largest_batch(seen)
    if known is None or known[0] < 1 or known[1] is None or known[1].outcome not in MEMORY_MISSES:
        return None
    return predict_peak(law, (known[0] + 0.5) * cell.seq_len).value / _limit_gib(seen)


def _limit_gib(seen: Sequence[Observation]) -> float:
    return min(o.memory_limit_bytes for o in seen) / GIB
