"""Hardware facts of one exact GPU."""

import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Gpu(BaseModel):
    """Stub until the real one lands."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    key: str
    kind: Literal["cuda", "cpu"]
    device_names: tuple[str, ...] = ()
    memory_bandwidth_gb_per_second: float | None = None
    bf16_dense_tflops: float | None = None
    usable_memory_bytes: int | None = None
    source: str
    recorded: datetime.date
    note: str | None = None
