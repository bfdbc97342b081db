"""Networks between nodes: those of instances, and the speed that collectives reach on them."""

import pytest

from gpu_catalog.catalog import load_catalog, shipped_rows
from gpu_catalog.links.between_nodes import (
    INSTANCES,
    LINKS,
    InstanceNetwork,
    NetworkLink,
    NodeNetwork,
    distinct_links,
    links_of,
    network_notes,
    network_speed,
)

CATALOG = load_catalog()
NDR, EFA = NodeNetwork(3200, rdma=True), NodeNetwork(400, rdma=True)
TCP = NodeNetwork(100, rdma=False)
FILES = [(InstanceNetwork, INSTANCES), (NetworkLink, LINKS)]


@pytest.mark.parametrize(("model", "name"), FILES, ids=["instances", "links"])
def test_every_row_has_a_source_and_stands_once(
    model: type[InstanceNetwork | NetworkLink], name: str
) -> None:
    """Two rows of one instance, or of one collective on as many GPUs, would contradict."""
    rows = shipped_rows(model, name)
    assert all(row.source.strip() for row in rows)
    figures = {"source", "recorded", "alpha_us", "bus_gb_per_second"}
    keys = [tuple(row.model_dump(exclude=figures).values()) for row in rows]
    assert len(set(keys)) == len(keys) > 5


def test_instances_with_a_network_have_an_offer() -> None:
    """A misspelt name would never be looked up."""
    offered = {(offer.provider, offer.instance) for offer in CATALOG.all_offers}
    rows = shipped_rows(InstanceNetwork, INSTANCES)
    assert {(row.provider, row.instance) for row in rows} <= offered


def test_an_offer_has_the_network_of_its_instance() -> None:
    """Without a record it is unknown; instances with too few GPUs do not count."""
    offers = CATALOG.offers("A100-80GB-SXM")
    by_name = {offer.instance: links_of(offer).network for offer in offers}
    assert by_name["p4de.24xlarge"] == EFA
    assert by_name["4A100.88V"] is None
    networks = [links.network for links in distinct_links(offers, 8)]
    assert set(networks) == {EFA, TCP, NodeNetwork(1600, rdma=True), None}
    assert None in [links.network for links in distinct_links(offers, 4)]
    assert distinct_links(offers, 16) == []


def test_an_instance_states_a_link_between_its_gpus_only_where_it_is_not_theirs() -> None:
    """Azure joins A100 PCIe in pairs by NVLink; the same link as elsewhere would split offers."""
    own = {
        (offer.instance, offer.gpu): links_of(offer).interconnect
        for offer in CATALOG.all_offers
        if links_of(offer).interconnect is not None
    }
    assert own["Standard_NC96ads_A100_v4", "A100-80GB-PCIe"] == "nvlink-pair-3"
    assert all(CATALOG.gpu(gpu).interconnect != link for (_, gpu), link in own.items())


def test_a_measured_collective_has_its_own_speed() -> None:
    """Four p4d reduce at 29.6 GB/s a node, with 164 us for the smallest message."""
    speed = network_speed(EFA, 4, 32, "all-reduce")
    assert speed.stands_in is None
    assert speed.bytes_per_second == pytest.approx(29.6e9)
    assert speed.alpha_seconds == pytest.approx(164e-6)
    assert network_notes(EFA, 4, 32, ["all-reduce"]) == []


def test_an_unmeasured_collective_has_the_slowest_part_of_its_network_and_says_so() -> None:
    """First of the same network and collective, then of those with RDMA, scaled to its network."""
    same = network_speed(NDR, 2, 16, "reduce-scatter")
    assert same.bytes_per_second == pytest.approx(280e9)
    other = network_speed(NodeNetwork(1600, rdma=True), 2, 16, "all-gather")
    assert other.bytes_per_second == pytest.approx(100e9)
    assert other.stands_in == "all-gather on 256 GPUs of 32 nodes, 3200 Gb/s with RDMA"
    slow = network_speed(NodeNetwork(25, rdma=False), 2, 4, "all-gather")
    assert slow.bytes_per_second == pytest.approx(1e9)
    (note,) = network_notes(NodeNetwork(25, rdma=False), 2, 4, ["all-gather"])
    assert note == (
        "all-gather on 4 GPUs of 2 nodes by 25 Gb/s without RDMA is timed as all-reduce on 32 GPUs "
        "of 4 nodes, 100 Gb/s without RDMA: 1 GB/s a node"
    )


def test_a_network_that_bypasses_the_host_without_rdma_is_no_measured_one() -> None:
    """A3 High has the Gb/s of the A100 that reduced over RoCE, but its GPUDirect-TCPX is TCP.

    Its own all-gather was measured, which says nothing of TCP by the host.
    """
    (a3,) = {
        links_of(o).network for o in CATALOG.offers("H100-SXM") if o.instance == "a3-highgpu-8g"
    }
    assert a3 == NodeNetwork(800, rdma=False)
    (note,) = network_notes(a3, 2, 16, ["all-reduce"])
    assert note.endswith(
        "is timed as all-reduce on 32 GPUs of 4 nodes, 100 Gb/s without RDMA: 32 GB/s a node"
    )
    assert network_notes(a3, 2, 16, ["all-gather"]) == []
    assert network_speed(TCP, 2, 16, "all-gather").bytes_per_second == pytest.approx(4e9)
    # The start of a collective without RDMA is none with it.
    assert network_speed(NDR, 2, 16, "all-gather").alpha_seconds == pytest.approx(164e-6)


def test_an_unknown_network_is_as_slow_as_the_slowest_measured() -> None:
    """It is 4 GB/s over TCP."""
    speed = network_speed(None, 2, 16, "all-gather")
    assert speed.bytes_per_second == network_speed(TCP, 4, 32, "all-reduce").bytes_per_second
    (note,) = network_notes(None, 2, 16, ["all-gather", "reduce-scatter"])
    assert note.startswith("all-gather and reduce-scatter on 16 GPUs of 2 nodes by an unknown ")
    assert "network are timed as all-reduce on 32 GPUs of 4 nodes" in note
