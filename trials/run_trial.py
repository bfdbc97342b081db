"""The run of a trial: probe after probe, until its cell is measured."""

import datetime as dt
import math
import time
from collections.abc import Callable, Iterator, Sequence

from trials.child_process.child_prober import ChildProber, Prober
from trials.child_process.fork_server import ForkServers
from trials.child_process.forked_child import ProbeEnd
from trials.drawn_lengths import DrawnBatch
from trials.records.messages import LINK_REQUEST, ProbeRequest, RankPlace
from trials.records.observation import Environment, Observation
from trials.records.profile import LinkTimes
from trials.trial import PlannedProbe, TrialTask, most_attempts, probe_after


def child_prober(
    task: TrialTask,
    timeouts: float = 1.0,
    place: RankPlace | None = None,
    servers: ForkServers | None = None,
) -> ChildProber:
    """Make the prober of a trial, or of its ranks on one of several nodes.

    Args:
        task: input of the trial.
        timeouts: factor on the timeout of a probe.
        place: place of this node's ranks among those of several nodes; None for one node.
        servers: fork server that the last trial left, and that the next one takes; None for none.
    """
    return ChildProber(
        task.setup.model_copy(update={"place": place}),
        build_timeout_seconds=task.build_timeout_seconds,
        probe_timeout_seconds=timeouts * task.probe_timeout_seconds,
        servers=servers,
    )


def run_trial(
    task: TrialTask,
    prober: Prober,
    emit: Callable[[Observation], None],
    *,
    emit_link: Callable[[LinkTimes], None] | None = None,
    keep_going: Callable[[], bool] = lambda: True,
) -> None:
    """Probe until the trial is complete or cannot continue.

    Args:
        task: input of the trial.
        prober: answers the probes.
        emit: called with each observation as its probe ends.
        emit_link: called with the times of the links; None to time none.
        keep_going: called before each probe; False ends the trial.
    """
    timed = emit_link is not None
    for result, _ in trial_results(task, prober, times_links=timed, keep_going=keep_going):
        if isinstance(result, Observation):
            emit(result)
        elif emit_link is not None:
            emit_link(result)


def trial_results(
    task: TrialTask,
    prober: Prober,
    *,
    node_ids: Sequence[str] = (),
    times_links: bool = True,
    keep_going: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[Observation | LinkTimes, bool]]:
    """Probe until the trial is complete or cannot continue; of several GPUs, time links first.

    A build does not depend on the batch size. The trial ends when as many builds in a row fail as a
    probe has attempts, rather than wait for those of the rest of the ladder.

    Args:
        task: input of the trial.
        prober: answers the probes.
        node_ids: ids of its Ray nodes, in the order of its ranks; empty outside a cluster.
        times_links: whether links are to be timed.
        keep_going: called before each probe; False ends the trial.

    Yields:
        Each result as its probe ends, and whether it is the last. A trial that runs out of time, or
        is not to go on, ends without a last one.
    """
    new: list[Observation] = []
    failed_builds = 0
    times_links = times_links and task.times_link(node_ids)
    until = time.monotonic() + (math.inf if task.most_seconds is None else task.most_seconds)
    planned = probe_after(task, new)
    while planned is not None and keep_going():
        if time.monotonic() > until:
            return
        if times_links:
            times_links = False
            yield _link_times(task, prober, node_ids), False
            continue
        observation, final = _observe(task, planned, prober, [*task.done, *new], node_ids)
        new.append(observation)
        silent = not observation.outcome.is_verdict
        failed_builds = failed_builds + 1 if silent and observation.environment is None else 0
        ends = final or failed_builds >= most_attempts(observation.outcome)
        planned = None if ends else probe_after(task, new)
        yield observation, planned is None


def _link_times(task: TrialTask, prober: Prober, node_ids: Sequence[str]) -> LinkTimes:
    """Time the collectives of the ranks, which no probe depends on."""
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    end = prober.probe(LINK_REQUEST)
    return LinkTimes(
        cell=task.cell,
        node_ids=tuple(node_ids),
        outcome=end.outcome,
        detail=end.detail,
        times=end.collectives or (),
        environment=_on_node(end.environment, node_ids),
        started_at=started_at,
        seconds=round(time.monotonic() - started, 3),
    )


def _on_node(environment: Environment | None, node_ids: Sequence[str]) -> Environment | None:
    """Environment of the first of these nodes; unchanged outside a cluster."""
    if environment is None or not node_ids:
        return environment
    return environment.model_copy(update={"node_id": node_ids[0]})


def _observe(
    task: TrialTask,
    planned: PlannedProbe,
    prober: Prober,
    observed: Sequence[Observation],
    node_ids: Sequence[str],
) -> tuple[Observation, bool]:
    """Make one probe; return its observation and whether further attempts are pointless."""
    drawn: tuple[DrawnBatch, ...] = ()
    if planned.purpose == "drawn" and task.drawn is not None:
        drawn = task.drawn.batches(planned.batch_size, seed=planned.repeat)
    request = ProbeRequest(
        batch_size=planned.batch_size,
        timing=task.timing if planned.purpose == "ladder" else None,
        draw=planned.repeat + 1 if planned.purpose == "boundary" else 0,
        lengths=tuple(batch.tokens for batch in drawn),
        padded=tuple(batch.is_padded for batch in drawn),
    )
    started_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    started = time.monotonic()
    end = prober.probe(request, fresh=planned.purpose in {"boundary", "drawn"})
    measured = end.measurement
    if measured is not None and node_ids:
        on_node = (
            reading.model_copy(update={"node_id": node_ids[task.cell.node_of(reading.rank)]})
            for reading in measured.ranks
        )
        measured = measured.model_copy(update={"ranks": tuple(on_node)})
    earlier = [
        o.attempt
        for o in observed
        if (o.purpose, o.batch_size, o.repeat)
        == (planned.purpose, planned.batch_size, planned.repeat)
    ]
    observation = Observation(
        cell=task.cell,
        purpose=planned.purpose,
        batch_size=planned.batch_size,
        lengths=request.lengths,
        repeat=planned.repeat,
        attempt=max(earlier, default=0) + 1,
        outcome=end.outcome,
        detail=end.detail,
        basis=task.basis,
        memory_limit_bytes=_limit(task, end),
        batch_limit=task.batch_limit,
        seed=task.seed,
        measurement=measured,
        environment=_on_node(end.environment, node_ids),
        started_at=started_at,
        seconds=round(time.monotonic() - started, 3),
    )
    return observation, end.final


def _limit(task: TrialTask, end: ProbeEnd) -> int:
    return task.memory_guess_bytes if end.memory_limit_bytes is None else end.memory_limit_bytes
