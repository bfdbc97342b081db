"""Forecast of a training's steps: peak memory and time of the longest batch, by simulation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fitting.laws.fit_result import Interval
from gpu_catalog.errors import UserError
from gpu_catalog.number_text import ends, short
from orchestrator.callback.live_training import LiveTraining
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.estimating.memory_error import published_errors
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.timing_model import NoSpeedError
from trials.simulation.trace_cache import Traces
from trials.simulation.trace_request import TraceRequest, not_simulated
from trials.simulation.whole_step import Steps


@dataclass(frozen=True, slots=True)
class StepForecast:
    """Forecast of a step with the longest rows.

    Attributes:
        peak_gib: most memory in live tensors.
        interval: 90 % interval of it.
        reserved_gib: most memory that the allocator holds; None on a CPU.
        usable_gib: memory that it may hold; None on a CPU.
        seconds: seconds of a step and their 90 % interval; None on a CPU.
    """

    peak_gib: float
    interval: Interval
    reserved_gib: float | None = None
    usable_gib: float | None = None
    seconds: tuple[float, Interval] | None = None

    @property
    def text(self) -> str:
        """The memory in words."""
        around = f"90 % interval {ends(self.interval.low, self.interval.high)}"
        held = ""
        if self.reserved_gib is not None and self.usable_gib is not None:
            held = f"; {short(self.reserved_gib)} of {short(self.usable_gib)} GiB reserved"
        return f"peak {short(self.peak_gib)} GiB ({around}){held}"

    @property
    def exceeds_memory(self) -> bool:
        """Whether the allocator needs more memory than it may hold."""
        needed, usable = self.reserved_gib, self.usable_gib
        return needed is not None and usable is not None and needed > usable

    def peak_differs(self, peak_gib: float, *, is_longest: bool) -> bool:
        """Whether a measured peak is outside the interval; below it only for the longest rows."""
        return _is_outside(peak_gib, self.interval, is_longest=is_longest)

    def time_differs(self, seconds: float, *, is_longest: bool) -> bool:
        """Whether a measured step time is outside its interval, likewise."""
        return self.seconds is not None and _is_outside(
            seconds, self.seconds[1], is_longest=is_longest
        )


def _is_outside(value: float, interval: Interval, *, is_longest: bool) -> bool:
    return value > interval.high or (is_longest and value < interval.low)


def step_forecast(
    training: LiveTraining, constants: Path | None, report: Callable[[str], None]
) -> StepForecast:
    """Simulate the step with the longest rows of a training.

    Args:
        training: the training.
        constants: constants that ``calibrate`` wrote; None for the starting values.
        report: called with a line on a trace that takes long.

    Raises:
        UserError: the training cannot be simulated.
    """
    traces, recipe = Traces(report=report), training.recipe
    error = published_errors().interval(recipe.method, "constant")
    if training.gpu.kind == "cpu":
        peak = _peak_on_cpu(training, traces) / GIB
        return StepForecast(peak, error.around(peak))
    reason = not_simulated(recipe, training.model, training.gpu)
    if reason is not None:
        raise UserError(reason)
    cell = SimulatedCell(training.cell(training.longest), training.model, traces)
    batch_size, gpu = training.batch_size, training.gpu
    peaks = cell.without_limit(batch_size, gpu)
    values, seconds = known_constants(constants), None
    try:
        step = cell.step_time(batch_size, gpu, values)
        low, high = values.interval(step)
        seconds = (step.seconds, Interval(low=low, high=high))
    except NoSpeedError:
        seconds = None
    peak = peaks.peak_allocated_bytes / GIB
    return StepForecast(
        peak,
        error.around(peak),
        reserved_gib=peaks.peak_reserved_bytes / GIB,
        usable_gib=usable_bytes(gpu, recipe) / GIB,
        seconds=seconds,
    )


def _peak_on_cpu(training: LiveTraining, traces: Traces) -> int:
    """Most bytes of live tensors on the CPU, whose allocator keeps none that are freed."""
    request = TraceRequest(
        cell=training.cell(training.longest),
        model=training.model,
        batch_size=training.batch_size,
        whole=True,
        target="cpu",
    )
    steps = Steps(traces.get(request), training.recipe.micro_batches(training.batch_size))
    _, sizes = steps.storages(training.batch_size)
    return int(steps.held.sizes.sum() + np.cumsum(sizes).max())
