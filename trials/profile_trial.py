"""Profiles a cell: each batch size in a fresh child, as a trial that measures has it."""

import datetime as dt
import time
from collections.abc import Callable, Sequence

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.child_process.child_prober import Prober
from trials.child_process.fork_server import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest
from trials.records.observation import Outcome
from trials.records.profile import ATTEMPTS, Profiled, ProfileRule
from trials.trial import TrialTask

PROFILE_TIMEOUTS = 3.0  # of a probe: it takes more steps, and reading their events takes long


class ProfileTask(Record):
    """What of a cell is to be profiled.

    Attributes:
        trial: the cell, its model and its device.
        rule: how many steps to take.
        batch_sizes: examples per step, each a profile.
        done: what was tried of them before.
    """

    trial: TrialTask
    rule: ProfileRule
    batch_sizes: tuple[int, ...]
    done: tuple[Profiled, ...] = ()

    @property
    def cell(self) -> Cell:
        """What is profiled."""
        return self.trial.cell

    @property
    def gpu(self) -> Gpu:
        """The catalog row of the GPU that runs it."""
        return self.trial.gpu


def run_profile(
    task: ProfileTask,
    prober: Prober,
    emit: Callable[[Profiled], None],
    *,
    node_id: str | None = None,
) -> None:
    """Profiles each batch size. One that comes to nothing is tried again, unless that is pointless.

    Args:
        task: what to profile.
        prober: answers the probes.
        emit: is given each profile as it ends.
        node_id: the Ray node this runs on; absent outside a cluster.
    """
    for batch_size in task.batch_sizes:
        tried = [p for p in task.done if p.batch_size == batch_size]
        while len(tried) < ATTEMPTS:
            profiled, final = _profiled(task, batch_size, tried, prober, node_id)
            tried.append(profiled)
            emit(profiled)
            if profiled.outcome.is_verdict:
                break
            if final:
                return


def _profiled(
    task: ProfileTask,
    batch_size: int,
    tried: Sequence[Profiled],
    prober: Prober,
    node_id: str | None,
) -> tuple[Profiled, bool]:
    """One try, and whether another is pointless."""
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    request = ProbeRequest(batch_size=batch_size, timing=None, profile=task.rule)
    # A profiler that was once attached to a GPU slows the process down ever after.
    end = _with_profile(prober.probe(request, fresh=True))
    environment = end.environment
    if environment is not None and node_id is not None:
        environment = environment.model_copy(update={"node_id": node_id})
    found = Profiled(
        cell=task.trial.cell,
        batch_size=batch_size,
        attempt=max((p.attempt for p in tried), default=0) + 1,
        outcome=end.outcome,
        detail=end.detail,
        seed=task.trial.seed,
        profile=end.profile,
        environment=environment,
        started_at=started_at,
        seconds=round(time.monotonic() - started, 3),
    )
    return found, end.final


def _with_profile(end: ProbeEnd) -> ProbeEnd:
    if end.outcome is Outcome.FITS and end.profile is None:
        return ProbeEnd(
            Outcome.FAILED, "the child says FITS and has no profile", None, end.environment
        )
    return end
