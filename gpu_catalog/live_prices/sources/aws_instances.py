"""Amazon's instances with GPUs that the catalog has: a table, checked against the real ones."""

import csv
import io
from dataclasses import dataclass
from functools import cache

from gpu_catalog.catalog import shipped_text

AWS = "aws"
# Linux is billed by the second, at least for a minute (Amazon EC2 on-demand pricing).
MINIMUM_MINUTES = 1.0
GPU_FAMILY = "GPU instance"  # what Amazon calls the family of them in price lists
# Of all that is priced for an instance, what a job rents: attributes by their names in price lists.
RENTED = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "preInstalledSw": "NA",
}


@dataclass(frozen=True, slots=True)
class AwsInstance:
    """An instance type: its GPU in the catalog, and how many it has."""

    gpu: str
    gpus: int


def gpus_of(name: str, stated: str) -> int:
    """How many GPUs an instance has: as stated, else as the table has it, else none."""
    try:
        told = int(float(stated))
    except ValueError:
        told = 0
    known = aws_instances().get(name)
    return told if told or known is None else known.gpus


@cache
def aws_instances() -> dict[str, AwsInstance]:
    """The instance types by name."""
    rows = csv.DictReader(io.StringIO(shipped_text("aws_instances.csv", "gpu_catalog.live_prices")))
    return {row["instance"]: AwsInstance(row["gpu"], int(row["gpus"])) for row in rows}
