"""Error of simulated step times, by steps that were measured on GPUs."""

from functools import cache
from importlib import resources
from typing import Annotated

from pydantic import Field

from gpu_catalog.record import Record

Whole = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FILE = "time_errors.json"


class TimeError90(Record):
    """90 % interval of the time of a step of a further source, relative to the prediction.

    Attributes:
        steps: number of measured steps that it is computed from.
        sources: number of their sources: a stack on a GPU.
        covered: share of the steps within an interval that was computed without their source.
        low, high: measured / predicted time at the ends. The interval includes 1.
    """

    steps: Whole
    sources: Whole
    covered: Share
    low: Annotated[float, Field(gt=0, le=1)]
    high: Annotated[float, Field(ge=1)]

    @property
    def below(self) -> float:
        """Relative error by which a step may be shorter: ``predicted / (1 + below)``."""
        return 1 / self.low - 1

    @property
    def above(self) -> float:
        """Relative error by which a step may be longer."""
        return self.high - 1


class TimeErrors(Record):
    """Errors of simulated step times, written by ``tests/benchmarks/published_times.py``.

    Attributes:
        of_gpu: steps that the GPU limits on any host that was measured.
        of_host: the others.
    """

    of_gpu: TimeError90
    of_host: TimeError90


@cache
def time_errors() -> TimeErrors:
    """Errors that ship with the package."""
    file = resources.files("trials.simulation.clock") / "data" / FILE
    return TimeErrors.model_validate_json(file.read_text(encoding="utf-8"))
