"""Rates that kernels reach, fitted to published kernel times by ``make kernel-constants``."""

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated

from pydantic import Field

from gpu_catalog.catalog import UnknownGpuError, csv_rows, load_catalog, parse_rows, shipped_text
from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record

FILE = "kernel_rates.csv"
SHARED = "all"  # in place of a GPU, for a number that all share
# GPUs whose tensor cores add in fp32 at half their rate have twice their fp32 rate in bf16; other
# GPUs have four times and more. Fractions of the peak differ between the two kinds.
MOST_OF_HALF_RATE = 3.0
LEAST_ROWS = 10  # to which a number is fitted that GPUs without one get
# Quantities that depend on the kind of memory, which is HBM at these compute capabilities.
OF_MEMORY = frozenset({"moving_reached", "product_bandwidth"})
HBM = frozenset({"6.0", "7.0", "8.0", "9.0", "10.0", "10.3"})


class KernelRate(Record):
    """One fitted number.

    Attributes:
        gpu: key of the measured GPU, or ``all``.
        group: GPUs like it: compute capability, and ``half`` or ``full`` rate of accumulation; for
            the bandwidth, the kind of memory.
        quantity: name of the number.
        unit: unit of the value; ``1`` for a fraction of a peak rate.
        standard_error: of the value, from the scatter of the rows it is fitted to.
        rows: number of these.
        source: repositories that published them.
    """

    gpu: str
    group: str
    quantity: str
    value: Annotated[float, Field(gt=0)]
    unit: str
    standard_error: Annotated[float, Field(ge=0)]
    rows: Annotated[int, Field(gt=0)]
    source: str


def group_of(gpu: Gpu) -> str:
    """Group of GPUs whose kernels reach like fractions of their peaks."""
    bf16 = gpu.bf16_dense_tflops or gpu.fp16_dense_tflops or math.inf
    is_half = bf16 < MOST_OF_HALF_RATE * (gpu.fp32_tflops or 0.0)
    return f"{gpu.compute_capability} {'half' if is_half else 'full'}"


def memory_of(gpu: Gpu) -> str:
    """Kind of memory of a GPU."""
    return "HBM" if gpu.compute_capability in HBM else "GDDR"


def rates_of(gpu: Gpu) -> Mapping[str, float]:
    """Numbers of a GPU and those that all share, by quantity.

    A GPU without measurements gets the geometric mean of those of its group; without any, of the
    GPUs with its rate of accumulation; without these, of all. Numbers that are fitted to few rows
    are those of their GPU alone. A GPU of the catalog under another key, as with another memory,
    has its own numbers: its device names identify it.
    """
    key = _measured_key(gpu.key, gpu.device_names)
    return _rates(key, group_of(gpu), memory_of(gpu))


def group_for(quantity: str, gpu: Gpu) -> str:
    """Group of GPUs that share a quantity."""
    return memory_of(gpu) if quantity in OF_MEMORY else group_of(gpu)


def has_own_products(gpu: Gpu) -> bool:
    """Whether matrix products in 16 bits were measured on this GPU."""
    key = _measured_key(gpu.key, gpu.device_names)
    return any(row.gpu == key and row.quantity == "product_sustained" for row in kernel_rates())


@cache
def _measured_key(key: str, device_names: tuple[str, ...]) -> str:
    """Key of the shipped catalog for a GPU with these device names, else its own."""
    for name in device_names:
        with suppress(UnknownGpuError):
            return load_catalog().gpu_by_device_name(name).key
    return key


@cache
def _rates(key: str, group: str, memory: str) -> Mapping[str, float]:
    rows = kernel_rates()
    groups = {row.quantity: memory if row.quantity in OF_MEMORY else group for row in rows}
    return {name: nearest_rate(rows, name, key, own) for name, own in groups.items()}


def nearest_rate(rows: tuple[KernelRate, ...], quantity: str, key: str, group: str) -> float:
    """Value of a quantity for a GPU, as ``rates_of`` chooses it among the rows."""
    own = [row for row in rows if row.quantity == quantity]
    siblings = [row for row in own if row.rows >= LEAST_ROWS]
    kind = group.rpartition(" ")[2]
    for like in (
        [row for row in own if row.gpu == key],
        [row for row in own if row.gpu == SHARED],
        [row for row in siblings if row.group == group],
        [row for row in siblings if row.group.endswith(kind)],
    ):
        if like:
            own = like
            break
    return math.exp(sum(math.log(row.value) for row in own) / len(own))


@cache
def kernel_rates() -> tuple[KernelRate, ...]:
    """All rows of the shipped table."""
    rows, mistakes = parse_rows(KernelRate, csv_rows(shipped_text(FILE)), str)
    assert not mistakes, mistakes
    return tuple(rows)
