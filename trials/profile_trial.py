"""Profiles of a cell, each batch size in a fresh child like that of a measuring trial."""

import datetime as dt
import time
from collections.abc import Iterator, Sequence

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.child_process.child_prober import Prober
from trials.child_process.forked_child import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest
from trials.records.observation import Outcome
from trials.records.profile import ATTEMPTS, Profiled, ProfileRule
from trials.trial import TrialTask

PROFILE_TIMEOUTS = 3.0  # in timeouts of a probe: more steps, and their events take long to read


class ProfileTask(Record):
    """Input of a profiling run."""

    trial: TrialTask
    rule: ProfileRule
    batch_sizes: tuple[int, ...]
    done: tuple[Profiled, ...] = ()

    @property
    def cell(self) -> Cell:
        """Cell to profile."""
        return self.trial.cell

    @property
    def gpu(self) -> Gpu:
        """Catalog row of the GPU that runs it."""
        return self.trial.gpu


def profiles(
    task: ProfileTask, prober: Prober, *, node_id: str | None = None
) -> Iterator[Profiled]:
    """Profile each batch size, with further attempts where one ends without a verdict.

    Args:
        task: input of the profiling run.
        prober: answers the probes.
        node_id: id of the Ray node; absent outside a cluster.

    Yields:
        Each profile as it ends.
    """
    for batch_size in task.batch_sizes:
        tried = [p for p in task.done if p.batch_size == batch_size]
        while len(tried) < ATTEMPTS:
            profiled, final = _profiled(task, batch_size, tried, prober, node_id)
            tried.append(profiled)
            yield profiled
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
    """Make one attempt; return its profile and whether further attempts are pointless."""
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    request = ProbeRequest(batch_size=batch_size, timing=None, profile=task.rule)
    # Once a profiler was attached to a GPU, the process stays slower: hence a fresh child.
    end = _with_profile(prober.probe(request, fresh=True))
    environment = end.environment
    if environment is not None and node_id is not None:
        environment = environment.model_copy(update={"node_id": node_id})
    profiled = Profiled(
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
    return profiled, end.final


def _with_profile(end: ProbeEnd) -> ProbeEnd:
    if end.outcome is Outcome.FITS and end.profile is None:
        return ProbeEnd(
            Outcome.FAILED, "the child reported FITS without a profile", None, end.environment
        )
    return end
