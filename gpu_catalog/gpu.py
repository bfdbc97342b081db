"""Hardware facts of one exact GPU. 40 and 80 GB, PCIe and SXM are different GPUs."""

import datetime as dt
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpu_catalog.record import Record


def _no_truth_value(value: object) -> object:
    # Python takes true for 1; a price or a rate of true is a slip of the pen.
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic's
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_truth_value)]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
Source = Annotated[str, Field(min_length=1)]


class Gpu(Record):
    """One GPU, or the CPU as a device. What is not known is absent.

    Attributes:
        key: exact name in this project, in offers, and of the Ray resource of a node that has it.
        kind: ``cuda``, or ``cpu`` for machines without a GPU.
        device_names: what the device reports itself as, to CUDA; exact.
        architecture: generation, for example Ampere.
        compute_capability: CUDA's, for example 8.6.
        multiprocessors: streaming multiprocessors of the product.
        marketed_memory_gb: the number on the box.
        usable_memory_bytes: what CUDA reports as total, the least observed; of a cpu, the budget
            that live tensors are counted against.
        memory_bandwidth_gb_per_second: peak, in 10^9 bytes.
        bf16_dense_tflops: peak of the tensor cores without sparsity, 10^12 per second; fp16_… and
            fp32_… alike (fp32 without tensor cores).
        tdp_watts: board power.
        ray_accelerator_type: Ray's label, which several GPUs share: no identity.
        source: where the facts come from.
        recorded: when they were written down here.
        note: what else a reader must know.
    """

    key: Key
    kind: Literal["cuda", "cpu"]
    device_names: tuple[str, ...] = ()
    architecture: str | None = None
    compute_capability: str | None = None
    multiprocessors: Annotated[int, Field(strict=True, gt=0)] | None = None
    marketed_memory_gb: Positive | None = None
    usable_memory_bytes: Annotated[int, Field(strict=True, gt=0)] | None = None
    memory_bandwidth_gb_per_second: Positive | None = None
    bf16_dense_tflops: Positive | None = None
    fp16_dense_tflops: Positive | None = None
    fp32_tflops: Positive | None = None
    tdp_watts: Positive | None = None
    ray_accelerator_type: str | None = None
    source: Source
    recorded: dt.date
    note: str | None = None

    @model_validator(mode="after")
    def _can_be_identified(self) -> Self:
        if self.kind == "cuda" and not self.device_names:
            raise ValueError(f"{self.key}: a cuda GPU needs device_names, as CUDA reports them")
        if self.kind == "cpu" and self.usable_memory_bytes is None:
            raise ValueError(
                f"{self.key}: a cpu needs usable_memory_bytes, the budget to measure to"
            )
        return self
