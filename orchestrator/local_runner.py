"""Trials one after another in this process's children, without Ray: for a machine that has none."""

from collections.abc import Callable, Sequence

from orchestrator.listener import Listener
from trials.child import ChildProber
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
