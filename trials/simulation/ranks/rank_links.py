"""Links that a rank's collectives take: within a node, or between several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from gpu_catalog.gpu import Gpu, Interconnect
from gpu_catalog.links.between_nodes import NodeNetwork, network_notes, network_speed
from gpu_catalog.links.within_nodes import (
    CollectiveName,
    LinkSpeed,
    MeasuredLink,
    link_notes,
    link_speed,
)
from trials.recipes.parallel import Parallel, link_within


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of one collective, at equal distances.

    Attributes:
        ranks: number of them.
        distance: difference between the numbers of two neighbours.
        gpus_per_node: ranks of a node, of this and other groups; None where one node has all.
    """

    ranks: int
    distance: int
    gpus_per_node: int | None = None

    @property
    def nodes(self) -> int:
        """Nodes that it has ranks on."""
        if self.gpus_per_node is None:
            return 1
        numbers = range(0, self.ranks * self.distance, self.distance)
        return len({number // self.gpus_per_node for number in numbers})


@cache
def collective_speed(
    group: Group,
    collective: CollectiveName,
    interconnect: Interconnect | None,
    network: NodeNetwork | None,
) -> LinkSpeed:
    """Speed of a group's collective.

    Between nodes, each GPU has an equal share of its node's network: other groups use the rest at
    the same time. GPUs of one node pass on to one another no more than their own link does; one
    that is alone there exchanges all with other nodes, where NCCL's tree saves nothing.
    """
    if group.nodes == 1 or group.gpus_per_node is None:
        return link_speed(interconnect, group.ranks, collective)
    nodes, in_each = group.nodes, group.ranks // group.nodes
    speed = network_speed(network, nodes, nodes * group.gpus_per_node, collective)
    reached = speed.bytes_per_second * in_each / group.gpus_per_node
    if in_each > 1:
        within = link_speed(interconnect, in_each, collective)
        reached = min(reached, within.bytes_per_second)
    elif network is not None:
        reached = min(reached, network.bytes_per_second / group.gpus_per_node)
    return speed.model_copy(update={"bytes_per_second": reached})


def measured_speed(
    group: Group,
    collective: CollectiveName,
    gpu: Gpu,
    layout: Parallel | None,
    links: Sequence[MeasuredLink],
) -> LinkSpeed | None:
    """Speed that a user measured on as many of these GPUs, all on one node with the layout's link.

    None without one.
    """
    wanted = (gpu.key, link_within(gpu, layout), group.ranks, collective)
    for link in links if group.nodes == 1 else ():
        interconnect = link.interconnect or gpu.interconnect
        if (link.gpu, interconnect, link.gpus, link.collective) == wanted:
            return link.speed(link.alpha_us)
    return None


def layout_notes(gpu: Gpu, layout: Parallel, links: Sequence[MeasuredLink] = ()) -> list[str]:
    """Collectives of a layout whose speed was not measured, and what stands in for each."""
    notes: list[str] = []
    for group, names in _collectives(layout) if layout.gpus > 1 else ():
        collectives = [n for n in names if measured_speed(group, n, gpu, layout, links) is None]
        if group.nodes == 1:
            notes += link_notes(gpu.key, link_within(gpu, layout), group.ranks, collectives)
        else:
            nodes = group.nodes
            gpus = nodes * layout.gpus_per_node
            notes += network_notes(layout.network, nodes, gpus, collectives)
    return notes


def _collectives(layout: Parallel) -> Iterator[tuple[Group, Sequence[CollectiveName]]]:
    """Groups of a layout with their large collectives."""
    per_node = layout.gpus_per_node
    if not layout.is_sharded:
        yield Group(layout.gpus, 1, per_node), ("all-reduce",)
        return
    if layout.degree is not None:
        yield Group(layout.degree, 1, per_node), ("all-reduce",)
        if layout.is_gathered:
            among = Group(layout.data_parallel_ranks, layout.degree, per_node)
            yield among, ("all-gather", "reduce-scatter")
        return
    if layout.shards == 1:  # stages 1 and 2 of ZeRO
        yield Group(layout.gpus, 1, per_node), ("all-gather", "all-reduce")
        return
    yield Group(layout.shards, 1, per_node), ("all-gather", "reduce-scatter")
    if layout.replicas is not None:
        yield Group(layout.replicas, layout.shards, per_node), ("all-reduce",)
