"""Results of a fit: coefficients with their errors, or a failure with its remedy."""

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
    """One fitted coefficient; its standard error is None when it was held at a bound."""

    name: str
    value: float
    unit: str
    standard_error: float | None


class Interval(Record):
    """Ends of an interval; its level is stated where it is used."""

    low: float
    high: float


class InputRange(Record):
    """Span of one input over the fitted points; outside it a law extrapolates."""

    name: str
    low: float
    high: float


class Fit(Record):
    """One law fitted to one group of points, or a failure: no parameters, a reason and a remedy.

    Attributes:
        group: GPU, model and recipe that the coefficients hold for.
        basis: measured, capped or simulated, never two of them.
        stack: fingerprint shared by the points; None when no observation recorded its environment.
            Laws that hold across GPUs, those of memory, have the fingerprint of the software alone,
            without the driver.
        remedy: measurements that would give a fit; present for a failure alone.
        parameters: fitted coefficients; empty for a failure.
        covariance: covariance of the parameters, in their order; zero for one held at its bound.
        rank: number of independent directions of parameter space that the points identify.
        parameter_count: number of parameters of the law.
        rmse: root mean square of the residuals; None for a failure.
        rmse_unit: unit of rmse.
        input_range: span of each input of the law; empty without points.
        note: reason for a failure, or a remark on the fit.
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
    def _is_a_fit_or_a_failure(self) -> Self:
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
        """Stable name: law, group, basis and stack."""
        return f"{self.law}/{self.group.key}/{self.basis}/{self.stack or 'unknown-stack'}"

    @property
    def degrees_of_freedom(self) -> int:
        """Number of points less the number of free parameters."""
        return self.points - sum(p.standard_error is not None for p in self.parameters)


class Prediction(Record):
    """A predicted number with its interval; extrapolated where inputs lie outside the fit's."""

    value: float
    low: float
    high: float
    extrapolated: bool
