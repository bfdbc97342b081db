"""One dated price."""

import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Offer(BaseModel):
    """Stub until the real one lands."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    gpu: str
    provider: str
    region: str
    instance: str
    gpus_per_instance: int = 1
    usd_per_hour: float
    market: Literal["on-demand", "spot"] = "on-demand"
    as_of: datetime.date | None = None
    recorded: datetime.date
    source: str
    note: str | None = None
