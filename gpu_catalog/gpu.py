"""Hardware facts of a GPU. The 40 and 80 GB, PCIe and SXM variants are different GPUs."""

import datetime as dt
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpu_catalog.record import Record


def _no_truth_value(value: object) -> object:
    # Python takes True for 1; a price or a rate of true is a mistake.
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic's
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_truth_value)]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
Interconnect = Literal[
    "nvlink-switch-3",
    "nvlink-switch-4",
    "nvlink-switch-5",
    "nvlink-mesh-2",
    "nvlink-pair-3",
    "nvlink-pair-4",
    "pcie3",
    "pcie4",
    "pcie5",
    "none",
]
Source = Annotated[str, Field(min_length=1)]


class Gpu(Record):
    """A GPU, or the CPU as a device. Leave out facts that are unknown.

    Attributes:
        key: name of the GPU in this project and in offers; also the Ray resource of its nodes.
        kind: ``cuda``; ``rocm`` for AMD GPUs, which have memory and prices but no modelled times;
            or ``cpu`` for machines without a GPU.
        device_names: exact names that CUDA or ROCm reports for the device; required for GPUs.
        architecture: generation, for example Ampere.
        compute_capability: CUDA compute capability, for example 8.6.
        multiprocessors: number of streaming multiprocessors.
        marketed_memory_gb: memory in the product name.
        usable_memory_bytes: smallest total that CUDA was observed to report; for ``cpu``, the
            memory budget of live tensors, which is required.
        memory_bandwidth_gb_per_second: peak bandwidth, in 10^9 bytes per second.
        bf16_dense_tflops: peak rate in bf16 without sparsity, in 10^12 operations per second.
        fp16_dense_tflops: the same in fp16.
        fp32_tflops: peak rate in fp32 without tensor cores, in 10^12 operations per second.
        interconnect: link between the GPUs of a node, with the generation of NVLink or PCIe;
            ``nvlink-pair`` where bridges join two cards each, ``none`` where a node has one GPU;
            absent where it is unknown. Cards that a bridge may join have their PCIe.
        tdp_watts: board power.
        ray_accelerator_type: Ray's name of the type; several GPUs of the catalog may share it.
        source: source of the facts.
        recorded: date of this record.
        note: caveats.
    """

    key: Key
    kind: Literal["cuda", "cpu", "rocm"]
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
    interconnect: Interconnect | None = None
    tdp_watts: Positive | None = None
    ray_accelerator_type: str | None = None
    source: Source
    recorded: dt.date
    note: str | None = None

    @model_validator(mode="after")
    def _can_be_identified(self) -> Self:
        if self.kind != "cpu" and not self.device_names:
            raise ValueError(
                f"{self.key}: a {self.kind} GPU needs device_names, as PyTorch reports them"
            )
        if self.kind == "cpu" and self.usable_memory_bytes is None:
            raise ValueError(
                f"{self.key}: a cpu needs usable_memory_bytes, the budget to measure to"
            )
        return self
