"""Time of collectives on several nodes: their groups, links and overlap."""

import numpy as np
import pytest

from gpu_catalog.catalog import load_catalog
from gpu_catalog.links.between_nodes import NodeNetwork, network_speed
from gpu_catalog.links.within_nodes import link_speed
from trials.recipes.parallel import Parallel
from trials.simulation.ranks.rank_links import Group, collective_speed, layout_notes
from trials.simulation.ranks.rank_timeline import (
    BETWEEN,
    WITHIN,
    collective_seconds,
    links_of,
    rank_seconds,
)
from trials.simulation.ranks.stream_events import Action, StreamEvent
from trials.simulation.recording import Collective, Column

H100 = load_catalog().gpu("H100-SXM")
NDR = NodeNetwork(3200, rdma=True)
HSDP = Parallel(
    gpus=16, strategy="hsdp", replicas=2, nodes=2, node_network_gbps=NDR.gbps, rdma=True
)
SWITCH = H100.interconnect


@pytest.mark.parametrize(
    ("group", "nodes"),
    [
        (Group(8, 1), 1),
        (Group(8, 1, 8), 1),
        (Group(16, 1, 8), 2),
        (Group(2, 8, 8), 2),
        (Group(4, 4, 8), 2),
        (Group(4, 16, 8), 4),
    ],
)
def test_a_group_is_on_the_nodes_of_its_ranks(group: Group, nodes: int) -> None:
    """Ranks are numbered node by node."""
    assert group.nodes == nodes


def test_gpus_of_a_node_share_its_network() -> None:
    """One GPU of eight has an eighth; all have it whole, up to the link between them (A100)."""
    whole = network_speed(NDR, 4, 32, "all-reduce").bytes_per_second
    assert collective_speed(
        Group(4, 8, 8), "all-reduce", SWITCH, NDR
    ).bytes_per_second == pytest.approx(whole / 8)
    within = link_speed("nvlink-switch-3", 8, "all-reduce").bytes_per_second
    assert within < whole < link_speed(SWITCH, 8, "all-reduce").bytes_per_second
    for interconnect, reached in (("nvlink-switch-3", within), (SWITCH, whole)):
        every = collective_speed(Group(32, 1, 8), "all-reduce", interconnect, NDR)
        assert every.bytes_per_second == reached
    assert collective_speed(Group(8, 1, 8), "all-reduce", SWITCH, NDR) == link_speed(
        SWITCH, 8, "all-reduce"
    )


def test_a_gpu_alone_on_its_node_exchanges_no_more_than_its_part_of_the_network() -> None:
    """Two nodes together reduce at more than that, since a tree sends less between them."""
    assert network_speed(NDR, 2, 16, "all-reduce").bytes_per_second > NDR.bytes_per_second
    alone = collective_speed(Group(2, 8, 8), "all-reduce", SWITCH, NDR)
    assert alone.bytes_per_second == NDR.bytes_per_second / 8


def numbers(*groups: tuple[int, int]) -> np.ndarray:
    """Numbers of collectives of a gigabyte in groups of so many ranks at these distances."""
    rows = np.zeros((len(groups), len(Column)))
    rows[:, Column.BYTES] = 1e9
    rows[:, [Column.PRODUCTS, Column.COLUMNS]] = groups
    return rows


def test_shards_of_a_node_stay_on_its_switch_and_copies_cross_the_network() -> None:
    """An all-reduce of two moves its bytes once; an all-gather of eight seven eighths."""
    kinds = np.array([Collective.ALL_GATHER, Collective.ALL_REDUCE])
    moved = numbers((8, 1), (2, 8))
    assert links_of(kinds, moved, HSDP).tolist() == [WITHIN, BETWEEN]
    assert links_of(kinds, moved, None).tolist() == [WITHIN, WITHIN]
    gather, reduce = collective_seconds(kinds, moved, H100, HSDP)
    switch = link_speed(SWITCH, 8, "all-gather")
    assert gather == pytest.approx(switch.alpha_seconds + 7 / 8 * 1e9 / switch.bytes_per_second)
    network = network_speed(NDR, 2, 16, "all-reduce")
    assert reduce == pytest.approx(network.alpha_seconds + 8e9 / NDR.bytes_per_second)


def test_links_work_at_the_same_time_and_each_does_one_collective_after_another() -> None:
    """Two of a second each on one link take two, on two links one."""
    run = [StreamEvent(Action.RUN, number).number for number in (2, 3)]
    streams = np.array([run[0], 0, run[1], 0])
    nothing = np.zeros(4)
    device = np.array([0.0, 1.0, 0.0, 1.0])
    waits = np.zeros(0, np.int64)
    same, other = np.array([0, WITHIN, 0, WITHIN]), np.array([0, WITHIN, 0, BETWEEN])
    assert rank_seconds(nothing, device, same, streams, waits) == 2.0
    assert rank_seconds(nothing, device, other, streams, waits) == 1.0


def test_notes_name_the_links_that_stand_in() -> None:
    """The switch and the sum over two nodes were measured; that over four was not."""
    assert layout_notes(H100, HSDP) == []
    four = HSDP.model_copy(update={"gpus": 32, "nodes": 4, "replicas": 4})
    (note,) = layout_notes(H100, four)
    assert note.startswith("all-reduce on 32 GPUs of 4 nodes by 3200 Gb/s with RDMA is timed as ")
    (alone,) = layout_notes(H100, Parallel(gpus=16, strategy="ddp"))
    assert alone.startswith("all-reduce by nvlink-switch-4 is timed as all-reduce on 8 GPUs ")
