"""Nodes that are far slower than others with the same GPU. Pure."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.planning.throughput import median_seconds
from trials.records.cell import Cell, by_cell
from trials.records.observation import (
    FITS,
    MEASURED,
    Observation,
    without_superseded,
)
from trials.trial import nodes_of

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
    nodes: tuple[_Node, ...]
    tokens: int
    tokens_per_second: float


def slow_nodes(observations: Sequence[Observation]) -> list[SlowNode]:
    """Find nodes that take several times as long as others for similar work.

    Batches of one model, recipe and routing on one kind of GPU are compared if they have about the
    same number of tokens, whatever the lengths of their examples. A batch on several nodes counts
    for each of them, and is compared with batches that the node took no part in.
    """
    of_work = _by_work(observations)
    if not any(map(_differ, of_work)):
        return []
    import numpy as np  # noqa: PLC0415 - few runs have nodes that differ

    timed = _Timings(observations)
    ratios: dict[_Node, list[FloatArray]] = defaultdict(list)
    compared: dict[_Node, list[Cell]] = defaultdict(list)
    for group in _on_several_nodes(of_work, timed):
        for node, own, others in _compared(group):
            compared[node] += own
            ratios[node].append(others)
    medians = {node: np.concatenate(values) for node, values in ratios.items()}
    times = {node: float(np.median(values)) for node, values in medians.items() if len(values)}
    slow = [node for node in times if times[node] >= SLOW]
    stand = _standing_on(slow, observations, timed) if slow else {}
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


def _by_work(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Observations of one model, recipe and routing on one kind of GPU, whatever their length."""
    groups: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for cell, of_cell in by_cell(observations).items():
        work = (cell.model, cell.weights, cell.recipe, cell.active_experts)
        groups[cell.device, cell.parallel, *work] += of_cell
    return [*groups.values()]


def _differ(of_work: Sequence[Observation]) -> bool:
    """Whether any two similar batches differ as much as those of a slow node do."""
    speeds: dict[int, list[float]] = defaultdict(list)
    for o in of_work:
        if (seconds := _seconds(o)) is not None:
            tokens = _tokens(o)
            speeds[tokens].append(tokens / seconds)
    sizes = sorted(speeds)
    for place, few in enumerate(sizes):
        alike = sizes[place : bisect_right(sizes, ALIKE * few)]
        similar = [speed for size in alike for speed in speeds[size]]
        if max(similar) / min(similar) >= SLOW:
            return True
    return False


def _seconds(o: Observation) -> float | None:
    """Median seconds of a batch that was timed; None for other observations."""
    return median_seconds(o) if o.outcome is FITS and o.basis is MEASURED else None


def _tokens(o: Observation) -> int:
    return o.batch_size * o.cell.seq_len


def _on_several_nodes(
    of_work: Iterable[Sequence[Observation]], timed: Callable[[Observation], _Timed | None]
) -> Iterator[list[_Timed]]:
    """Timed batches of similar work on several nodes."""
    for observations in of_work:
        group = [*filter(None, map(timed, observations))]
        if len({node for one in group for node in one.nodes}) > 1:
            yield group


def _standing_on(
    nodes: Sequence[_Node],
    observations: Sequence[Observation],
    timed: Callable[[Observation], _Timed | None],
) -> dict[_Node, dict[Cell, tuple[int, ...]]]:
    """Batch sizes by cell whose latest timing is from each of these nodes."""
    sizes: dict[_Node, dict[Cell, dict[int, None]]] = {node: defaultdict(dict) for node in nodes}
    for o in without_superseded(observations):
        one = timed(o)
        for node in sizes.keys() & ({*one.nodes} if one is not None else set()):
            sizes[node][o.cell][o.batch_size] = None
    return {
        node: {cell: tuple(batches) for cell, batches in of_node.items()}
        for node, of_node in sizes.items()
    }


class _Timings:
    """Speed of a timed batch, and the nodes that it was timed on.

    Args:
        observations: of the run; each names the host of its first node.
    """

    def __init__(self, observations: Iterable[Observation]) -> None:
        where = (o.environment for o in observations if o.environment is not None)
        self._hosts = {one.node_id: one.host for one in where}
        self._nodes: dict[tuple[str, ...], tuple[_Node, ...]] = {}

    def __call__(self, o: Observation) -> _Timed | None:
        node_ids, seconds = nodes_of(o), _seconds(o)
        if not node_ids or seconds is None:
            return None
        tokens = _tokens(o)
        return _Timed(
            o.cell, self._named(o.cell.device, *sorted(node_ids)), tokens, tokens / seconds
        )

    def _named(self, gpu: str, *node_ids: str) -> tuple[_Node, ...]:
        """Nodes with their hosts, the same objects each time."""
        key = gpu, *node_ids
        if key not in self._nodes:
            self._nodes[key] = tuple(_Node(gpu, self._hosts.get(n, n[:8]), n) for n in node_ids)
        return self._nodes[key]


def _compared(group: Sequence[_Timed]) -> Iterator[tuple[_Node, list[Cell], "FloatArray"]]:
    """Cells of each node, and the ratios of other nodes' speeds to its own at similar batches."""
    import numpy as np  # noqa: PLC0415 - as above

    tokens = np.array([one.tokens for one in group], np.float64)
    speed = np.array([one.tokens_per_second for one in group], np.float64)
    of_node: dict[_Node, list[int]] = defaultdict(list)
    for place, one in enumerate(group):
        for node in one.nodes:
            of_node[node].append(place)
    # A median of so many needs no more: every n-th of the others, in the order of their tokens.
    order = np.argsort(tokens, kind="stable")
    for node, places in of_node.items():
        own = np.array(places, np.int64)
        others = order[~np.isin(order, own)]
        others = others[:: max(1, len(others) // MOST_COMPARED)]
        few = np.minimum.outer(tokens[own], tokens[others])
        many = np.maximum.outer(tokens[own], tokens[others])
        ratios = np.divide.outer(speed[others], speed[own]).T
        yield (
            node,
            [group[place].cell for place in places],
            ratios[many <= ALIKE * few],
        )
