"""Speeds of collectives within a node: what was measured, and what stands in for the rest."""

import pytest
from pydantic import ValidationError

from gpu_catalog.catalog import load_catalog, shipped_rows
from gpu_catalog.gpu import Interconnect
from gpu_catalog.links.within_nodes import (
    FILE,
    CollectiveName,
    Link,
    LinkSpeed,
    MeasuredLink,
    link_notes,
    link_speed,
)

CATALOG = load_catalog()
LINKS = shipped_rows(Link, FILE)


def test_every_link_is_there_once_with_a_public_source() -> None:
    """Two rows of one link would leave open which is meant."""
    names = [(link.interconnect, link.gpus, link.collective) for link in LINKS]
    assert len(names) == len(set(names))
    assert all("vidur" in link.source or "github.com" in link.source for link in LINKS)


def test_switched_gpus_are_measured_on_two_four_and_eight() -> None:
    """Each number of GPUs has its own row, so that two are not timed as eight."""
    for interconnect in ("nvlink-switch-3", "nvlink-switch-4"):
        rows = [r for r in LINKS if (r.interconnect, r.collective) == (interconnect, "all-reduce")]
        assert [row.gpus for row in rows] == [2, 4, 8]
        assert all(link_speed(interconnect, n, "all-reduce").stands_in is None for n in (2, 4, 8))


def test_the_first_bytes_have_their_own_bandwidth() -> None:
    """The rest has that of large messages, and the time has no step between them."""
    speed = LinkSpeed(
        alpha_seconds=1.0, small_bytes=100, small_bytes_per_second=10, bytes_per_second=50
    )
    assert speed.seconds("all-gather", 2, 0) == 1.0
    assert speed.seconds("all-gather", 2, 100) == 1.0 + 50 / 10
    assert speed.seconds("all-reduce", 2, 100) == 1.0 + 100 / 10
    assert speed.seconds("all-reduce", 2, 600) == 1.0 + 100 / 10 + 500 / 50
    assert LinkSpeed(alpha_seconds=1.0, bytes_per_second=50).seconds("all-reduce", 2, 600) == 13.0


def test_the_two_numbers_of_a_break_are_given_together() -> None:
    """One without the other says nothing; files from before breaks have neither."""
    row = {"gpu": "A40", "gpus": 2, "collective": "all-reduce", "alpha_us": 40.0}
    former = MeasuredLink.model_validate({**row, "bus_gb_per_second": 11.0})
    assert former.speed(former.alpha_us).seconds("all-reduce", 2, 11e9) == pytest.approx(1.00004)
    with pytest.raises(ValidationError, match="together or not at all"):
        MeasuredLink.model_validate({**row, "bus_gb_per_second": 11.0, "small_mb": 2.0})


@pytest.mark.parametrize(
    ("interconnect", "gpus", "collective", "stands_in"),
    [
        ("nvlink-switch-4", 8, "all-gather", None),
        ("nvlink-switch-4", 2, "all-gather", "all-reduce on 2 GPUs by nvlink-switch-4"),
        ("nvlink-switch-4", 4, "reduce-scatter", "all-reduce on 4 GPUs by nvlink-switch-4"),
        ("nvlink-switch-4", 3, "all-reduce", "all-reduce on 2 GPUs by nvlink-switch-4"),
        ("nvlink-switch-4", 16, "all-reduce", "all-reduce on 8 GPUs by nvlink-switch-4"),
        ("nvlink-switch-4", 16, "all-gather", "all-gather on 8 GPUs by nvlink-switch-4"),
        ("nvlink-switch-5", 8, "all-gather", "all-gather on 8 GPUs by nvlink-switch-4"),
        ("nvlink-switch-5", 8, "all-reduce", "all-reduce on 8 GPUs by nvlink-switch-4"),
        ("nvlink-switch-5", 2, "all-gather", "all-reduce on 2 GPUs by nvlink-switch-4"),
        ("pcie3", 8, "all-reduce", "all-reduce on 4 GPUs by pcie4"),
        ("pcie5", 2, "all-gather", "all-reduce on 4 GPUs by pcie5"),
        ("nvlink-mesh-2", 8, "all-reduce", "all-reduce on 4 GPUs by pcie4"),
    ],
)
def test_the_nearest_link_of_its_class_stands_in(
    interconnect: Interconnect, gpus: int, collective: CollectiveName, stands_in: str | None
) -> None:
    """By generation, number of GPUs, collective; of equally near ones, or of all, the slowest."""
    assert link_speed(interconnect, gpus, collective).stands_in == stands_in


def test_a_row_without_a_start_takes_that_of_the_nearest_link() -> None:
    """The all-gather of eight H100 starts as their all-reduce, not as that of slower links."""
    reduce = link_speed("nvlink-switch-4", 8, "all-reduce")
    assert link_speed("nvlink-switch-4", 8, "all-gather").alpha_seconds == reduce.alpha_seconds


def test_bridged_pairs_are_fast_on_two_gpus_alone() -> None:
    """Beyond two, a ring leaves the bridge."""
    for interconnect, most in (("nvlink-pair-3", 30e9), ("nvlink-pair-4", 60e9)):
        pair = link_speed(interconnect, 2, "all-reduce")
        assert pair.stands_in is None
        assert pair.bytes_per_second > 150e9
        assert link_speed(interconnect, 2, "all-gather").bytes_per_second == pair.bytes_per_second
        for gpus in (4, 8):
            assert link_speed(interconnect, gpus, "all-reduce").bytes_per_second < most
    assert link_notes("A100-80GB-PCIe", "nvlink-pair-3", 2, ["all-reduce"]) == []
    assert link_notes("A100-80GB-PCIe", "nvlink-pair-3", 8, ["all-reduce"]) == [
        "all-reduce by nvlink-pair-3 is timed as all-reduce on 4 GPUs by nvlink-pair-3: 23.7 GB/s"
    ]


def test_gpus_that_are_alone_in_a_node_have_no_link() -> None:
    """Of several, the estimate says that no node has them, and takes the slowest link."""
    alone = CATALOG.gpu("GH200-96GB")
    assert {offer.gpus_per_instance for offer in CATALOG.offers(alone.key)} == {1}
    (note,) = link_notes(alone.key, alone.interconnect, 2, ["all-reduce"])
    assert note.startswith("all-reduce between GH200-96GB, of which a node has one, is timed as ")
    assert note.endswith("on 4 GPUs by pcie4: 20 GB/s")


def test_every_interconnect_has_its_source_and_date() -> None:
    """In the row of its GPU."""
    for gpu in CATALOG.gpus:
        assert ("; interconnect: " in gpu.source) == (gpu.interconnect is not None), gpu.key
