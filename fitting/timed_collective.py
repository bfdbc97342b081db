"""Speed of one collective, fitted to its times by one bandwidth or by two."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self

import numpy as np

from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.numerics.least_squares import Solution, solve_linear
from gpu_catalog.gpu import Interconnect
from gpu_catalog.links.within_nodes import CollectiveName, MeasuredLink, moved_share

# Buffers up to which the bandwidth may be another, in 10^6 bytes: NCCL changes its protocol and
# algorithm in between.
BREAKS_MB = (2.0, 2.8, 4.0, 5.7, 8.0, 11.3, 16.0, 22.6, 32.0)
SIZES_BESIDE = 2  # least sizes of the buffer on either side of a break
# Least seconds that a gigabyte takes: 10 TB/s, above any link, stand for times that do not grow.
# The first bytes may have them, for they may take no longer than the smallest message.
LEAST_SECONDS_PER_GB = 1e-4
MOST_PARTS = 10  # parts of the sizes, each predicted by the others
# One bandwidth is kept up to this error, and up to this multiple of the error of two.
SMALL_ERROR, KEPT = 0.01, 1.25


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """Times of one collective within a node.

    Attributes:
        gpu: key of the GPUs.
        gpus: GPUs that took part.
        collective: the collective.
        sizes: (times,) bytes of the buffer.
        seconds: (times,) measured times.
        interconnect: link between the GPUs; None for that of the GPU in the catalog.
    """

    gpu: str
    gpus: int
    collective: CollectiveName
    sizes: FloatArray
    seconds: FloatArray
    interconnect: Interconnect | None = None

    def link(self) -> MeasuredLink | None:
        """Link by least squares of the relative errors, with all terms at least 0.

        The first bytes have a bandwidth of their own if that predicts sizes which were left out of
        the fit better. None where the times of large buffers do not grow with the buffer.
        """
        one = self.with_one_bandwidth()
        if one is None or float(self.errors(one).mean()) <= SMALL_ERROR:
            return one
        two = self.with_two_bandwidths()
        if two is None:
            return one
        error_of_one = float(np.mean(self.held_out_errors(TimedCollective.with_one_bandwidth)))
        error_of_two = float(np.mean(self.held_out_errors(TimedCollective.with_two_bandwidths)))
        link = two if error_of_two * KEPT < error_of_one else one
        return link if 1 / link.bus_gb_per_second > LEAST_SECONDS_PER_GB else None

    def with_one_bandwidth(self) -> MeasuredLink | None:
        """Link with one bandwidth; None where the times do not grow with the buffer."""
        if len(np.unique(self.sizes)) == 1:
            return None
        solution = self._solution(1e-9 * np.c_[self._moved], np.array([LEAST_SECONDS_PER_GB]))
        alpha_us, seconds_per_gb = solution.values.tolist()
        does_grow = seconds_per_gb > LEAST_SECONDS_PER_GB
        return self._link(alpha_us, seconds_per_gb) if does_grow else None

    def with_two_bandwidths(self) -> MeasuredLink | None:
        """Link with the best of the breaks; the one without where the sizes are too few for any."""
        share, distinct = moved_share(self.collective, self.gpus), np.unique(self.sizes)
        fits = []
        for break_mb in BREAKS_MB:
            below = int((distinct <= 1e6 * break_mb).sum())
            if min(below, len(distinct) - below) < SIZES_BESIDE:
                continue
            small_mb = share * break_mb
            small = np.minimum(self._moved, 1e6 * small_mb)
            terms = 1e-9 * np.c_[small, self._moved - small]
            solution = self._solution(terms, np.full(2, LEAST_SECONDS_PER_GB))
            alpha_us, seconds_per_small_gb, seconds_per_gb = solution.values.tolist()
            link = self._link(alpha_us, seconds_per_gb, small_mb, seconds_per_small_gb)
            fits.append((solution.rmse or 0.0, link))
        if not fits:
            return self.with_one_bandwidth()
        return min(fits, key=itemgetter(0))[1]

    def errors(self, link: MeasuredLink) -> FloatArray:
        """Absolute relative errors of a link's times, (times,)."""
        speed = link.speed(link.alpha_us)
        predicted = [speed.seconds(self.collective, self.gpus, s) for s in self.sizes.tolist()]
        return np.abs(np.array(predicted) / self.seconds - 1)

    def held_out_errors(
        self, fit: Callable[[Self], MeasuredLink | None], most_parts: int = MOST_PARTS
    ) -> FloatArray:
        """Absolute relative errors of sizes that were left out of the fit, (times,).

        The sizes are dealt out to the parts in their order. Where the others give no link, the
        error is infinite.
        """
        distinct, places = np.unique(self.sizes, return_inverse=True)
        parts = places % min(most_parts, len(distinct))
        errors = np.full(len(self.sizes), np.inf)
        for part in np.unique(parts):
            link = fit(self.only(parts != part))
            if link is not None:
                errors[parts == part] = self.only(parts == part).errors(link)
        return errors

    def only(self, these: BoolArray) -> Self:
        """The times where a mask, (times,), is true."""
        return replace(self, sizes=self.sizes[these], seconds=self.seconds[these])

    @property
    def _moved(self) -> FloatArray:
        return moved_share(self.collective, self.gpus) * self.sizes

    def _solution(self, terms: FloatArray, least: FloatArray) -> Solution:
        """Microseconds of the smallest message, then the values of the terms."""
        design = np.c_[np.full(len(self.sizes), 1e-6), terms]
        return solve_linear(design, self.seconds, weights=1 / self.seconds, lower=np.r_[0.0, least])

    def _link(
        self,
        alpha_us: float,
        seconds_per_gb: float,
        small_mb: float | None = None,
        seconds_per_small_gb: float | None = None,
    ) -> MeasuredLink:
        return MeasuredLink(
            gpu=self.gpu,
            interconnect=self.interconnect,
            gpus=self.gpus,
            collective=self.collective,
            alpha_us=alpha_us,
            small_mb=small_mb,
            small_gb_per_second=seconds_per_small_gb and 1 / seconds_per_small_gb,
            bus_gb_per_second=1 / seconds_per_gb,
        )
