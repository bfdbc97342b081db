"""Callback that forecasts a training at its first step, and measures it."""

import datetime as dt
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gpu_catalog.number_text import ends, short
from orchestrator.callback.live_training import LiveTraining, live_training
from orchestrator.callback.step_forecast import StepForecast, step_forecast
from orchestrator.callback.step_meter import MEMORY_STEPS, MeasuredStep, StepMeter, all_are_long
from orchestrator.callback.training_cost import TrainingCost
from orchestrator.callback.training_measurement import measurement_of
from orchestrator.callback.training_run import record
from orchestrator.console import remark
from trials.records.observation import Observation
from trials.simulation.simulated_cell import GIB

SLOWER = 1.25  # time of steps over their forecast above which a line warns
FEWEST_PACED = 20  # steps after the timed ones before their pace is judged
DIFFER = "warning: the forecast and the steps differ: "
Hook = Callable[..., None]


def _harmless(hook: Hook) -> Hook:
    """Make a hook that ends the forecast, and never the training, where it fails."""

    @functools.wraps(hook)
    def guarded(
        self: "FineTuneForecast", args: Any, state: Any, control: Any, **given: Any
    ) -> None:
        if not self.is_active:
            return
        try:
            hook(self, args, state, control, **given)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self.give_up(error)

    return guarded


class FineTuneForecast(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Forecast of a training: peak memory, time to its end and what is left of a budget.

    At the first step it simulates the longest batch. It measures the memory of the first three
    steps and the time of some after them, writes these into a run folder, and says where they and
    the forecast differ. A failure of it is one line, and the training goes on.

    Args:
        run: run folder for the measurement; None to write none.
        gpu: key of the GPU in the catalog; None to identify it.
        usd_per_hour: price of the machine; None for that of the cheapest offer of the GPU, where
            there is a budget.
        budget_usd: dollars to spend; None for no budget.
        constants: constants that ``calibrate`` wrote.
        report: called with each line; by default it goes to standard error.

    Attributes:
        forecast: forecast of the longest batch; None before the first step, or without one.
        observation: measurement that was written into the run folder; None before.

    Example:
        >>> SFTTrainer(..., callbacks=[FineTuneForecast(run="runs/mine", budget_usd=20)])
    """

    def __init__(  # noqa: PLR0913 - the options of a callback
        self,
        run: str | Path | None = None,
        *,
        gpu: str | None = None,
        usd_per_hour: float | None = None,
        budget_usd: float | None = None,
        constants: Path | None = None,
        report: Callable[[str], None] = remark,
    ) -> None:
        self._run = run
        self._gpu = gpu
        self._cost = TrainingCost(usd_per_hour, budget_usd)
        self._constants = constants
        self._report = report
        self.is_active = False
        self._reset()

    def _reset(self) -> None:
        self.forecast: StepForecast | None = None
        self.observation: Observation | None = None
        self._training: LiveTraining | None = None
        self._meter: StepMeter | None = None
        self._steps_begun = 0
        self._begun = time.perf_counter()
        self._started_at = dt.datetime.now(dt.UTC)
        self._paced: tuple[int, float, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Prepare for a training."""
        del args, control, given
        self.is_active = bool(state.is_world_process_zero)
        self._reset()

    @_harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Forecast at the first step; begin to measure those that are measured."""
        del control
        if self._training is None:
            model, loader = given["model"], given["train_dataloader"]
            training = self._training = live_training(args, model, loader, self._gpu)
            self._forecast_steps(training, state)
            size = (training.batch_size, training.recipe.micro_batches(training.batch_size))
            self._meter = StepMeter(model, given["optimizer"], size)
        if self._meter is not None:
            self._meter.begin()

    @_harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a measured step, and say how far the training has come where that is known."""
        del control, given
        self._check_pace(state)
        meter = self._meter
        if meter is None:
            return
        meter.end()
        if len(meter.memory_steps) == MEMORY_STEPS and not meter.timed_steps:
            self._compare_memory(meter.memory_steps)
        if meter.stop_reason is not None:
            self._finish(args, state)

    @_harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the measurement of a training that was short."""
        del control, given
        if self._meter is not None:
            self._finish(args, state)
        self._say(f"{state.global_step} steps in {short(self._hours)} h{self._spent(0.0)}")
        self.is_active = False

    def give_up(self, error: Exception) -> None:
        """Say in one line why there is no forecast any more, and leave the training alone."""
        self.is_active = False
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()
        text = str(error).strip().splitlines()
        self._say(f"given up: {type(error).__name__}: {'; '.join(text) or 'no reason given'}")

    def _forecast_steps(self, training: LiveTraining, state: Any) -> None:
        try:
            forecast = step_forecast(training, self._constants, self._say)
        except Exception as error:  # noqa: BLE001 - the steps can still be measured
            self._say(f"none: {'; '.join(str(error).splitlines())}")
            return
        finally:
            self._begun = time.perf_counter()
        self.forecast = forecast
        shape = f"{training.batch_size} x {training.longest} tokens"
        self._say(f"the longest batch ({shape}): {forecast.text}")
        if forecast.exceeds_memory:
            self._say("warning: the longest batch does not fit the GPU's memory")
        if forecast.seconds is not None:
            seconds, around = forecast.seconds
            steps = state.max_steps - state.global_step
            low, high = (steps * end / 3600 for end in (around.low, around.high))
            self._say(
                f"{steps} steps, all as long: {short(steps * seconds / 3600)} h "
                f"({ends(low, high)}, simulated){self._spent(steps * seconds / 3600)}"
            )

    def _compare_memory(self, steps: list[MeasuredStep]) -> None:
        """Warn where the measured peak is outside the forecast's interval."""
        if self.forecast is None or self._training is None:
            return
        peak = max(step.memory.peak_allocated_bytes / GIB for step in steps if step.memory)
        is_longest = all_are_long(steps, self._training.longest)
        forecast = short(self.forecast.peak_gib)
        text = f"peak {short(peak)} GiB in {len(steps)} steps, forecast {forecast}"
        differs = self.forecast.peak_differs(peak, is_longest=is_longest)
        self._say(f"{DIFFER * differs}{text}")

    def _finish(self, args: Any, state: Any) -> None:
        """Write the measurement, and forecast the rest of the training by it."""
        meter, training, self._meter = self._meter, self._training, None
        assert meter is not None  # the caller checks it
        assert training is not None  # as above
        meter.close()
        if not meter.timed_steps:
            self._say("too few steps to measure their time: nothing is written")
            return
        median = statistics.median(step.seconds for step in meter.timed_steps)
        is_longest = all_are_long(meter.timed_steps, training.longest)
        if self.forecast is not None and self.forecast.time_differs(median, is_longest=is_longest):
            self._say(f"{DIFFER}{short(median)} s per step")
        if state.global_step < state.max_steps:
            self._say_rest(state, median, f"{len(meter.timed_steps)} timed steps")
        self._paced = (state.global_step, time.perf_counter(), median)
        if self._run is not None:
            try:
                measured = measurement_of(meter, training, self._started_at)
                self.observation = record(self._run, training, measured, int(args.seed))
            except Exception as error:  # noqa: BLE001 - the forecast goes on
                self._say(f"nothing is written: {'; '.join(str(error).splitlines())}")
            else:
                self._say(f"measurement written into {self._run}")

    def _check_pace(self, state: Any) -> None:
        """Warn once where steps, with their data and logging, take longer than those timed."""
        if self._paced is None:
            return
        first, since, median = self._paced
        steps = state.global_step - first
        if steps < FEWEST_PACED:
            return
        pace = (time.perf_counter() - since) / steps
        if pace > SLOWER * median:
            self._paced = None
            self._say(
                f"warning: steps take {short(pace)} s with all that surrounds them, "
                f"not {short(median)}"
            )
            self._say_rest(state, pace, "that pace")

    def _say_rest(self, state: Any, seconds: float, basis: str) -> None:
        """Say what the rest of the training takes at so many seconds per step."""
        steps = state.max_steps - state.global_step
        hours = steps * seconds / 3600
        self._say(f"{steps} steps left take {short(hours)} h by {basis}{self._spent(hours)}")

    @property
    def _hours(self) -> float:
        """Hours since the first step began."""
        return (time.perf_counter() - self._begun) / 3600

    def _spent(self, hours_left: float) -> str:
        """Dollars of the training at its end, and what is left of the budget; empty without one."""
        if self._training is None:
            return ""
        return self._cost.text(self._hours + hours_left, self._training.gpu.key)

    def _say(self, text: str) -> None:
        self._report(f"forecast: {text}")
