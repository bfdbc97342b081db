"""What the driver hears when Tune gives up on everything at once."""

from types import SimpleNamespace

from made_runs import TWO_CELLS, spec_of

from orchestrator.runner import _first_line, _Relay
from trials.observation import Observation
from trials.workload import Cell

FIRST, SECOND = spec_of(TWO_CELLS).all_cells()


class Diary:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.ends: list[tuple[Cell, str | None]] = []

    def started(self, cell: Cell) -> None:
        """Heard, and not kept."""

    def observed(self, observation: Observation) -> None:
        """As above."""

    def ended(self, cell: Cell, error: str | None) -> None:
        self.ends.append((cell, error))


def trial(cell: Cell) -> SimpleNamespace:
    """As Tune hands it to its callbacks."""
    return SimpleNamespace(config={"trial": {"cell": cell.key}})


def test_trials_that_began_and_did_not_end_are_told_to_have_died() -> None:
    """Ray kills workers where memory runs low, and Tune raises for all trials: none is lost."""
    diary = Diary()
    relay = _Relay(diary, {cell.key: cell for cell in (FIRST, SECOND)})
    relay.started(trial(FIRST))
    relay.started(trial(SECOND))
    relay.ended(trial(FIRST), None)
    relay.all_ended("the node ran low on memory")
    relay.all_ended("twice")
    assert diary.ends == [(FIRST, None), (SECOND, "the node ran low on memory")]


def test_the_reason_is_one_line() -> None:
    """Ray's runs over a page."""
    error = RuntimeError("Caught unexpected exception: 2 worker(s) were killed\nOOM kill reason: …")
    assert _first_line(error) == "2 worker(s) were killed"
    assert _first_line(ValueError()) == "ValueError()"
