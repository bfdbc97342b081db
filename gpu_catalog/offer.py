"""One dated price of one instance."""

import datetime as dt
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.gpu import Positive, Source
from gpu_catalog.record import Record

Text = Annotated[str, Field(min_length=1)]
Market = Literal["on-demand", "spot"]
Identity = tuple[str, str, str, str, int, str]


class Offer(Record):
    """What renting an instance costs.

    Attributes:
        gpu: key of its GPU in the catalog.
        provider: who rents it out; ``own`` for a GPU one has.
        region: where, in the provider's own words.
        instance: the provider's name for it.
        gpus_per_instance: GPUs it has; a job that uses one pays for all.
        usd_per_hour: price of the whole instance, US dollars.
        market: on demand, or spot: cheaper, and taken away when others pay more.
        minimum_minutes: the least that is billed for; absent where that is not known.
        as_of: when the price held; absent where the source does not say.
        recorded: when it was written down here.
        source: where it comes from.
        note: what else a reader must know.
    """

    gpu: Text
    provider: Text
    region: Text
    instance: Text
    gpus_per_instance: Annotated[int, Field(ge=1)] = 1
    usd_per_hour: Positive
    market: Market = "on-demand"
    minimum_minutes: Positive | None = None
    as_of: dt.date | None = None
    recorded: dt.date
    source: Source
    note: str | None = None

    @property
    def usd_per_gpu_hour(self) -> float:
        """Price for each GPU of the instance, US dollars: to compare by, not what is paid."""
        return self.usd_per_hour / self.gpus_per_instance

    @property
    def date(self) -> dt.date:
        """The day the price is of, as far as that is known."""
        return self.as_of or self.recorded

    @property
    def identity(self) -> Identity:
        """What is rented: of two prices for it, one is wrong or out of date."""
        return (
            self.gpu,
            self.provider,
            self.region,
            self.instance,
            self.gpus_per_instance,
            self.market,
        )
