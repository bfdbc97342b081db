"""A dated price of an instance."""

import datetime as dt
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.gpu import Positive, Source
from gpu_catalog.record import Record

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^\w[\w .,:()/+@-]*$", max_length=200)]
"""Names of providers, regions and instances: they become words of commands, keys and labels."""
Market = Literal["on-demand", "spot"]
Identity = tuple[str, str, str, str, int, str]
# Fields that a record of a rental repeats, in its order.
TERMS = ("provider", "instance", "region", "market", "gpus_per_instance", "usd_per_hour")


class Offer(Record):
    """Rental price of an instance.

    Attributes:
        gpu: catalog key of the GPU.
        provider: name of the provider; ``own`` for the user's own GPU.
        region: the provider's name of the region.
        instance: the provider's name of the instance.
        gpus_per_instance: number of GPUs; a job that uses one pays for all.
        usd_per_hour: price of the whole instance in US dollars per hour.
        market: on demand, or spot: cheaper, but the provider may reclaim the instance.
        minimum_minutes: shortest billed time, where it is not that of the provider's terms.
        host_memory_gib: memory of the instance's host, where it is not in the catalog's table.
        as_of: date of the price, if the source states one; else the earliest possible date, where
            one is inferred and the note says so.
        recorded: date of this record.
        source: source of the price.
        note: caveats.
    """

    gpu: Text
    provider: Name
    region: Name
    instance: Name
    gpus_per_instance: Annotated[int, Field(ge=1)] = 1
    usd_per_hour: Positive
    market: Market = "on-demand"
    minimum_minutes: Positive | None = None
    host_memory_gib: Positive | None = None
    as_of: dt.date | None = None
    recorded: dt.date
    source: Source
    note: str | None = None

    @property
    def usd_per_gpu_hour(self) -> float:
        """US dollars per GPU and hour, for comparison; the bill is for the whole instance."""
        return self.usd_per_hour / self.gpus_per_instance

    @property
    def date(self) -> dt.date:
        """Date of the price, or of the record if none is known."""
        return self.as_of or self.recorded

    @property
    def identity(self) -> Identity:
        """Fields that identify the instance and market; two prices of one identity conflict."""
        return (
            self.gpu,
            self.provider,
            self.region,
            self.instance,
            self.gpus_per_instance,
            self.market,
        )
