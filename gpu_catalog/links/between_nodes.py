"""Networks between the nodes of a cluster: those of instances, and the speed of collectives.

A collective of n GPUs on several nodes has the equation of one node (``within_nodes``), at the bus
bandwidth that its share of a node's network reaches: each GPU of a node has the same share,
whatever groups they form at the same time.
"""

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Self

from pydantic import Field, model_validator

from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Interconnect, Positive, Source
from gpu_catalog.links.within_nodes import CollectiveName, LinkSpeed, stand_in_notes
from gpu_catalog.offer import Offer, Text
from gpu_catalog.record import Record

INSTANCES = "instance_networks.csv"
LINKS = "network_links.csv"
BITS = 8.0


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """Network of a node to the others.

    Attributes:
        gbps: 10^9 bits per second in each direction.
        rdma: whether it reaches memory without the host: InfiniBand, RoCE or EFA. Google's
            GPUDirect-TCPX is TCP, and no RDMA.
    """

    gbps: float
    rdma: bool

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second in each direction."""
        return 1e9 * self.gbps / BITS

    @property
    def text(self) -> str:
        """The network in a few words."""
        return f"{self.gbps:g} Gb/s {'with' if self.rdma else 'without'} RDMA"


@dataclass(frozen=True, slots=True)
class InstanceLinks:
    """Links of an instance.

    Attributes:
        network: its network to others of its kind; None where unknown.
        interconnect: link between its GPUs, where it is not that of such GPUs elsewhere.
    """

    network: NodeNetwork | None = None
    interconnect: Interconnect | None = None


class InstanceNetwork(Record):
    """Network of an instance to others of its kind, and the link between its GPUs.

    Attributes:
        provider, instance: as in offers.
        node_network_gbps: of all its cards for GPUs, in 10^9 bits per second and direction; absent
            where unknown.
        rdma: whether it reaches memory without the host; absent as above.
        interconnect: as in ``Gpu``, where that is not the link between these GPUs.
        source: source of the figures.
        recorded: date of this record.
    """

    provider: Text
    instance: Text
    node_network_gbps: Positive | None = None
    rdma: bool | None = None
    interconnect: Interconnect | None = None
    source: Source
    recorded: dt.date

    @model_validator(mode="after")
    def _network_is_whole(self) -> Self:
        if (self.node_network_gbps is None) != (self.rdma is None):
            raise ValueError("node_network_gbps and rdma are given together or not at all")
        return self

    @property
    def links(self) -> InstanceLinks:
        """The links that it states."""
        if self.node_network_gbps is None or self.rdma is None:
            return InstanceLinks(None, self.interconnect)
        return InstanceLinks(NodeNetwork(self.node_network_gbps, self.rdma), self.interconnect)


class NetworkLink(Record):
    """Measured speed of one collective between nodes.

    Attributes:
        node_network_gbps, rdma: network of each node.
        nodes: nodes that took part.
        gpus: GPUs of all of them.
        collective: the collective.
        alpha_us: time of the smallest message, in microseconds; absent where only large messages
            were measured.
        bus_gb_per_second: bus bandwidth of large messages, in 10^9 bytes per second. On two nodes,
            NCCL's tree sends less between them than a ring, so that it may exceed the network.
        source: source of the figures.
        recorded: date of this record.
    """

    node_network_gbps: Positive
    rdma: bool
    nodes: Annotated[int, Field(ge=2)]
    gpus: Annotated[int, Field(ge=2)]
    collective: CollectiveName
    alpha_us: Positive | None = None
    bus_gb_per_second: Positive
    source: Source
    recorded: dt.date

    @property
    def reached(self) -> float:
        """Bus bandwidth over that of the network."""
        return self.bus_gb_per_second * BITS / self.node_network_gbps


def links_of(offer: Offer) -> InstanceLinks:
    """Links of an offer's instance, as far as the catalog has them."""
    return _links().get((offer.provider, offer.instance), InstanceLinks())


def distinct_links(offers: Iterable[Offer], gpus_per_node: int) -> list[InstanceLinks]:
    """Links of instances with at least as many GPUs, each once."""
    enough = (offer for offer in offers if offer.gpus_per_instance >= gpus_per_node)
    return list(dict.fromkeys(map(links_of, enough)))


@cache
def _links() -> dict[tuple[str, str], InstanceLinks]:
    rows = shipped_rows(InstanceNetwork, INSTANCES)
    return {(row.provider, row.instance): row.links for row in rows}


@cache
def network_speed(
    network: NodeNetwork | None, nodes: int, gpus: int, collective: CollectiveName
) -> LinkSpeed:
    """Speed of a collective of all GPUs of several nodes: as measured, or else the slowest.

    It is the slowest among the nearest links measured, in parts of the network: those of the same
    network and collective, then with RDMA and the same collective, then of the same RDMA. Without
    RDMA the collective alone says little: Google's GPUDirect is much faster than TCP by the host.
    Of an unknown network it is the slowest of all.
    """
    links = shipped_rows(NetworkLink, LINKS)
    if network is None:
        slowest = min(links, key=lambda link: link.bus_gb_per_second)
        return _speed(slowest, [slowest], links, slowest.bus_gb_per_second, is_exact=False)
    alike = [link for link in links if link.rdma == network.rdma]
    like = [link for link in alike if link.collective == collective]
    same = [link for link in like if link.node_network_gbps == network.gbps]
    exact = [link for link in same if (link.nodes, link.gpus) == (nodes, gpus)]
    nearest = exact or same or (like if network.rdma else []) or alike
    slowest = min(nearest, key=lambda link: link.reached)
    reached = slowest.reached * network.gbps / BITS
    return _speed(slowest, nearest, alike, reached, is_exact=bool(exact))


def _speed(
    slowest: NetworkLink,
    nearest: Sequence[NetworkLink],
    links: Sequence[NetworkLink],
    gb_per_second: float,
    *,
    is_exact: bool,
) -> LinkSpeed:
    alphas = [link.alpha_us for link in nearest if link.alpha_us] or [
        link.alpha_us for link in links if link.alpha_us
    ]
    network = NodeNetwork(slowest.node_network_gbps, slowest.rdma)
    text = f"{slowest.collective} on {slowest.gpus} GPUs of {slowest.nodes} nodes, {network.text}"
    return LinkSpeed(
        alpha_seconds=1e-6 * max(alphas),
        bytes_per_second=1e9 * gb_per_second,
        stands_in=None if is_exact else text,
    )


def network_notes(
    network: NodeNetwork | None, nodes: int, gpus: int, collectives: Sequence[CollectiveName]
) -> list[str]:
    """Collectives whose speed between such nodes was not measured, and what stands in for it."""
    name = "an unknown network" if network is None else network.text
    speeds = {one: network_speed(network, nodes, gpus, one) for one in collectives}
    return stand_in_notes(speeds, f"on {gpus} GPUs of {nodes} nodes by {name}", "GB/s a node")
