"""Verdict on a probe by those of its ranks: whose fault its end is, and what it measured. No torch.

The ranks of one node are judged by their parent, those of several nodes by the trial.
"""

from collections.abc import Sequence

from trials.records.messages import RankProgress
from trials.records.observation import Measurement, MemoryReading, Outcome, RankReading

# A rank whose neighbour died reports a lost connection, perhaps before that death is seen.
GRACE_SECONDS = 0.5
# A rank whose report of its collectives is this much older than another's does not run at all.
SILENT_SECONDS = 1.0
# In lower case; each is part of an error that another rank's end causes.
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "remote process exited",
    "communicator was aborted",
    "gloo/transport",
    "ncclremoteerror",
)


def is_echo(outcome: Outcome, detail: str) -> bool:
    """Whether another rank's end explains this one."""
    words = detail.lower()
    return outcome is Outcome.FAILED and any(echo in words for echo in ECHOES)


def hanging_line(text: str, waiting: Sequence[RankProgress]) -> str:
    """One line on a probe that took too long, with the ranks that the others wait for.

    A rank that hangs has begun fewer collectives than those that wait for it in one. One that was
    stopped inside a collective has begun as many, and reports no more.

    Args:
        text: how long it took.
        waiting: progress of the ranks that have not answered; at least one.
    """
    newest = min(rank.silent_seconds for rank in waiting)
    fewest = min(rank.begun for rank in waiting)
    behind = [r.rank for r in waiting if r.silent_seconds > newest + SILENT_SECONDS]
    behind = behind or [r.rank for r in waiting if r.begun == fewest]
    if len(behind) == len(waiting):
        return f"{text}: no rank is behind the others"
    whose = ", ".join(map(str, behind))
    word = "rank" if len(behind) == 1 else "ranks"
    return f"{text}: {word} {whose} hung, the others waited"


def measurement_of_ranks(measured: Sequence[Measurement]) -> Measurement:
    """Measurement of a probe by those of its ranks, or of its nodes, in their order.

    A step takes as long as on the slowest rank; memory is that of the rank with the largest peak.
    Energy is the sum of all.
    """
    slowest = max(measured, key=lambda m: sum(m.step_seconds))
    energies = [m.energy_joules for m in measured]
    return slowest.model_copy(
        update={
            "memory": _largest([m.memory for m in measured if m.memory is not None]),
            "model_memory_bytes": max(m.model_memory_bytes or 0 for m in measured),
            "warmup_seconds": _slowest([m.warmup_seconds for m in measured]),
            "step_seconds": _slowest([m.step_seconds for m in measured]),
            "energy_joules": None
            if None in energies
            else sum(joules for joules in energies if joules is not None),
            "ranks": tuple(reading for m in measured for reading in m.ranks),
        }
    )


def with_reading(number: int, measured: Measurement) -> Measurement:
    """Measurement of one rank, with the reading of that rank by its number."""
    assert measured.memory is not None
    reading = RankReading(
        rank=number,
        peak_allocated_bytes=measured.memory.peak_allocated_bytes,
        peak_reserved_bytes=measured.memory.peak_reserved_bytes,
        step_seconds=measured.step_seconds,
        before=measured.before,
        after=measured.after,
    )
    return measured.model_copy(update={"ranks": (reading,)})


def _slowest(of_ranks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(step) for step in zip(*of_ranks, strict=True))


def _largest(readings: Sequence[MemoryReading]) -> MemoryReading:
    """Largest of each number; absent where a rank lacks it."""
    return MemoryReading.model_validate(
        {
            name: None if None in values else max(values)
            for name in MemoryReading.model_fields
            for values in [[getattr(reading, name) for reading in readings]]
        }
    )
