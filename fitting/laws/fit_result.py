"""What fitting gives: coefficients with their errors, or a refusal that says what to do."""

from enum import StrEnum
from typing import Self

from pydantic import model_validator

from fitting.numerics.least_squares import Status
from fitting.points.fit_points import FitGroup
from gpu_catalog.record import Record
from trials.records.observation import Basis


class Law(StrEnum):
    """Laws of one group of points; ``fitting.families`` has those of the step time."""

    MAX_BATCH_EQ1 = "max_batch_eq1"
    MEMORY_AFFINE = "memory_affine"
    THROUGHPUT_EQ2 = "throughput_eq2"


class Parameter(Record):
    """One fitted coefficient; no standard error when it was held at its bound."""

    name: str
    value: float
    unit: str
    standard_error: float | None


class Interval(Record):
    """Where a number lies, as often as its place says."""

    low: float
    high: float


class InputRange(Record):
    """The span of one input over the fitted points; outside it a law extrapolates."""

    name: str
    low: float
    high: float


class Fit(Record):
    """One law fitted to one group of points, or a refusal: no parameters, a reason and a remedy.

    Attributes:
        law: which law.
        group: what the coefficients speak of.
        basis: measured, capped or simulated, never two of them.
        stack: fingerprint the points share; absent when no observation said where it ran. For laws
            that hold across GPUs, those of memory, that of the software alone, the driver left out.
        status: what became of the fit.
        remedy: what to measure to get a fit; present when, and only when, this is a refusal.
        parameters: empty for a refusal.
        covariance: of the parameters, in their order; zero for one held at its bound.
        rank: independent directions of parameter space the points see.
        parameter_count: parameters of the law in the form that was tried.
        points: how many there were.
        rmse: root mean square of the residuals; absent for a refusal.
        rmse_unit: what rmse is in.
        input_range: one per input of the law; empty without points.
        note: the reason for a refusal, or what else the reader must know.
    """

    law: Law
    group: FitGroup
    basis: Basis
    stack: str | None
    status: Status
    remedy: str | None
    parameters: tuple[Parameter, ...]
    covariance: tuple[tuple[float, ...], ...]
    rank: int
    parameter_count: int
    points: int
    rmse: float | None
    rmse_unit: str
    input_range: tuple[InputRange, ...]
    note: str | None

    @model_validator(mode="after")
    def _is_a_fit_or_a_refusal(self) -> Self:
        signs = (bool(self.parameters), self.rmse is not None, self.remedy is None)
        if set(signs) != {self.status.is_usable}:
            raise ValueError(
                f"a fit with status {self.status} must have "
                f"{'parameters and an rmse' if self.status.is_usable else 'only a remedy'}"
            )
        if {len(self.covariance), *map(len, self.covariance)} - {0} - {len(self.parameters)}:
            raise ValueError(f"the covariance is not {len(self.parameters)} by as many")
        return self

    @property
    def key(self) -> str:
        """A stable name: law, group, basis and stack."""
        return f"{self.law}/{self.group.key}/{self.basis}/{self.stack or 'unknown-stack'}"

    @property
    def degrees_of_freedom(self) -> int:
        """Points less the parameters that were free to follow them."""
        return self.points - sum(p.standard_error is not None for p in self.parameters)


class Prediction(Record):
    """A number and its interval, at the level that who tells it says.

    It is extrapolated where what was asked lies outside what was fitted.
    """

    value: float
    low: float
    high: float
    extrapolated: bool
