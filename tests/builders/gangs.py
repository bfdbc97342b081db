"""Cells on several ranks, and the processes of ranks."""

import signal
import time
from collections.abc import Sequence

import psutil

from builders.observations import environment, recipe, tiny_cell
from trials.recipes.fields import Method
from trials.recipes.parallel import Parallel, Strategy
from trials.records.cell import Cell
from trials.records.collectives import CollectiveTime
from trials.records.observation import Outcome
from trials.records.profile import LinkTimes


def gang_cell(
    strategy: Strategy = "fsdp2",
    method: Method = "full",
    *,
    gpus: int = 2,
    seq_len: int = 16,
    nodes: int = 1,
) -> Cell:
    """llama-tiny on several CPUs."""
    cell = tiny_cell("llama-tiny", recipe(method), seq_len=seq_len)
    layout = Parallel(gpus=gpus, strategy=strategy, nodes=nodes)
    return cell.model_copy(update={"parallel": layout})


def link_times(cell: Cell, *times: CollectiveTime, **changed: object) -> LinkTimes:
    """Times of the collectives of a cell's ranks."""
    values: dict[str, object] = {
        "cell": cell,
        "outcome": Outcome.FITS,
        "times": times,
        "environment": environment(),
        "started_at": "2026-11-20T12:00:00+00:00",
        "seconds": 36.0,
    }
    return LinkTimes.model_validate(values | changed)


def ranks_of(parent: int) -> list[psutil.Process]:
    """Processes of the ranks of a gang, in their order."""
    return sorted(psutil.Process(parent).children(), key=lambda process: process.pid)


def gone_within(processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Whether processes end within a time; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_to_end(
    victim: psutil.Process, ranks: Sequence[psutil.Process], harm: int = signal.SIGKILL
) -> float:
    """Harm a process in the middle of a probe; seconds until all ranks have ended.

    A minute at most.
    """
    time.sleep(1.0)
    victim.send_signal(harm)
    at = time.monotonic()
    gone_within(ranks, 60)
    return time.monotonic() - at
