"""Trials one after another on this machine, without Ray: measured in children, or simulated."""

from collections.abc import Callable, Sequence

from orchestrator.listener import Listener
from trials.child import ChildProber
from trials.simulation.clock import Constants
from trials.simulation.prober import SimulatedProber
from trials.simulation.simulated import SimulatedCell
from trials.simulation.traces import Traces
from trials.trial import TrialTask, run_trial


def run_trials_here(
    tasks: Sequence[TrialTask], listener: Listener, keep_going: Callable[[], bool]
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
        with ChildProber(
            task.setup,
            build_timeout_seconds=task.build_timeout_seconds,
            probe_timeout_seconds=task.probe_timeout_seconds,
        ) as prober:
            run_trial(task, prober, listener.observed, keep_going=keep_going)
        listener.ended(task.cell, None)


def simulate_trials(
    tasks: Sequence[TrialTask], listener: Listener, traces: Traces, constants: Constants
) -> None:
    """Runs trials on models of their GPUs.

    Args:
        tasks: the trials.
        listener: hears of every start, observation and end.
        traces: where what the steps do comes from; all that is missing is traced first.
        constants: what the stack reaches of a GPU.
    """
    cells = [SimulatedCell(task.cell, task.model, traces) for task in tasks]
    # What a step does is the same on every GPU, and so are most of its replays.
    shared = {cell.requests()[0].key: cell for cell in cells}
    # The search asks for a batch of one query first.
    traces.prepare([r for cell in shared.values() for r in cell.requests(alone=True)])
    for task, cell in zip(tasks, cells, strict=True):
        listener.started(task.cell)
        same = shared[cell.requests()[0].key]
        run_trial(task, SimulatedProber(same, task.gpu, constants), listener.observed)
        listener.ended(task.cell, None)
