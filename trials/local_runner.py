"""Trials one after another on this machine, without Ray: measured in children, or simulated."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from trials.listener import TrialListener
from trials.records.observation import Observation
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.simulated_prober import SimulatedProber
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces
from trials.simulation.trace_request import TraceRequest
from trials.trial import TrialTask, child_prober, run_trial


def run_trials_here(
    tasks: Sequence[TrialTask], listener: TrialListener, keep_going: Callable[[], bool]
) -> None:
    """Runs trials in their order, on this machine.

    Args:
        tasks: the trials.
        listener: hears of every start, observation and end.
        keep_going: is asked before each probe; when it says no, everything ends there.
    """
    for task in tasks:
        if not keep_going():
            return
        listener.started(task.cell)
        with child_prober(task) as prober:
            run_trial(task, prober, listener.observed, keep_going=keep_going)
        listener.ended(task.cell, None)


def simulate_trials(
    tasks: Sequence[TrialTask],
    listener: TrialListener,
    traces: Traces,
    constants: EfficiencyConstants,
    lengths: Callable[[int], Sequence[int]] = lambda _: (),
) -> None:
    """Runs trials on models of their GPUs, on all cores.

    Args:
        tasks: the trials.
        listener: hears of every start, observation and end.
        traces: where what the steps do comes from; all that is missing is traced first.
        constants: what the stack reaches of a GPU.
        lengths: tokens of shorter examples to time beside those of a cell's own length.
    """
    groups: dict[str, _Alike] = {}
    requests: dict[str, TraceRequest] = {}
    for task in tasks:
        cell = SimulatedCell(task.cell, task.model, traces)
        # The search asks for a batch of one example first.
        first, *others = cell.requests(alone=True)
        if first.key not in groups:
            groups[first.key] = _Alike([], tuple(lengths(task.cell.seq_len)))
            shorter = groups[first.key].shorter(task, traces).values()
            others += [request for each in shorter for request in each.requests(alone=True)]
        groups[first.key].tasks.append(task)
        requests |= {request.key: request for request in (first, *others)}
    traces.prepare(list(requests.values()))
    for task, observations in _simulated(list(groups.values()), traces, constants):
        listener.started(task.cell)
        for observation in observations:
            listener.observed(observation)
        listener.ended(task.cell, None)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Trials whose steps are the same, on several GPUs, and the shorter lengths to time."""

    tasks: list[TrialTask]
    lengths: tuple[int, ...]

    def shorter(self, task: TrialTask, traces: Traces) -> dict[int, SimulatedCell]:
        """The steps of such a trial at each of the lengths."""
        cells = (task.cell.model_copy(update={"seq_len": tokens}) for tokens in self.lengths)
        return {cell.seq_len: SimulatedCell(cell, task.model, traces) for cell in cells}


Simulated = Iterable[tuple[TrialTask, list[Observation]]]


def _simulated(
    groups: Sequence[_Alike], traces: Traces, constants: EfficiencyConstants
) -> Iterator[tuple[TrialTask, list[Observation]]]:
    """Each trial's observations, group by group."""
    processes = min(len(groups), len(os.sched_getaffinity(0)))
    if processes <= 1:
        for group in groups:
            yield from _of_group(group, traces, constants)
        return
    # A fork would take Ray's threads' locks along.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        told = [pool.submit(_of_group, group, traces.on_disk, constants) for group in groups]
        for future in told:
            yield from future.result()


def _of_group(group: _Alike, traces: Traces, constants: EfficiencyConstants) -> Simulated:
    """Trials whose steps are the same: most of their replays are, too."""
    first = group.tasks[0]
    same = SimulatedCell(first.cell, first.model, traces)
    shorter = group.shorter(first, traces)
    told = []
    for task in group.tasks:
        seen: list[Observation] = []
        prober = SimulatedProber(same, task.gpu, constants, shorter)
        likely = prober.likely_largest(task.batch_limit)
        run_trial(task.model_copy(update={"likely_largest": likely}), prober, seen.append)
        told.append((task, seen))
    return told
