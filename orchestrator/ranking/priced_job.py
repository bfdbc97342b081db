"""One job on one offer: hours and dollars with their intervals."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fitting.families.cell_step_time import CellStepTime
from fitting.numerics.arrays import FloatArray
from gpu_catalog.offer import Offer
from orchestrator.pricing.price_drift import PriceDrift, widened
from orchestrator.pricing.rental_cost import charged_hours, rental
from orchestrator.spec.job import SECONDS_PER_HOUR, Job
from orchestrator.spec.job_tokens import rows
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation

DRAWS = 2000  # of what is not known: probabilities are told to about 1 %

LOW, HIGH = 5.0, 95.0  # percentiles: the ends of the 90 % intervals


def job_hours(workload: Job, batch_size: int, step_seconds: float) -> float:
    """Hours of the steps: ``rows / batch`` of them in each epoch, but one at least.

    The last of an epoch, where it is smaller, is counted as the part that it is.
    """
    return workload.epochs * max(rows(workload) / batch_size, 1.0) * step_seconds / SECONDS_PER_HOUR


def offer_usd(workload: Job, steps_hours: FloatArray, offer: Offer) -> float:
    """What so many hours of steps are expected to cost on an offer, all else included."""
    rented = rental(steps_hours, workload.overheads, spot=_is_spot(offer))
    return charged_hours(float(rented.hours[0]), offer.minimum_minutes) * offer.usd_per_hour


@dataclass(frozen=True, slots=True)
class _Rented:
    """A job on a GPU, on demand or on spot instances, whatever the price.

    Attributes:
        job: of what.
        hours: expected.
        low, high: of the 90 % interval.
        drawn: (draws,) hours.
        checkpoint_minutes: between two.
    """

    job: "CellJob"
    hours: float
    low: float
    high: float
    drawn: FloatArray
    checkpoint_minutes: float


@dataclass(frozen=True, slots=True)
class PricedOffer:
    """A job on one offer, what it costs, and the largest batch of its cell with the miss above."""

    offer: Offer
    rented: _Rented
    usd: float
    known: tuple[int, Observation | None] | None
    drift: PriceDrift

    @property
    def usd_interval(self) -> tuple[float, float]:
        """Nine times in ten."""
        low, high = self._usd_of(self.rented.low), self._usd_of(self.rented.high)
        return widened(self.usd, low, high, self.price_sigma)

    @property
    def price_sigma(self) -> float:
        """How far the price may have moved."""
        return self.drift.sigma(self.offer)

    @property
    def drawn_usd(self) -> FloatArray:
        """(draws,)."""
        least = charged_hours(0.0, self.offer.minimum_minutes)
        usd = np.maximum(self.rented.drawn, least) * self.offer.usd_per_hour
        return np.asarray(usd * np.exp(self.drift.errors(self.offer))) if self.price_sigma else usd

    def _usd_of(self, hours: float) -> float:
        return charged_hours(hours, self.offer.minimum_minutes) * self.offer.usd_per_hour


@dataclass(frozen=True, slots=True)
class CellJob:
    """A workload as one cell, whose step time is known."""

    workload: Job
    cell: Cell
    stack: str
    basis: Basis
    step_time: CellStepTime
    known: tuple[int, Observation | None] | None

    def on(
        self, offers: Sequence[Offer], shared: FloatArray, drift: PriceDrift, seed: int
    ) -> Iterator[PricedOffer]:
        """The job on each of these."""
        name = f"{seed}/{self.cell.key}/{self.stack}/{self.basis}"
        random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
        step = self.step_time
        errors = np.concatenate([[0.0], step.doubt.drawn(shared, random)])
        drawn = job_hours(self.workload, step.batch_size, step.seconds) * np.exp(errors)
        rentals = {spot: self._rented(drawn, spot=spot) for spot in {_is_spot(o) for o in offers}}
        for offer in offers:
            rented = rentals[_is_spot(offer)]
            usd = charged_hours(rented.hours, offer.minimum_minutes) * offer.usd_per_hour
            yield PricedOffer(offer, rented, usd, self.known, drift)

    def _rented(self, drawn: FloatArray, *, spot: bool) -> _Rented:
        told = rental(drawn, self.workload.overheads, spot=spot)
        low, high = np.percentile(told.hours[1:], [LOW, HIGH])
        return _Rented(
            job=self,
            hours=float(told.hours[0]),
            low=float(low),
            high=float(high),
            drawn=told.hours[1:],
            checkpoint_minutes=told.checkpoint_minutes,
        )


def _is_spot(offer: Offer) -> bool:
    return offer.market == "spot"
