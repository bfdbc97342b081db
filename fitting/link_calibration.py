"""Speeds of collectives, fitted to their times in runs on several GPUs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fitting.timed_collective import TimedCollective
from gpu_catalog.gpu import Gpu, Interconnect
from gpu_catalog.links.within_nodes import CollectiveName, MeasuredLink
from gpu_catalog.record import Record
from trials.recipes.parallel import link_within
from trials.records.collectives import CollectiveTime
from trials.records.profile import LinkTimes

_Key = tuple[str, Interconnect | None, int, CollectiveName]


class FittedLink(Record):
    """A link with the error of its equation.

    Attributes:
        link: its fitted speed.
        mean_error: mean absolute relative error of its times, in sample.
        largest_mib: largest buffer that was timed, in MiB.
    """

    link: MeasuredLink
    mean_error: float
    largest_mib: float


def fitted_links(links: Iterable[LinkTimes], gpus: Mapping[str, Gpu]) -> tuple[FittedLink, ...]:
    """Fit the equation of ``within_nodes`` to each collective by each link among as many GPUs.

    Times of several hosts count together. A collective needs two sizes of its buffer. CPUs and
    several nodes are left out.
    """
    timed: dict[_Key, list[CollectiveTime]] = defaultdict(list)
    for link in links:
        cell, gpu = link.cell, gpus.get(link.cell.device)
        if cell.nodes == 1 and gpu is not None and gpu.kind == "cuda":
            interconnect = link_within(gpu, cell.parallel)
            for one in link.times:
                timed[gpu.key, interconnect, cell.ranks, one.collective].append(one)
    keys = sorted(timed, key=lambda key: [part or "" for part in key])
    fitted = (_fitted(*key, timed[key]) for key in keys)
    return tuple(link for link in fitted if link is not None)


def _fitted(
    gpu: str,
    interconnect: Interconnect | None,
    gpus: int,
    collective: CollectiveName,
    times: Sequence[CollectiveTime],
) -> FittedLink | None:
    """The link of one collective; None where its times do not grow with the buffer."""
    sizes = np.array([time.buffer_bytes for time in times], np.float64)
    seconds = np.array([time.seconds for time in times])
    timed = TimedCollective(gpu, gpus, collective, sizes, seconds, interconnect)
    link = timed.link()
    if link is None:
        return None
    return FittedLink(
        link=link,
        mean_error=float(timed.errors(link).mean()),
        largest_mib=float(sizes.max()) / 2**20,
    )
