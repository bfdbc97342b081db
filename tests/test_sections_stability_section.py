"""The sections of unstable step times, with their reasons, and of energy and collectives."""

import pytest
from builders.gangs import gang_cell
from builders.observations import MIB, measurement, observation

from orchestrator.reporting.sections.stability_section import (
    communication_section,
    instability_reasons,
    stability_section,
)
from trials.records.collectives import CollectiveCount
from trials.records.observation import DeviceReading, MemoryReading
from trials.records.timing_rule import TimingRule

RULE = TimingRule()
WIDE = "the median is known to ±33.3% only, timing ended at the time cap; steps became 100% slower"
STEADY = measurement(step_seconds=(0.1,) * 12)


def test_stable_steps_have_no_reason_and_no_section() -> None:
    """Twelve equal steps are stable."""
    assert list(instability_reasons(STEADY, RULE)) == []
    assert stability_section([observation(1, measurement=STEADY)], RULE) == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"step_seconds": (0.1,) * 6 + (0.2,) * 6, "stop_reason": "time cap"},
            WIDE,
        ),
        (
            {"before": DeviceReading(), "after": DeviceReading(throttle_reasons=("SwPowerCap",))},
            "clocks throttled: SwPowerCap",
        ),
        (
            {
                "before": DeviceReading(sm_clock_mhz=1980),
                "after": DeviceReading(sm_clock_mhz=1500),
            },
            "the clock fell from 1980 to 1500 MHz",
        ),
        (
            {"memory": MemoryReading(peak_allocated_bytes=1, foreign_bytes=3 * 2**30)},
            "another process held 3.0 GiB of the GPU",
        ),
    ],
)
def test_every_reason_for_instability_is_listed(changed: dict[str, object], reason: str) -> None:
    """In words, in the row of its cell."""
    unstable = STEADY.model_copy(update=changed)
    assert "; ".join(instability_reasons(unstable, RULE)) == reason
    assert reason in stability_section([observation(4, measurement=unstable)], RULE)


def test_a_cell_has_one_row_with_its_worst_probe() -> None:
    """Dozens of rows would hide the cells to measure again."""
    wide = STEADY.model_copy(update={"step_seconds": (0.1, 0.2) * 6, "stop_reason": "step cap"})
    wider = STEADY.model_copy(update={"step_seconds": (0.1, 0.5) * 6, "stop_reason": "step cap"})
    observations = [observation(b, measurement=m) for b, m in ((1, wide), (2, wider), (3, STEADY))]
    text = stability_section(observations, RULE)
    (row,) = [line for line in text.splitlines() if "llama-tiny" in line]
    assert [part.strip() for part in row.split("|")[2:4]] == ["2 of 3 probes", "2"]


def test_energy_is_per_example() -> None:
    """600 J over 12 steps of 4 examples in 1.2 s: 12.5 J an example, 500 W."""
    drawn = STEADY.model_copy(
        update={
            "energy_joules": 600.0,
            "after": DeviceReading(sm_clock_mhz=1980, temperature_celsius=61),
        }
    )
    text = stability_section([observation(4, measurement=drawn)], RULE)
    (row,) = [line for line in text.splitlines() if "llama-tiny" in line]
    assert [part.strip() for part in row.split("|")[2:-1]] == [
        "4",
        "0",
        "12.5",
        "500",
        "1980",
        "61",
    ]


def test_communication_is_that_of_the_largest_timed_batch() -> None:
    """A kind that a step lacks is empty, as the waiting of measured steps is; one GPU has none."""
    counts = (CollectiveCount(collective="all-gather", count=9, buffer_bytes=3 * MIB),)
    moved = STEADY.model_copy(update={"step_collectives": counts})
    waiting = moved.model_copy(update={"exposed_seconds": 0.25 * STEADY.step_seconds[0]})
    probes = [
        observation(4, cell=gang_cell(), measurement=moved),
        observation(2, cell=gang_cell(), measurement=STEADY),
        observation(8, cell=gang_cell(gpus=4), measurement=waiting),
        observation(16, measurement=STEADY),
    ]
    text = communication_section(probes)
    rows = [line.split("|")[2:-1] for line in text.splitlines() if "fsdp2" in line]
    measured, simulated = ([text.strip() for text in row] for row in rows)
    assert measured == ["4", "9 of 3.00 MiB", "", "", ""]
    assert simulated == ["8", "9 of 3.00 MiB", "", "", "25%"]
    assert communication_section(probes[-1:]) == ""
