"""Which of a run's step times are less sure than they look, and why; and what steps drew."""

import statistics
from collections.abc import Iterator, Sequence

from orchestrator.tables import table
from trials.observation import DeviceReading, Measurement, Observation
from trials.timing import TimingRule, instability

CLOCK_FELL = 0.05  # of the multiprocessors' clock over the timed steps
# Below this, it is the driver's own.
FOREIGN_BYTES = 512 * 2**20


def steadiness_section(observations: Sequence[Observation], rule: TimingRule) -> str:
    """Every timed probe that is unsteady, with the reasons; and energy, where it was counted."""
    timed = [
        (o, o.measurement)
        for o in observations
        if o.measurement is not None and o.measurement.step_seconds
    ]
    unsteady = [
        (o.cell.key, o.batch_size, o.repeat, reasons)
        for o, measurement in timed
        if (reasons := "; ".join(doubts(measurement, rule)))
    ]
    parts = []
    if unsteady:
        parts += ["## Unsteady step times", table(("cell", "batch", "repeat", "why"), unsteady)]
    drawn = [row for o, measurement in timed if (row := _energy(o, measurement)) is not None]
    if drawn:
        headers = ("cell", "batch", "repeat", "joules a query", "watts", "SM MHz", "°C")
        parts += ["## Energy", table(headers, drawn)]
    return "\n\n".join(parts)


def doubts(measurement: Measurement, rule: TimingRule) -> Iterator[str]:
    """Why the step times of one probe are to be doubted."""
    reason = instability(measurement.step_seconds, measurement.stop_reason, rule)
    if reason is not None:
        yield reason
    before, after = measurement.before, measurement.after
    if before is not None and after is not None:
        held_down = sorted({*before.throttle_reasons, *after.throttle_reasons})
        if held_down:
            yield f"clocks held down: {', '.join(held_down)}"
        yield from _clock(before, after)
    foreign = measurement.memory.foreign_bytes
    if foreign is not None and foreign > FOREIGN_BYTES:
        yield f"another process held {foreign / 2**30:.1f} GiB of the GPU"


def _clock(before: DeviceReading, after: DeviceReading) -> Iterator[str]:
    if before.sm_clock_mhz is None or after.sm_clock_mhz is None:
        return
    if after.sm_clock_mhz < (1 - CLOCK_FELL) * before.sm_clock_mhz:
        yield f"the clock fell from {before.sm_clock_mhz} to {after.sm_clock_mhz} MHz"


def _energy(observation: Observation, measurement: Measurement) -> tuple[object, ...] | None:
    if measurement.energy_joules is None:
        return None
    steps = len(measurement.step_seconds)
    after = measurement.after or DeviceReading()
    seconds = statistics.fmean(measurement.step_seconds) * steps
    return (
        observation.cell.key,
        observation.batch_size,
        observation.repeat,
        f"{measurement.energy_joules / steps / observation.batch_size:.4g}",
        f"{measurement.energy_joules / seconds:.0f}",
        after.sm_clock_mhz if after.sm_clock_mhz is not None else "",
        after.temperature_celsius if after.temperature_celsius is not None else "",
    )
