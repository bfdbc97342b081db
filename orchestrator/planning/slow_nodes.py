"""Nodes that are far slower than others with the same GPU. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, Outcome, without_superseded

SLOW = 4.0  # times; a clock that is held down, or a neighbour, makes less
# Batches of so like numbers of tokens are compared: what a step takes beside them weighs alike.
ALIKE = 1.5

_Node = tuple[str, str, str]  # the GPU it says it has, its host and its id


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A slow node.

    Attributes:
        gpu: key of the GPU it says it has.
        host: the machine's name.
        node_id: Ray's name of it.
        times: how many times longer it takes, in the median of what can be compared.
        compared: pairs of batches, one on it and one on another node.
        cells: what was timed on it and can be compared.
        standing: those of them that were not timed again on a node that is not slow, and the batch
            sizes that were not.
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
        """What it is, in words."""
        return (
            f"{self.host} ({self.node_id[:8]}) takes {self.times:.1f} times as long as other nodes "
            f"with {self.gpu}"
        )


@dataclass(frozen=True, slots=True)
class _Timed:
    cell: Cell
    host: str
    node_id: str
    tokens: int
    tokens_per_second: float

    @property
    def node(self) -> _Node:
        """Where."""
        return self.cell.device, self.host, self.node_id


def slow_nodes(observations: Sequence[Observation]) -> list[SlowNode]:
    """Nodes that take several times as long as others for like work; none where there is one node.

    Compared are timed batches of one model, recipe and routing on one kind of GPU, of about as many
    tokens each, whatever the lengths of their examples.
    """
    groups: dict[tuple[object, ...], list[_Timed]] = defaultdict(list)
    for o in observations:
        timed = _timed(o)
        if timed is not None:
            of = o.cell
            groups[of.device, of.model, of.weights, of.recipe, of.active_experts].append(timed)
    ratios: dict[_Node, list[float]] = defaultdict(list)
    cells: dict[_Node, dict[Cell, None]] = defaultdict(dict)
    for group in groups.values():
        if len({one.node_id for one in group}) == 1:
            continue
        for one in group:
            cells[one.node][one.cell] = None
            ratios[one.node] += [
                other.tokens_per_second / one.tokens_per_second
                for other in group
                if other.node_id != one.node_id and _are_alike(one, other)
            ]
    slow = [node for node, found in ratios.items() if found and statistics.median(found) >= SLOW]
    stand = _standing_on(slow, observations) if slow else {}
    return [
        SlowNode(
            *node,
            statistics.median(ratios[node]),
            len(ratios[node]),
            tuple(cells[node]),
            stand[node],
        )
        for node in slow
    ]


def _standing_on(
    nodes: Sequence[_Node], observations: Sequence[Observation]
) -> dict[_Node, dict[Cell, tuple[int, ...]]]:
    """The batch sizes of cells whose times, as they stand, are of each of these nodes."""
    sizes: dict[_Node, dict[Cell, dict[int, None]]] = {node: defaultdict(dict) for node in nodes}
    for o in without_superseded(observations):
        timed = _timed(o)
        if timed is not None and timed.node in sizes:
            sizes[timed.node][o.cell][o.batch_size] = None
    return {node: {c: tuple(found) for c, found in of.items()} for node, of in sizes.items()}


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
