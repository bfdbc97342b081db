"""Memory of the hosts of instances, for trainings that keep a part of theirs there."""

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Positive, Source
from gpu_catalog.number_text import short
from gpu_catalog.offer import Offer, Text
from gpu_catalog.record import Record

TABLE = "host_memory.csv"
NOT_IN_IT = (
    "tensors alone, pinned ones at the next power of two. Python and CUDA take some GiB more for "
    "each GPU; the page cache, and a checkpoint that every process loads whole, come on top"
)
"""What the memory of a training on its host is, and what is not in it."""


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
        needed, has = (short(gib, 4) for gib in (self.needed_gib, self.host_memory_gib))
        return (
            f"{self.instance} ({self.provider}): the host holds {needed} GiB, the instance has "
            f"{has} GiB"
        )


def host_memory_gib(offer: Offer) -> float | None:
    """Memory of an offer's host: its own figure, else the table's; None where unknown."""
    return offer.host_memory_gib or instance_memory_gib(offer.provider, offer.instance)


def instance_memory_gib(provider: str, instance: str) -> float | None:
    """Memory of the host of an instance; None where unknown."""
    return _memories().get((provider, instance))


@cache
def _memories() -> dict[tuple[str, str], float]:
    rows = shipped_rows(InstanceMemory, TABLE)
    return {(row.provider, row.instance): row.host_memory_gib for row in rows}


OffersByHost = tuple[list[Offer], dict[Offer, TooLittleHostMemory]]
"""Offers whose host may hold a training's part, and those whose host cannot, with the reason."""


def by_host_memory(offers: Iterable[Offer], needed_gib: float | None) -> OffersByHost:
    """Divide offers by the memory of their hosts.

    Args:
        offers: offers of instances with enough GPUs.
        needed_gib: memory that the training needs on each host; None for none.
    """
    enough: list[Offer] = []
    too_small: dict[Offer, TooLittleHostMemory] = {}
    for offer in offers:
        has = None if needed_gib is None else host_memory_gib(offer)
        if has is None or needed_gib is None or has >= needed_gib:
            enough.append(offer)
        else:
            too_small[offer] = TooLittleHostMemory(
                provider=offer.provider,
                instance=offer.instance,
                needed_gib=needed_gib,
                host_memory_gib=has,
            )
    return enough, too_small


def allowed_instances(
    too_small: Mapping[Offer, TooLittleHostMemory], allows: Callable[[Offer], bool]
) -> tuple[TooLittleHostMemory, ...]:
    """Instances with too little memory that would be allowed otherwise, the largest last."""
    allowed = {small for offer, small in too_small.items() if allows(offer)}
    return tuple(sorted(allowed, key=lambda one: (one.host_memory_gib, one.text)))


def none_has_enough(too_small: Sequence[TooLittleHostMemory]) -> str:
    """Reason why no instance can be rented, by the one with the most memory."""
    return f"no instance has enough host memory: {too_small[-1].text}"
