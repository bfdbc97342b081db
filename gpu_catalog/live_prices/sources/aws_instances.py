"""Amazon's instance types with GPUs of the catalog."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from gpu_catalog.catalog import csv_rows, shipped_text
from gpu_catalog.live_prices.sources.raw_offer import RawOffer

AWS = "aws"
GPU_FAMILY = "GPU instance"  # name of their family in price lists
# Attributes of the price, among several for an instance, that a job pays.
RENTED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
}


@dataclass(frozen=True, slots=True)
class AwsInstance:
    """An instance type: catalog key and number of its GPUs."""

    gpu: str
    gpus: int


def gpus_of(name: str, stated: str) -> int:
    """Number of GPUs of an instance: the stated one, else that of the table, else 0."""
    try:
        count = int(float(stated))
    except ValueError:
        count = 0
    instance = aws_instances().get(name)
    return count if count or instance is None else instance.gpus


def aws_offer(instance: str, **fields: Any) -> RawOffer:
    """Price of an instance, with the fields that all of Amazon's prices share."""
    return RawOffer(
        provider=AWS,
        instance=instance,
        gpu_name=instance,
        first_hand=True,
        **fields,
    )


@cache
def aws_instances() -> dict[str, AwsInstance]:
    """Instance types by name."""
    rows = csv_rows(shipped_text("aws_instances.csv", "gpu_catalog.live_prices"))
    return {row["instance"]: AwsInstance(row["gpu"], int(row["gpus"])) for row in rows}
