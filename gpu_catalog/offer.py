"""One dated price of one instance."""

import datetime as dt
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.gpu import Positive, Source
from gpu_catalog.record import Record

Text = Annotated[str, Field(min_length=1)]


class Offer(Record):
    """What renting an instance costs.

    Attributes:
        gpu: key of its GPU in the catalog.
        provider: who rents it out.
        region: where, in the provider's own words.
        instance: the provider's name for it.
        gpus_per_instance: GPUs it has; a job that uses one pays for all.
        usd_per_hour: price of the whole instance, US dollars.
        market: on demand, or spot: cheaper, and taken away when others pay more.
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
    market: Literal["on-demand", "spot"] = "on-demand"
    as_of: dt.date | None = None
    recorded: dt.date
    source: Source
    note: str | None = None
