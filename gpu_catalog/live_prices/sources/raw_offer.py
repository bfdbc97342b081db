"""Interface of price sources, and a price as a source states it."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_catalog.offer import Market


class SourceError(RuntimeError):
    """A source did not answer; one line says why and what to do. The text holds no secret."""


@dataclass(frozen=True, slots=True)
class RawOffer:
    """A price as a source states it, unchecked.

    Attributes:
        provider: this project's name of the provider; region and instance are the provider's names.
        price: price of the whole instance per hour, a number or text; None if not stated.
        gpu_name: the source's name of the GPU.
        gpu_memory_gib: memory of one GPU as stated; the unit may be wrong.
        host_memory_gib: memory of the instance's host as stated; None if not stated.
        source: source of the price; begins with ``PriceSource.name``.
        first_hand: whether the provider itself states the price, not a catalog of several.
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
    host_memory_gib: float | None = None
    as_of: dt.date | None = None
    first_hand: bool = False
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SourceReply:
    """Reply of a source.

    Attributes:
        warnings: a line for each part of the prices that is missing.
        regions_apart: whether each region was asked separately. If so, a region without prices was
            not asked or did not answer; else it has nothing to rent.
    """

    offers: Sequence[RawOffer]
    warnings: Sequence[str] = ()
    regions_apart: bool = False


class PriceSource(Protocol):
    """A source of prices.

    Attributes:
        name: name on the command line and at the beginning of ``Offer.source``.
    """

    name: str

    def fetch(self) -> SourceReply:
        """Fetch all prices.

        Raises:
            SourceError: the source is missing or does not answer.
        """
