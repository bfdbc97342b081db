"""Nodes that are far slower than others with the same GPU. Pure."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.planning.throughput import median_seconds
from trials.records.cell import Cell, by_cell
from trials.records.observation import (
    Basis,
    Environment,
    Observation,
    Outcome,
    without_superseded,
)

if TYPE_CHECKING:
    from fitting.numerics.arrays import FloatArray

SLOW = 4.0  # ratio of step times; throttled clocks and busy neighbours cause less
# Largest ratio of the tokens of two batches to compare: the fixed cost of a step then weighs alike.
ALIKE = 1.5
MOST_COMPARED = 1000  # batches on other nodes that each batch is compared with


class _Node(NamedTuple):
    gpu: str
    host: str
    node_id: str


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A slow node.

    Attributes:
        times: median ratio of its step times to those of other nodes.
        compared: number of compared pairs of batches, one on it and one on another node.
        cells: cells whose batches on it were compared.
        standing: cells and batch sizes that no other node has timed again.
    """

    gpu: str
    host: str
    node_id: str
    times: float
    compared: int
    cells: tuple[Cell, ...]
    standing: Mapping[Cell, tuple[int, ...]]

    @property
    def text(self) -> str:
        """Host, GPU and ratio, in words."""
        return (
            f"{self.host} ({self.node_id[:8]}) takes {self.times:.1f} times as long as other nodes "
            f"with {self.gpu}"
        )


class _Timed(NamedTuple):
    cell: Cell
    where: Environment
    node_id: str
    tokens: int
    tokens_per_second: float

    @property
    def node(self) -> _Node:
        return _Node(self.cell.device, self.where.host, self.node_id)


def slow_nodes(observations: Sequence[Observation]) -> list[SlowNode]:
    """Find nodes that take several times as long as others for similar work.

    Batches of one model, recipe and routing on one kind of GPU are compared if they have about the
    same number of tokens, whatever the lengths of their examples.
    """
    if not any(map(_differ, _groups(observations))):
        return []
    import numpy as np  # noqa: PLC0415 - few runs have nodes that differ

    ratios: dict[_Node, list[FloatArray]] = defaultdict(list)
    compared: dict[_Node, list[Cell]] = defaultdict(list)
    for group in _groups(observations):
        for node, own, others in _compared(group):
            compared[node] += own
            ratios[node].append(others)
    medians = {node: np.concatenate(values) for node, values in ratios.items()}
    times = {node: float(np.median(values)) for node, values in medians.items() if len(values)}
    slow = [node for node in times if times[node] >= SLOW]
    stand = _standing_on(slow, observations) if slow else {}
    return [
        SlowNode(
            *node,
            times[node],
            len(medians[node]),
            tuple(dict.fromkeys(compared[node])),
            stand[node],
        )
        for node in slow
    ]


def _groups(observations: Sequence[Observation]) -> Iterator[list[_Timed]]:
    """Timed batches of similar work on several nodes."""
    groups: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for cell, of_cell in by_cell(observations).items():
        work = (cell.model, cell.weights, cell.recipe, cell.active_experts)
        groups[cell.device, cell.parallel, *work] += of_cell
    for of_work in groups.values():
        group = [*filter(None, map(_timed, of_work))]
        if len({one.node_id for one in group}) > 1:
            yield group


def _standing_on(
    nodes: Sequence[_Node], observations: Sequence[Observation]
) -> dict[_Node, dict[Cell, tuple[int, ...]]]:
    """Batch sizes by cell whose latest timing is from each of these nodes."""
    sizes: dict[_Node, dict[Cell, dict[int, None]]] = {node: defaultdict(dict) for node in nodes}
    for o in without_superseded(observations):
        timed = _timed(o)
        if timed is not None and timed.node in sizes:
            sizes[timed.node][o.cell][o.batch_size] = None
    return {
        node: {cell: tuple(batches) for cell, batches in of_node.items()}
        for node, of_node in sizes.items()
    }


def _timed(o: Observation) -> _Timed | None:
    where, seconds = o.environment, median_seconds(o)
    if seconds is None or where is None or where.node_id is None:
        return None
    if o.outcome is not Outcome.FITS or o.basis is not Basis.MEASURED:
        return None
    tokens = o.batch_size * o.cell.seq_len
    return _Timed(o.cell, where, where.node_id, tokens, tokens / seconds)


def _differ(group: Sequence[_Timed]) -> bool:
    """Whether any two similar batches differ as much as those of a slow node do."""
    speeds: dict[int, list[float]] = defaultdict(list)
    for one in group:
        speeds[one.tokens].append(one.tokens_per_second)
    sizes = sorted(speeds)
    for place, few in enumerate(sizes):
        alike = sizes[place : bisect_right(sizes, ALIKE * few)]
        similar = [speed for size in alike for speed in speeds[size]]
        if max(similar) / min(similar) >= SLOW:
            return True
    return False


def _compared(group: Sequence[_Timed]) -> Iterator[tuple[_Node, list[Cell], "FloatArray"]]:
    """Cells of each node, and the ratios of other nodes' speeds to its own at similar batches."""
    import numpy as np  # noqa: PLC0415 - as above

    tokens = np.array([one.tokens for one in group], np.float64)
    speed = np.array([one.tokens_per_second for one in group], np.float64)
    last = {one.node_id: one for one in group}
    ids = np.array([one.node_id for one in group], np.str_)
    of_node = {node_id: ids == node_id for node_id in last}
    # A median of so many needs no more: every n-th of the others, in the order of their tokens.
    order = np.argsort(tokens, kind="stable")
    for node_id, is_own in of_node.items():
        own, others = np.flatnonzero(is_own), order[~is_own[order]]
        others = others[:: max(1, len(others) // MOST_COMPARED)]
        few = np.minimum.outer(tokens[own], tokens[others])
        many = np.maximum.outer(tokens[own], tokens[others])
        ratios = np.divide.outer(speed[others], speed[own]).T
        yield (
            last[node_id].node,
            [group[place].cell for place in own.tolist()],
            ratios[many <= ALIKE * few],
        )
