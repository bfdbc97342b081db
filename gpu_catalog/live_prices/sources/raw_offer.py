"""What every source of prices does, and a price as a source states it."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_catalog.offer import Market


class SourceError(RuntimeError):
    """A source did not answer; one line on why and what to do. Holds nothing secret."""


@dataclass(frozen=True, slots=True)
class RawOffer:
    """A price as a source states it: nothing in it is believed yet.

    Attributes:
        provider: in this project's words; region and instance are in the provider's own.
        gpus: GPUs of the instance.
        price: of the whole instance for an hour, as a number or as text; absent where none is told.
        gpu_name: what the source calls the GPU.
        gpu_memory_gib: of one GPU, as the source states it; its unit is not to be trusted.
        currency: of the price.
        host_cpus: of the instance; absent where the source does not say.
        minimum_minutes: the least that is billed for, where known.
        as_of: when the price held; absent where the source does not say.
        source: where it comes from; begins with the source's name.
        first_hand: told by who rents the instance out, not by a catalog of others' prices.
        note: what else a reader must know.
    """

    provider: str
    region: str
    instance: str
    gpus: int
    price: float | str | None
    market: Market
    source: str
    gpu_name: str | None = None
    gpu_memory_gib: float | None = None
    currency: str = "USD"
    host_cpus: float | None = None
    minimum_minutes: float | None = None
    as_of: dt.date | None = None
    first_hand: bool = False
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SourceReply:
    """What a source told.

    Attributes:
        offers: the prices.
        warnings: what it could not tell, a line each.
        regions_apart: each region is asked on its own: one without prices was not asked or did not
            answer. Else it has none to rent.
    """

    offers: Sequence[RawOffer]
    warnings: Sequence[str] = ()
    regions_apart: bool = False


class PriceSource(Protocol):
    """A source of prices."""

    @property
    def name(self) -> str:
        """What it is called on the command line and at the beginning of ``Offer.source``."""
        ...

    def fetch(self) -> SourceReply:
        """Asks it.

        Raises:
            SourceError: it is not there, or does not answer.
        """
        ...
