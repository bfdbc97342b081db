"""Sections of unstable step times, with their causes, and of energy and collectives of steps."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import get_args

from gpu_catalog.links.within_nodes import CollectiveName
from gpu_catalog.number_text import short
from orchestrator.markdown_table import records_table, table
from orchestrator.reporting.sections.memory_section import memory_text
from trials.records.observation import DeviceReading, Measurement, Observation
from trials.records.timing_rule import TimingRule, instability, median_interval

CLOCK_DROP = 0.05  # part by which the multiprocessor clock falls over the timed steps
# Drivers before 510 count some of their own memory as that of other processes.
FOREIGN_BYTES = 256 * 2**20


def stability_section(observations: Sequence[Observation], rule: TimingRule) -> str:
    """Markdown: cells with unstable step times, and the energy of steps where it was counted."""
    timed = [
        (o, o.measurement)
        for o in observations
        # Simulated steps do not vary: their intervals hold the error of the simulation.
        if o.measurement is not None and o.measurement.step_seconds and not o.cell.simulated
    ]
    parts = []
    unstable = list(_unstable_rows(timed, rule))
    if unstable:
        headers = ("cell", "unstable", "worst batch size", "cause at that size")
        parts += ["## Unstable step times", table(headers, unstable)]
    energy = [
        _energy(o, measurement, measurement.energy_joules)
        for o, measurement in timed
        if measurement.energy_joules is not None
    ]
    if energy:
        parts += ["## Energy", records_table(energy)]
    return "\n\n".join(parts)


def communication_section(observations: Sequence[Observation]) -> str:
    """Markdown: collectives of a step of each cell on several GPUs, at its largest timed batch."""
    largest: dict[str, tuple[int, Measurement]] = {}
    for o in observations:
        if o.measurement is None or not o.measurement.step_collectives:
            continue
        if o.cell.key not in largest or o.batch_size >= largest[o.cell.key][0]:
            largest[o.cell.key] = o.batch_size, o.measurement
    if not largest:
        return ""
    rows = [
        {"cell": key, "batch size": size, **_communication(measurement)}
        for key, (size, measurement) in largest.items()
    ]
    meaning = (
        "Collectives of one step on each GPU, with the bytes of their whole buffers, and the part "
        "of a simulated step in which GPUs only wait for one another:"
    )
    return "\n\n".join(["## Communication", meaning, records_table(rows)])


def _communication(measurement: Measurement) -> dict[str, object]:
    counts = {one.collective: one for one in measurement.step_collectives}
    names: tuple[CollectiveName, ...] = get_args(CollectiveName)
    texts = {
        f"{name}s": f"{counts[name].count} of {memory_text(counts[name].buffer_bytes)}"
        if name in counts
        else ""
        for name in names
    }
    exposed, steps = measurement.exposed_seconds, measurement.step_seconds
    if exposed is None or not steps:
        return {**texts, "waiting": ""}
    return {**texts, "waiting": f"{exposed / statistics.median(steps):.0%}"}


def _unstable_rows(
    timed: Sequence[tuple[Observation, Measurement]], rule: TimingRule
) -> Iterator[tuple[object, ...]]:
    """A row for each cell with unstable probes, on the one with the widest interval."""
    by_cell: defaultdict[str, list[tuple[int, Measurement]]] = defaultdict(list)
    for o, measurement in timed:
        by_cell[o.cell.key].append((o.batch_size, measurement))
    for key, probes in by_cell.items():
        unstable = [probe for probe in probes if any(instability_reasons(probe[1], rule))]
        if unstable:
            batch_size, worst = max(unstable, key=lambda probe: _width(probe[1]))
            causes = "; ".join(instability_reasons(worst, rule))
            yield key, f"{len(unstable)} of {len(probes)} probes", batch_size, causes


def _width(measurement: Measurement) -> float:
    """Width of the interval of the median step time, as a part of the median."""
    interval = median_interval(measurement.step_seconds)
    if interval is None:
        return 0.0
    return (interval[1] - interval[0]) / statistics.median(measurement.step_seconds)


def instability_reasons(measurement: Measurement, rule: TimingRule) -> Iterator[str]:
    """Reasons to distrust the step times of one probe."""
    reason = instability(measurement.step_seconds, measurement.stop_reason, rule)
    if reason is not None:
        yield reason
    before, after = measurement.before, measurement.after
    if before is not None and after is not None:
        throttled = sorted({*before.throttle_reasons, *after.throttle_reasons})
        if throttled:
            yield f"clocks throttled: {', '.join(throttled)}"
        yield from _clock(before, after)
    foreign = None if measurement.memory is None else measurement.memory.foreign_bytes
    if foreign is not None and foreign > FOREIGN_BYTES:
        yield f"another process held {foreign / 2**30:.1f} GiB of the GPU"


def _clock(before: DeviceReading, after: DeviceReading) -> Iterator[str]:
    if before.sm_clock_mhz is None or after.sm_clock_mhz is None:
        return
    if after.sm_clock_mhz < (1 - CLOCK_DROP) * before.sm_clock_mhz:
        yield f"the clock fell from {before.sm_clock_mhz} to {after.sm_clock_mhz} MHz"


def _energy(observation: Observation, measurement: Measurement, joules: float) -> dict[str, object]:
    steps = len(measurement.step_seconds)
    after = measurement.after or DeviceReading()
    return {
        "cell": observation.cell.key,
        "batch size": observation.batch_size,
        "repeat": observation.repeat,
        "joules per example": short(joules / steps / observation.batch_size, 4),
        "watts": f"{joules / math.fsum(measurement.step_seconds):.0f}",
        "SM MHz": "" if after.sm_clock_mhz is None else after.sm_clock_mhz,
        "°C": "" if after.temperature_celsius is None else after.temperature_celsius,
    }
