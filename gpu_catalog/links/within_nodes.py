"""Speed of collectives between the GPUs of a node, by their interconnect.

A collective on n GPUs with a buffer of S bytes takes ``alpha + f * S / bandwidth`` seconds, where f
is (n - 1) / n for an all-gather and a reduce-scatter, and twice that for an all-reduce. So the
bandwidth is nccl-tests' "busbw" (its PERFORMANCE.md).
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Gpu, Interconnect, Positive, Source
from gpu_catalog.record import Record

CollectiveName = Literal["all-gather", "reduce-scatter", "all-reduce"]
FILE = "links.csv"


class Link(Record):
    """Measured speed of one collective.

    Attributes:
        interconnect: link between the GPUs.
        gpus: GPUs that took part.
        collective: the collective.
        alpha_us: time of the smallest message, in microseconds; absent where only large messages
            were measured.
        bus_gb_per_second: bus bandwidth of large messages, in 10^9 bytes per second.
        source: source of the figures.
        recorded: date of this record.
    """

    interconnect: Interconnect
    gpus: Annotated[int, Field(ge=2)]
    collective: CollectiveName
    alpha_us: Positive | None = None
    bus_gb_per_second: Positive
    source: Source
    recorded: dt.date


class MeasuredLink(Record):
    """Speed of one collective among GPUs of one node, as a user measured it.

    Attributes:
        gpu: key of the GPUs.
        gpus: GPUs that took part.
        collective: the collective.
        alpha_us: time of the smallest message, in microseconds.
        bus_gb_per_second: bus bandwidth of large messages, in 10^9 bytes per second.
    """

    gpu: str
    gpus: Annotated[int, Field(ge=2)]
    collective: CollectiveName
    alpha_us: Annotated[float, Field(ge=0)]
    bus_gb_per_second: Positive


class LinkSpeed(Record):
    """Speed that a simulation takes for one collective.

    Attributes:
        alpha_seconds: time of the smallest message.
        bytes_per_second: bus bandwidth.
        stands_in: measured link whose bandwidth this is, where the one in question was not
            measured; absent where it was.
    """

    alpha_seconds: float
    bytes_per_second: float
    stands_in: str | None = None

    def seconds(self, collective: CollectiveName, gpus: int, buffer_bytes: float) -> float:
        """Seconds of a collective, by the equation above."""
        moved = moved_share(collective, gpus) * buffer_bytes
        return self.alpha_seconds + moved / self.bytes_per_second


def moved_share(collective: CollectiveName, gpus: int) -> float:
    """Bytes that a collective moves over a link, over those of its buffer: f in the equation."""
    passes = 2 if collective == "all-reduce" else 1
    return passes * (gpus - 1) / gpus


@cache
def link_speed(
    interconnect: Interconnect | None, gpus: int, collective: CollectiveName
) -> LinkSpeed:
    """Speed of a collective: as measured, or else the slowest of the nearest links measured.

    The nearest are those of the same interconnect and collective, then of the same interconnect,
    then of its class (``nvlink-switch``), then all.
    """
    links = shipped_rows(Link, FILE)
    same = [link for link in links if link.interconnect == interconnect]
    of_class = [link for link in links if _class_of(link.interconnect) == _class_of(interconnect)]
    like = [link for link in same if link.collective == collective]
    exact = [link for link in like if link.gpus == gpus]
    nearest: Sequence[Link] = exact or like or same or of_class or links
    slowest = min(nearest, key=lambda link: link.bus_gb_per_second)
    text = f"{slowest.collective} on {slowest.gpus} GPUs by {slowest.interconnect}"
    return LinkSpeed(
        alpha_seconds=1e-6 * max(link.alpha_us or 0.0 for link in _with_alpha(nearest, links)),
        bytes_per_second=1e9 * slowest.bus_gb_per_second,
        stands_in=None if exact else text,
    )


def _with_alpha(nearest: Sequence[Link], links: Sequence[Link]) -> Sequence[Link]:
    return [link for link in nearest if link.alpha_us] or links


def _class_of(interconnect: Interconnect | None) -> str:
    return (interconnect or "").rstrip("0123456789-")


def link_notes(gpu: Gpu, gpus: int, collectives: Sequence[CollectiveName]) -> list[str]:
    """Collectives whose speed on a GPU was not measured, and what stands in for it."""
    link = gpu.interconnect or "a link that the catalog does not have"
    speeds = {name: link_speed(gpu.interconnect, gpus, name) for name in collectives}
    return stand_in_notes(speeds, f"by {link}", "GB/s")


def stand_in_notes(speeds: Mapping[CollectiveName, LinkSpeed], where: str, unit: str) -> list[str]:
    """A line for each speed that stands in for those of collectives that were not measured.

    Args:
        speeds: speed of each collective.
        where: link and GPUs that they take.
        unit: unit of the speeds.
    """
    names: dict[str, list[str]] = {}
    for name, speed in speeds.items():
        if speed.stands_in is not None:
            text = f"{speed.stands_in}: {speed.bytes_per_second / 1e9:g} {unit}"
            names.setdefault(text, []).append(name)
    return [
        f"{' and '.join(alike)} {where} {'is' if len(alike) == 1 else 'are'} timed as {text}"
        for text, alike in names.items()
    ]
