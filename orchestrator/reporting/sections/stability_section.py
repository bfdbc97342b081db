"""Which of a run's step times are less sure than they look, and why; and what steps drew."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from orchestrator.markdown_table import table
from trials.records.observation import DeviceReading, Measurement, Observation
from trials.records.timing_rule import TimingRule, instability, median_interval

CLOCK_FELL = 0.05  # of the multiprocessors' clock over the timed steps
# Less than this may be the driver's own, where it is too old to say which is (before 510).
FOREIGN_BYTES = 256 * 2**20


def stability_section(observations: Sequence[Observation], rule: TimingRule) -> str:
    """The cells with unsteady probes and why the worst is; and energy, where it was counted."""
    timed = [
        (o, o.measurement)
        for o in observations
        # A simulated step is the same each time; how far it may be off, its interval tells.
        if o.measurement is not None and o.measurement.step_seconds and not o.cell.simulated
    ]
    parts = []
    unsteady = list(_unsteady(timed, rule))
    if unsteady:
        worst = ("cell", "unsteady", "the widest, at batch", "why")
        parts += ["## Unsteady step times", table(worst, unsteady)]
    drawn = [row for o, measurement in timed if (row := _energy(o, measurement)) is not None]
    if drawn:
        headers = ("cell", "batch", "repeat", "joules an example", "watts", "SM MHz", "°C")
        parts += ["## Energy", table(headers, drawn)]
    return "\n\n".join(parts)


def _unsteady(
    timed: Sequence[tuple[Observation, Measurement]], rule: TimingRule
) -> Iterator[tuple[object, ...]]:
    """A row for each cell that has unsteady probes."""
    by_cell: defaultdict[str, list[tuple[int, Measurement]]] = defaultdict(list)
    for o, measurement in timed:
        by_cell[o.cell.key].append((o.batch_size, measurement))
    for key, probes in by_cell.items():
        doubted = [
            (b, m, "; ".join(why)) for b, m in probes if (why := list(instability_reasons(m, rule)))
        ]
        if doubted:
            batch, _, why_worst = max(doubted, key=lambda row: _width(row[1]))
            yield key, f"{len(doubted)} of {len(probes)} probes", batch, why_worst


def _width(measurement: Measurement) -> float:
    """Of the interval of the median, as a part of it."""
    interval = median_interval(measurement.step_seconds)
    if interval is None:
        return 0.0
    return (interval[1] - interval[0]) / statistics.median(measurement.step_seconds)


def instability_reasons(measurement: Measurement, rule: TimingRule) -> Iterator[str]:
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
