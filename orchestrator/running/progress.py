"""Progress display of a sweep: a live table on a terminal, plain lines elsewhere."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from gpu_catalog.number_text import short
from gpu_catalog.safe_text import printable
from trials.records.cell import Cell
from trials.records.observation import MEMORY_MISSES, Basis, Observation, Outcome, largest_batch
from trials.records.profile import Logged, Profiled


@dataclass(slots=True)
class _Trial:
    """One trial: its state and its results until now."""

    state: str = "waiting"
    observations: list[Observation] = field(default_factory=list)
    largest: int | None = None
    profiled: list[str] = field(default_factory=list)
    error: str | None = None

    def result(self) -> str:
        """Its result until now, in a few words."""
        if self.error is not None:
            return self.error
        if self.profiled:
            return ", ".join(self.profiled)
        if not self.observations:
            return ""
        last = self.observations[-1]
        tried = f"{last.purpose} {last.batch_size} {last.outcome}"
        if self.largest is None:
            return tried
        return f"largest batch {self.largest}; {fastest(self.observations) or tried}"


def fastest(observations: Sequence[Observation]) -> str | None:
    """Best throughput of a cell's own probes below its smallest batch that missed, as text."""
    lowest_miss = min(
        (o.batch_size for o in observations if o.outcome in MEMORY_MISSES), default=math.inf
    )
    best = max(
        (
            o.cell.ranks * o.batch_size / statistics.median(steps)
            for o in observations
            if o.outcome is Outcome.FITS and o.batch_size < lowest_miss
            # A capped GPU's speed is that of the larger one that stood in for it.
            if o.basis is not Basis.CAPPED
            if o.measurement is not None and (steps := o.micro_batch_seconds)
        ),
        default=None,
    )
    return None if best is None else f"{short(best)} examples/s"


def status_line(text: str) -> Status:
    """A line with a spinner on standard error, on a terminal alone; a context manager."""
    return Console(stderr=True).status(text)


class Progress:
    """Shows the starts, results and ends of a sweep's trials. A context manager.

    Args:
        cells: trials to run.
        complete: trials of the sweep that were complete before.
        earlier: results of the run, of these trials and of others.
        stream: output; a live table if it is a terminal. Standard error by default.
        clock: seconds, monotonic.

    Attributes:
        spent_usd: cost of the whole run; None where nothing is paid for.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        complete: int,
        earlier: Iterable[Logged] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._trials = {cell.key: _Trial() for cell in cells}
        for result in earlier:
            if isinstance(result, Observation) and result.cell.key in self._trials:
                self._trials[result.cell.key].observations.append(result)
        for trial in self._trials.values():
            largest = largest_batch(trial.observations)
            trial.largest = None if largest is None else largest[0]
        self._complete = complete
        self._clock = clock
        self._started = clock()
        self.spent_usd: float | None = None
        # Environment variables can make rich treat a log file as a terminal.
        self._console = Console(
            file=stream,
            force_terminal=stream.isatty(),
            highlight=False,
            soft_wrap=True,
            markup=False,
            emoji=False,
        )
        self._live = (
            Live(console=self._console, get_renderable=self._table, refresh_per_second=2)
            if self._console.is_terminal and not self._console.is_dumb_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, cell: Cell) -> None:
        """Show that a trial runs."""
        trial = self._trials[cell.key]
        trial.state, trial.error = "running", None
        self._line(cell, "started")

    def observed(self, observation: Observation) -> None:
        """Show the result of a probe."""
        trial = self._trials[observation.cell.key]
        trial.observations.append(observation)
        batch, outcome = observation.batch_size, observation.outcome
        if not outcome.is_verdict:
            self._line(observation.cell, f"batch {batch} {outcome}: {observation.detail}")
        largest = largest_batch(trial.observations)
        if observation.purpose == "boundary" and outcome.is_verdict:
            # A batch size that missed once is no longer the largest, however often it fits.
            is_confirmed = largest is not None and largest[0] == batch
            text = (
                f"largest batch {batch} confirmed" if is_confirmed else f"batch {batch} {outcome}"
            )
            self._line(observation.cell, f"{text} in a fresh process")
        if observation.is_drawn and outcome.is_verdict:
            self._line(observation.cell, f"batch {batch} {outcome} with drawn lengths")
        if largest is None:
            trial.largest = None  # the largest of before has missed
        elif largest[0] != trial.largest:
            trial.largest = largest[0]
            larger_gpu = observation.cell.capped_on
            capped = "" if larger_gpu is None else f", found on {larger_gpu} under a memory cap"
            self._line(observation.cell, f"largest batch {largest[0]}{capped}")

    def profiled(self, result: Profiled) -> None:
        """Show the result of a profile."""
        how = "profiled" if result.profile is not None else f"{result.outcome}: {result.detail}"
        text = f"batch {result.batch_size} {how}"
        self._trials[result.cell.key].profiled.append(text)
        self._line(result.cell, text)

    def ended(self, cell: Cell, error: str | None) -> None:
        """Show that a trial ended."""
        trial = self._trials[cell.key]
        trial.state, trial.error = ("done" if error is None else "died"), error
        self._line(cell, f"done, {trial.result()}" if error is None else f"died: {error}")

    def remark(self, text: str) -> None:
        """Show a line that concerns more than one trial."""
        self._console.print(printable(text))

    def summary(self) -> str:
        """Trials done, died, running and waiting, time left and dollars spent, on one line."""
        states = [trial.state for trial in self._trials.values()]
        done, died = states.count("done"), states.count("died")
        parts = [
            f"{self._complete + done}/{self._complete + len(states)} done",
            f"{died} died" if died else "",
            f"{states.count('running')} running",
            f"{states.count('waiting')} waiting",
            self._time_left(done + died, states.count("running"), len(states)),
            "" if self.spent_usd is None else f"${short(self.spent_usd)} spent",
        ]
        return ", ".join(part for part in parts if part)

    def _time_left(self, ended: int, running: int, total: int) -> str:
        if ended in {0, total}:
            return ""
        done = ended + running / 2  # on average, a running trial is half done
        seconds = (self._clock() - self._started) * (total - done) / done
        return (
            f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
        )

    def _line(self, cell: Cell, text: str) -> None:
        if self._live is None:
            self._console.print(printable(f"[{self.summary()}] {cell.key}: {text}"))

    def _table(self) -> Group:
        table = Table("trial", "state", "found so far", box=None, pad_edge=False)
        colours = {"waiting": "dim", "running": "bold", "died": "red"}
        for key, trial in self._trials.items():
            table.add_row(
                *map(printable, (key, trial.state, trial.result())),
                style=colours.get(trial.state, ""),
            )
        # A terminal that is lower than the table shows its beginning.
        return Group(Text(self.summary()), table)
