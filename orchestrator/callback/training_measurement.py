"""Measurement of a training, from its meter."""

import datetime as dt
import statistics
from dataclasses import dataclass

from orchestrator.callback.live_training import LiveTraining
from orchestrator.callback.step_meter import StepMeter
from trials.records.observation import Environment, Measurement


@dataclass(frozen=True, slots=True)
class TrainingMeasurement:
    """Measurement of a training.

    Attributes:
        seq_len: mean tokens per row of the timed steps, padding included.
        memory_limit_bytes: device memory that it could take.
        started_at: start of its first step.
        seconds: wall time from then on.
    """

    measurement: Measurement
    environment: Environment
    seq_len: int
    memory_limit_bytes: int
    started_at: dt.datetime
    seconds: float


def measurement_of(
    meter: StepMeter, training: LiveTraining, started_at: dt.datetime
) -> TrainingMeasurement:
    """Measurement of a training whose meter has timed steps."""
    timed = meter.timed_steps
    seq_len = training.longest  # of a packed row
    if not training.recipe.packing:
        seq_len = round(statistics.fmean(tokens for step in timed for _, tokens in step.rows))
    is_on_cpu = training.gpu.kind == "cpu"  # where counting slows the first steps
    measurement = Measurement(
        memory_steps=len(meter.memory_steps),
        memory=meter.memory(),
        model_memory_bytes=meter.model_memory_bytes(),
        warmup_seconds=() if is_on_cpu else tuple(s.seconds for s in meter.memory_steps),
        step_seconds=tuple(step.seconds for step in timed),
        stop_reason=meter.stop_reason or "step cap",
    )
    return TrainingMeasurement(
        measurement=measurement,
        environment=meter.environment(),
        seq_len=seq_len,
        memory_limit_bytes=meter.memory_limit_bytes(training.gpu.usable_memory_bytes or 0),
        started_at=started_at,
        seconds=(dt.datetime.now(dt.UTC) - started_at).total_seconds(),
    )
