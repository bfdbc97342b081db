"""Interface for the events of trials, on whichever machine they run."""

from typing import Protocol

from trials.profile_trial import ProfileTask
from trials.records.cell import Cell
from trials.records.profile import Logged
from trials.trial import TrialTask


class TrialListener(Protocol):
    """Receives the events of trials in the driver."""

    def started(self, task: TrialTask | ProfileTask) -> None:
        """Note that a trial was placed and runs."""

    def observed(self, observation: Logged) -> None:
        """Store the observation of a probe or profile that ended, durably before it returns."""

    def ended(self, cell: Cell, error: str | None) -> None:
        """Note the end of a trial, with its error if it died of one."""
