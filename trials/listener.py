"""Who is told what trials do, wherever they run."""

from typing import Protocol

from trials.records.cell import Cell
from trials.records.profile import Logged


class TrialListener(Protocol):
    """Is told what happens, in the driver."""

    def started(self, cell: Cell) -> None:
        """A trial was placed and runs."""

    def observed(self, observation: Logged) -> None:
        """A probe or a profile ended. Must keep what it told before it returns."""

    def ended(self, cell: Cell, error: str | None) -> None:
        """A trial ended, or died of an error."""
