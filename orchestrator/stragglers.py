"""Nodes that are far slower than others with the same GPU. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.tables import table
from trials.observation import Basis, Observation, Outcome
from trials.workload import Cell

SLOW = 4.0  # times; a clock that is held down, or a neighbour, makes less
# Batches of so like numbers of tokens are compared: what a step takes beside them weighs alike.
ALIKE = 1.5


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow node.

    Attributes:
        gpu: key of the GPU it says it has.
        host: the machine's name.
        node_id: Ray's name of it.
        times: how many times longer it takes, in the median of what can be compared.
        compared: pairs of batches, one on it and one on another node.
        cells: what was timed on it.
    """

    gpu: str
    host: str
    node_id: str
    times: float
    compared: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class _Timed:
    cell: Cell
    host: str
    node_id: str
    tokens: int
    tokens_per_second: float


def stragglers(observations: Sequence[Observation]) -> list[Straggler]:
    """Nodes that take several times as long as others for like work; none where there is one node.

    Compared are timed batches of one model, recipe and routing on one kind of GPU, of about as many
    tokens each, whatever the lengths of their queries.
    """
    groups: dict[tuple[object, ...], list[_Timed]] = defaultdict(list)
    for o in observations:
        timed = _timed(o)
        if timed is not None:
            of = o.cell
            groups[of.device, of.model, of.weights, of.recipe, of.active_experts].append(timed)
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    cells: dict[tuple[str, str, str], dict[Cell, None]] = defaultdict(dict)
    for group in groups.values():
        for one in group:
            node = (one.cell.device, one.host, one.node_id)
            cells[node][one.cell] = None
            ratios[node] += [
                other.tokens_per_second / one.tokens_per_second
                for other in group
                if other.node_id != one.node_id and _are_alike(one, other)
            ]
    return [
        Straggler(*node, statistics.median(found), len(found), tuple(cells[node]))
        for node, found in ratios.items()
        if found and statistics.median(found) >= SLOW
    ]


def _timed(o: Observation) -> _Timed | None:
    if o.outcome is not Outcome.FITS or o.basis is not Basis.MEASURED or o.measurement is None:
        return None
    where, steps = o.environment, o.measurement.step_seconds
    if where is None or where.node_id is None or not steps:
        return None
    tokens = o.batch_size * o.cell.seq_len
    return _Timed(o.cell, where.host, where.node_id, tokens, tokens / statistics.median(steps))


def _are_alike(one: _Timed, other: _Timed) -> bool:
    few, many = sorted((one.tokens, other.tokens))
    return many <= ALIKE * few


def stragglers_section(observations: Sequence[Observation]) -> str:
    """A table of them; empty when there is none."""
    found = stragglers(observations)
    if not found:
        return ""
    rows = [
        (
            each.gpu,
            f"{each.host} ({each.node_id[:8]})",
            f"{each.times:.1f}",
            each.compared,
            ", ".join(cell.key for cell in each.cells),
        )
        for each in found
    ]
    headers = ("GPU", "node", "times slower", "batches compared", "timed on it")
    return (
        "## Slow nodes\n\nWhat was timed on these stands in the ranking as it was measured. Look "
        "at their clocks and at what else runs there; a sweep without them, into another --out, "
        f"measures it anew.\n\n{table(headers, rows)}"
    )


def stragglers_text(observations: Sequence[Observation]) -> Iterator[str]:
    """A line on each."""
    for each in stragglers(observations):
        yield (
            f"{each.host} ({each.node_id[:8]}) takes {each.times:.1f} times as long as other nodes "
            f"with {each.gpu}: do not trust what was timed on it; see Slow nodes in the report"
        )
