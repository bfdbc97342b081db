"""Trials on this machine without Ray: measured one after another in children, or simulated."""

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass

from gpu_catalog.errors import UserError
from trials.child_process.fork_server import ForkServers
from trials.child_process.process_pool import process_pool
from trials.listener import TrialListener
from trials.records.cell import Cell
from trials.records.observation import Observation
from trials.run_trial import child_prober, run_trial
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.simulated_prober import SimulatedProber
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces
from trials.simulation.trace_request import SMALLEST, TraceRequest
from trials.simulation.varying_lengths import VaryingLengths
from trials.trial import TrialTask


class KilledError(UserError):
    """A process that simulates was killed."""


def run_trials_here(
    tasks: Iterable[TrialTask], listener: TrialListener, keep_going: Callable[[], bool]
) -> None:
    """Run trials one after another on this machine.

    Args:
        tasks: inputs of the trials, in order.
        listener: receives every start, observation and end.
        keep_going: called before each probe; False ends all trials.
    """
    with ForkServers() as servers:
        for task in tasks:
            if not keep_going():
                return
            listener.started(task)
            with child_prober(task, servers=servers) as prober:
                emit = listener.observed
                run_trial(task, prober, emit, emit_link=emit, keep_going=keep_going)
            listener.ended(task.cell, None)


def simulate_trials(
    tasks: Sequence[TrialTask],
    listener: TrialListener,
    traces: Traces,
    constants: EfficiencyConstants,
    lengths: Callable[[Cell], Sequence[int]] = lambda _: (),
) -> None:
    """Run trials on simulated GPUs, on all cores.

    Args:
        tasks: inputs of the trials.
        listener: receives every start, observation and end.
        traces: traced steps; missing ones are traced first.
        constants: efficiency constants of the stack.
        lengths: shorter sequence lengths of a cell to time too.

    Raises:
        KilledError: a process that simulates was killed; what others have ended is recorded.
    """
    groups: dict[str, _SharedSteps] = {}
    requests: dict[str, TraceRequest] = {}
    for task in tasks:
        cell = SimulatedCell(task.cell, task.model, traces)
        # The search starts with a batch of one example.
        first, *others = cell.requests(alone=True)
        if first.key not in groups:
            groups[first.key] = _SharedSteps([], tuple(lengths(task.cell)))
            shorter = groups[first.key].shorter(task, traces).values()
            if task.drawn is None:
                others += [r for timed in shorter for r in timed.requests(alone=True)]
            else:
                varying = VaryingLengths(cell, task.drawn.batches)
                others += varying.requests(alone=True)
                timed = ((varying.timed(s, size), size) for s in shorter for size in (1, SMALLEST))
                others += [one.request_of(size) for one, size in timed]
        groups[first.key].tasks.append(task)
        requests |= {request.key: request for request in (first, *others)}
    traces.prepare(list(requests.values()))
    with closing(_simulated(list(groups.values()), traces, constants)) as results:
        for task, observations in results:
            listener.started(task)
            for observation in observations:
                listener.observed(observation)
            listener.ended(task.cell, None)


@dataclass(frozen=True, slots=True)
class _SharedSteps:
    """Trials with equal steps on several GPUs, and the shorter lengths to time."""

    tasks: list[TrialTask]
    lengths: tuple[int, ...]

    def shorter(self, task: TrialTask, traces: Traces) -> dict[int, SimulatedCell]:
        """Cells of a trial at the shorter lengths, by length."""
        cells = (task.cell.model_copy(update={"seq_len": tokens}) for tokens in self.lengths)
        return {cell.seq_len: SimulatedCell(cell, task.model, traces) for cell in cells}


Simulated = Iterable[tuple[TrialTask, list[Observation]]]


def _simulated(
    groups: Sequence[_SharedSteps], traces: Traces, constants: EfficiencyConstants
) -> Generator[tuple[TrialTask, list[Observation]]]:
    """Simulate the trials of all groups, and yield the observations of each as its group ends."""
    processes = min(len(groups), len(os.sched_getaffinity(0)))
    if processes <= 1:
        for group in groups:
            yield from _group_trials(group, traces, constants)
        return
    try:
        with process_pool(processes) as pool:
            work = (
                pool.submit(_group_trials, group, traces.on_disk, constants) for group in groups
            )
            for ended in as_completed(work):
                yield from ended.result()
    except BrokenProcessPool:
        raise KilledError(
            "a process that simulates was killed: free some memory, and run the same command again"
        ) from None


def _group_trials(group: _SharedSteps, traces: Traces, constants: EfficiencyConstants) -> Simulated:
    """Simulate the trials of a group, whose equal steps share most of their replays."""
    first = group.tasks[0]
    same = SimulatedCell(first.cell, first.model, traces)
    shorter = group.shorter(first, traces)
    varying = None if first.drawn is None else VaryingLengths(same, first.drawn.batches)
    results = []
    for task in group.tasks:
        observations: list[Observation] = []
        prober = SimulatedProber(same, task.gpu, constants, shorter, varying)
        likely = prober.likely_largest(task.batch_limit)
        run_trial(task.model_copy(update={"likely_largest": likely}), prober, observations.append)
        results.append((task, observations))
    return results
