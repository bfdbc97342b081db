"""Hours and dollars of one job on one offer, with their intervals."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from fitting.families.cell_step_time import CellStepTime
from fitting.numerics.arrays import FloatArray
from gpu_catalog.offer import Offer
from orchestrator.pricing.price_drift import OfferPrice, PriceDrift, sigma_of, widened
from orchestrator.pricing.rental_cost import charged_hours, rental
from orchestrator.pricing.transfer_times import recorded_parameters, with_transfer_times
from orchestrator.spec.job import SECONDS_PER_HOUR, Job
from orchestrator.spec.job_tokens import job_of, rows
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation

DRAWS = 2000  # draws of the unknowns: probabilities are precise to about 1 %

LENGTHS = 1  # stream of random numbers apart from that of the simulation's error
SPOT = "spot"
LOW, HIGH = 5.0, 95.0  # percentiles: the ends of the 90 % intervals


def job_hours(job: Job, batch_size: int, step_seconds: float) -> float:
    """Hours of the steps: ``rows / batch`` of them in each epoch, but at least one.

    The batch is that of all GPUs that train together. A smaller last batch of an epoch counts as a
    fraction of a step.
    """
    return job.epochs * max(rows(job) / batch_size, 1.0) * step_seconds / SECONDS_PER_HOUR


def job_of_cell(job: Job, cell: Cell, observations: Iterable[Observation]) -> Job:
    """The job in a cell's batches, with overheads by its nodes and by the size of its model."""
    of_cell = job_of(job, cell.recipe, cell.seq_len).on_nodes(cell.nodes)
    counts = recorded_parameters(observations)
    return with_transfer_times(of_cell, cell.recipe, counts, cell.parallel)


def offer_usd(job: Job, steps_hours: FloatArray, offer: Offer) -> float:
    """Expected dollars of a job on an offer, overheads included.

    Args:
        job: job to price.
        steps_hours: (1,) hours of its steps alone.
        offer: offer to rent.
    """
    rented = rental(steps_hours, job.overheads, spot=offer.market == SPOT)
    return charged_hours(float(rented.hours[0]), offer) * offer.usd_per_hour


@dataclass(frozen=True, slots=True)
class RentedJob:
    """A job on a GPU, on demand or on spot instances, whatever the price.

    Attributes:
        job: job of a cell.
        hours: expected hours from renting to the end.
        low, high: ends of their 90 % interval.
        drawn: (draws,) hours.
        checkpoint_minutes: minutes of work between two checkpoints.
    """

    job: "CellJob"
    hours: float
    low: float
    high: float
    drawn: FloatArray
    checkpoint_minutes: float


class PricedOffer(NamedTuple):
    """A job on one offer, with its expected dollars."""

    price: OfferPrice
    rented: RentedJob
    usd: float

    @property
    def offer(self) -> Offer:
        """The offer."""
        return self.price.offer

    @property
    def usd_interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the dollars, by the hours and the change of the price."""
        low, high = self.price.usd(self.rented.low), self.price.usd(self.rented.high)
        return widened(self.usd, low, high, self.price.sigma)

    @property
    def drawn_usd(self) -> FloatArray:
        """(draws,) dollars."""
        usd = self.price.usd(self.rented.drawn)
        factors = self.price.drift.factors(self.offer)
        return usd if factors is None else usd * factors


@dataclass(frozen=True, slots=True)
class CellJob:
    """A job on a cell with a known step time.

    Attributes:
        stack: fingerprint of the software it ran with.
        basis: whether its steps were measured or simulated.
        step_time: step time at the batch size of the job.
        largest: largest batch of the cell and the miss above it, as `trainable_batch` returns them.
        host_gib: memory that it keeps on the host of each node; None for none, or where unknown.
    """

    job: Job
    cell: Cell
    stack: str
    basis: Basis
    step_time: CellStepTime
    largest: tuple[int, Observation | None] | None
    seed: int
    host_gib: float | None = None

    def on(
        self, offers: Sequence[Offer], shared: FloatArray, drift: PriceDrift
    ) -> Iterator[PricedOffer]:
        """Price the job on offers.

        Args:
            offers: offers of the cell's GPU.
            shared: (draws,) standard normal draws of the error that simulated steps share.
            drift: change of prices.
        """
        name = f"{self.seed}/{self.cell.key}/{self.stack}/{self.basis}"
        random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
        step = self.step_time
        errors = np.concatenate([[0.0], step.uncertainty.drawn(shared, random) + self._lengths()])
        batch_size = step.batch_size * self.cell.data_parallel_ranks
        drawn = job_hours(self.job, batch_size, step.seconds) * np.exp(errors)
        markets = {offer.market for offer in offers}
        rentals = {market: self._rented(drawn, spot=market == SPOT) for market in markets}
        for offer in offers:
            price, rented = drift.price(offer), rentals[offer.market]
            yield PricedOffer(price, rented, price.usd(rented.hours))

    @property
    def own_error_share(self) -> float:
        """Share of the variance of the hours' logarithm that no other cell's hours have."""
        step = self.step_time.uncertainty
        shared = step.shared**2 + self._length_sigma**2
        return step.alone**2 / (step.alone**2 + shared) if shared else 1.0

    @property
    def _length_sigma(self) -> float:
        return sigma_of(0.0 if self.step_time.tokens is None else self.job.length_error)

    def _lengths(self) -> FloatArray:
        """(draws,) error of the logarithm of the lengths, which all offers of a job share."""
        return self._length_sigma * _drawn_lengths(self.seed)

    def _rented(self, drawn: FloatArray, *, spot: bool) -> RentedJob:
        """Rent for drawn hours of steps, the first of which are the expected ones."""
        rented = rental(drawn, self.job.overheads, spot=spot)
        low, high = _ends(rented.hours[1:])
        return RentedJob(
            job=self,
            hours=float(rented.hours[0]),
            low=low,
            high=high,
            drawn=rented.hours[1:],
            checkpoint_minutes=rented.checkpoint_minutes,
        )


@cache
def _drawn_lengths(seed: int) -> FloatArray:
    return np.random.default_rng([seed, LENGTHS]).standard_normal(DRAWS)


def _ends(values: FloatArray) -> tuple[float, float]:
    """Ends of the 90 % interval, as ``np.percentile``, whose checks take five times as long."""
    low, high = (percent / 100 * (len(values) - 1) for percent in (LOW, HIGH))
    ordered = np.partition(values, [int(low), int(low) + 1, int(high), int(high) + 1])
    return _between(ordered, low), _between(ordered, high)


def _between(ordered: FloatArray, place: float) -> float:
    """Value at a place between two neighbours, from the nearer one."""
    below, share = int(place), place - int(place)
    low, high = float(ordered[below]), float(ordered[below + 1])
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)
