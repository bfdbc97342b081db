"""Speed of collectives between the GPUs of a node, by their interconnect.

A collective on n GPUs with a buffer of S bytes moves ``m = f * S`` bytes, where f is (n - 1) / n
for an all-gather and a reduce-scatter, and twice that for an all-reduce. It takes
``alpha + m / bandwidth`` seconds, so the bandwidth is nccl-tests' "busbw" (its PERFORMANCE.md).
The first megabytes may have a bandwidth of their own, because NCCL changes its protocol with the
size: ``alpha + min(m, small) / small_bandwidth + max(m - small, 0) / bandwidth``.
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Interconnect, Positive, Source
from gpu_catalog.record import Record

CollectiveName = Literal["all-gather", "reduce-scatter", "all-reduce"]
FILE = "links.csv"


class LinkSpeed(Record):
    """Speed that a simulation takes for one collective.

    Attributes:
        alpha_seconds: time of the smallest message.
        small_bytes: moved bytes with a bandwidth of their own.
        small_bytes_per_second: bus bandwidth of these; absent where it is that of all.
        bytes_per_second: bus bandwidth.
        stands_in: measured link whose bandwidth this is, where the one in question was not
            measured; absent where it was.
    """

    alpha_seconds: float
    small_bytes: float = 0.0
    small_bytes_per_second: float | None = None
    bytes_per_second: float
    stands_in: str | None = None

    def seconds(self, collective: CollectiveName, gpus: int, buffer_bytes: float) -> float:
        """Seconds of a collective, by the equation above."""
        moved = moved_share(collective, gpus) * buffer_bytes
        small = min(moved, self.small_bytes)
        of_small = small / (self.small_bytes_per_second or self.bytes_per_second)
        return self.alpha_seconds + of_small + (moved - small) / self.bytes_per_second


class _Bandwidths(Record):
    """Measured bandwidths of one collective.

    Attributes:
        gpus: GPUs that took part.
        collective: the collective.
        small_mb: moved bytes with a bandwidth of their own, in 10^6 bytes; absent where one
            bandwidth holds for all.
        small_gb_per_second: bus bandwidth of these, in 10^9 bytes per second; thousands where they
            take hardly longer than the smallest message.
        bus_gb_per_second: bus bandwidth of large messages, in 10^9 bytes per second.
    """

    gpus: Annotated[int, Field(ge=2)]
    collective: CollectiveName
    small_mb: Positive | None = None
    small_gb_per_second: Positive | None = None
    bus_gb_per_second: Positive

    @model_validator(mode="after")
    def _small_is_whole(self) -> Self:
        if (self.small_mb is None) != (self.small_gb_per_second is None):
            raise ValueError("small_mb and small_gb_per_second are given together or not at all")
        return self

    def speed(self, alpha_us: float, stands_in: str | None = None) -> LinkSpeed:
        """Speed by the equation above, with this time of the smallest message."""
        small = self.small_gb_per_second
        return LinkSpeed(
            alpha_seconds=1e-6 * alpha_us,
            small_bytes=1e6 * (self.small_mb or 0.0),
            small_bytes_per_second=None if small is None else 1e9 * small,
            bytes_per_second=1e9 * self.bus_gb_per_second,
            stands_in=stands_in,
        )


class Link(_Bandwidths):
    """Measured speed of one collective.

    Attributes:
        interconnect: link between the GPUs.
        alpha_us: time of the smallest message, in microseconds; absent where only large messages
            were measured.
        source: source of the figures.
        recorded: date of this record.
    """

    interconnect: Interconnect
    alpha_us: Positive | None = None
    source: Source
    recorded: dt.date


class MeasuredLink(_Bandwidths):
    """Speed of one collective among GPUs of one node, as a user measured it.

    Attributes:
        gpu: key of the GPUs.
        interconnect: link between them; absent for that of the GPU in the catalog, as in files from
            before there were others.
        alpha_us: time of the smallest message, in microseconds.
    """

    gpu: str
    interconnect: Annotated[Interconnect | None, Field(exclude_if=lambda n: n is None)] = None
    alpha_us: Annotated[float, Field(ge=0)]

    @property
    def name(self) -> str:
        """Number and key of the GPUs, and the link where it is recorded: ``2xL40S by pcie4``."""
        by = "" if self.interconnect is None else f" by {self.interconnect}"
        return f"{self.gpus}x{self.gpu}{by}"


def moved_share(collective: CollectiveName, gpus: int) -> float:
    """Bytes that a collective moves over a link, over those of its buffer: f in the equation."""
    passes = 2 if collective == "all-reduce" else 1
    return passes * (gpus - 1) / gpus


@cache
def link_speed(
    interconnect: Interconnect | None, gpus: int, collective: CollectiveName
) -> LinkSpeed:
    """Speed of a collective: as measured, or else the slowest of the nearest links measured."""
    links = shipped_rows(Link, FILE)
    slowest = min(
        _nearest(links, interconnect, gpus, collective), key=lambda link: link.bus_gb_per_second
    )
    with_alpha = [link for link in links if link.alpha_us]
    alphas = [link.alpha_us or 0.0 for link in _nearest(with_alpha, interconnect, gpus, collective)]
    name = (slowest.interconnect, slowest.gpus, slowest.collective)
    text = f"{slowest.collective} on {slowest.gpus} GPUs by {slowest.interconnect}"
    is_measured = name == (interconnect, gpus, collective)
    return slowest.speed(max(alphas), stands_in=None if is_measured else text)


def _nearest(
    links: Sequence[Link],
    interconnect: Interconnect | None,
    gpus: int,
    collective: CollectiveName,
) -> Sequence[Link]:
    """Nearest of the links measured: the very one, or all that are equally near.

    Of its class (``nvlink-switch``) those of the nearest generation, of these those of the nearest
    number of GPUs, of these that of the same collective. Where none of its class was measured, all.
    """
    name, generation = _class_and_generation(interconnect)

    def distance(link: Link) -> tuple[int, int, bool]:
        own = _class_and_generation(link.interconnect)[1]
        return abs(own - generation), abs(link.gpus - gpus), link.collective != collective

    of_class = [link for link in links if _class_and_generation(link.interconnect)[0] == name]
    least = min((distance(link) for link in of_class), default=None)
    return [link for link in of_class if distance(link) == least] or links


def _class_and_generation(interconnect: Interconnect | None) -> tuple[str, int]:
    """``nvlink-switch-4`` is (``nvlink-switch``, 4)."""
    name = interconnect or ""
    kind = name.rstrip("0123456789")
    return kind.rstrip("-"), int(name[len(kind) :] or 0)


def link_notes(
    gpu: str, interconnect: Interconnect | None, gpus: int, collectives: Sequence[CollectiveName]
) -> list[str]:
    """Collectives whose speed by a link was not measured, and what stands in for it.

    Args:
        gpu: key of the GPUs.
        interconnect: link between them.
        gpus: number of them.
        collectives: the collectives.
    """
    where = f"by {interconnect or 'a link that the catalog does not have'}"
    if interconnect == "none":
        where = f"between {gpu}, of which a node has one,"
    speeds = {name: link_speed(interconnect, gpus, name) for name in collectives}
    return stand_in_notes(speeds, where, "GB/s")


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
