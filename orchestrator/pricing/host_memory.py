"""Memory of the hosts of instances, for trainings that keep a part of theirs there."""

import datetime as dt
from collections.abc import Iterable
from functools import cache

from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Positive, Source
from gpu_catalog.offer import Offer, Text
from gpu_catalog.record import Record

TABLE = "host_memory.csv"


class InstanceMemory(Record):
    """Memory of an instance's host, which is that of all its GPUs.

    Attributes:
        provider, instance: as in offers.
        host_memory_gib: the memory; the least, where it differs between regions.
        source: source of the figure.
        recorded: date of this record.
    """

    provider: Text
    instance: Text
    host_memory_gib: Positive
    source: Source
    recorded: dt.date


class TooLittleHostMemory(Record):
    """An instance whose host has less memory than a training keeps there.

    Attributes:
        provider, instance: as in offers.
        needed_gib: memory of the training's tensors on the host of a node.
        host_memory_gib: memory of the instance.
    """

    provider: str
    instance: str
    needed_gib: float
    host_memory_gib: float

    @property
    def text(self) -> str:
        """Both figures in a line."""
        return (
            f"{self.instance} ({self.provider}): the host holds {self.needed_gib:,.0f} GiB, the "
            f"instance has {self.host_memory_gib:,.0f} GiB"
        )


def host_memory_gib(offer: Offer) -> float | None:
    """Memory of an offer's host: its own figure, else the table's; None where unknown."""
    return offer.host_memory_gib or _memories().get((offer.provider, offer.instance))


@cache
def _memories() -> dict[tuple[str, str], float]:
    rows = shipped_rows(InstanceMemory, TABLE)
    return {(row.provider, row.instance): row.host_memory_gib for row in rows}


def by_host_memory(
    offers: Iterable[Offer], needed_gib: float | None
) -> tuple[list[Offer], list[TooLittleHostMemory]]:
    """Offers whose host may hold a training's part, and instances whose host cannot, each once.

    Args:
        offers: offers of instances with enough GPUs.
        needed_gib: memory that the training needs on each host; None for none.
    """
    enough: list[Offer] = []
    too_small: dict[TooLittleHostMemory, None] = {}
    for offer in offers:
        has = None if needed_gib is None else host_memory_gib(offer)
        if has is None or needed_gib is None or has >= needed_gib:
            enough.append(offer)
        else:
            small = TooLittleHostMemory(
                provider=offer.provider,
                instance=offer.instance,
                needed_gib=needed_gib,
                host_memory_gib=has,
            )
            too_small[small] = None
    return enough, list(too_small)


def largest_too_small(instances: Iterable[TooLittleHostMemory]) -> str:
    """Reason why none of some instances can be rented, by the one with the most memory."""
    largest = max(instances, key=lambda one: one.host_memory_gib)
    return f"no instance has enough host memory: {largest.text}"
