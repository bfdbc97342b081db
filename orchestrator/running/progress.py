"""What a sweep is doing, for a person: a live table on a terminal, plain lines elsewhere."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trials.records.cell import Cell
from trials.records.observation import MEMORY_MISSES, Basis, Observation, Outcome, largest_batch
from trials.records.profile import Logged, Profiled


@dataclass(slots=True)
class _Trial:
    """What is known of one trial so far."""

    state: str = "waiting"
    seen: list[Observation] = field(default_factory=list)
    largest: int | None = None
    profiled: list[str] = field(default_factory=list)
    error: str | None = None

    def finding(self) -> str:
        if self.error is not None:
            return self.error
        if self.profiled:
            return ", ".join(self.profiled)
        if not self.seen:
            return ""
        last = self.seen[-1]
        tried = f"{last.purpose} {last.batch_size} {last.outcome}"
        if self.largest is None:
            return tried
        return f"largest batch {self.largest}; {fastest(self.seen) or tried}"


def fastest(seen: Sequence[Observation]) -> str | None:
    """The best throughput of a cell's own probes at sizes that never missed, as text."""
    lowest_miss = min((o.batch_size for o in seen if o.outcome in MEMORY_MISSES), default=math.inf)
    best = max(
        (
            o.batch_size / statistics.median(steps)
            for o in seen
            if o.outcome is Outcome.FITS and o.batch_size < lowest_miss
            # A capped GPU's speed is that of the larger one that stood in for it.
            if o.basis is not Basis.CAPPED
            if o.measurement is not None and (steps := o.measurement.step_seconds)
        ),
        default=None,
    )
    return None if best is None else f"{best:.3g} examples/s"


class Progress:
    """Follows a sweep's trials. A context manager; told of starts, observations and ends.

    Args:
        cells: the trials to run.
        complete: how many trials of the sweep were done before.
        known: what was observed before, of these trials and of others.
        stream: where to write; a live table when it is a terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        complete: int,
        known: Iterable[Logged] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._trials = {cell.key: _Trial() for cell in cells}
        for seen in known:
            if isinstance(seen, Observation) and seen.cell.key in self._trials:
                self._trials[seen.cell.key].seen.append(seen)
        for trial in self._trials.values():
            largest = largest_batch(trial.seen)
            trial.largest = None if largest is None else largest[0]
        self._complete = complete
        self._clock = clock
        self._started = clock()
        self.spent_usd: float | None = None  # by the whole run, where anything is paid
        # The environment can make rich take a log file for a terminal; the stream knows.
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
        """A trial runs."""
        trial = self._trials[cell.key]
        trial.state, trial.error = "running", None
        self._line(cell, "started")

    def observed(self, observation: Observation) -> None:
        """A probe ended."""
        trial = self._trials[observation.cell.key]
        trial.seen.append(observation)
        batch, outcome = observation.batch_size, observation.outcome
        if not outcome.is_verdict:
            self._line(observation.cell, f"batch {batch} {outcome}: {observation.detail}")
        known = largest_batch(trial.seen)
        if observation.purpose == "boundary" and outcome.is_verdict:
            # A size that missed once is the largest no more, however often it fits.
            confirmed = known is not None and known[0] == batch
            said = f"largest batch {batch} confirmed" if confirmed else f"batch {batch} {outcome}"
            self._line(observation.cell, f"{said} in a fresh process")
        if known is None:
            trial.largest = None  # also one that was known and then missed
        elif known[0] != trial.largest:
            trial.largest = known[0]
            large = observation.cell.capped_on
            capped = "" if large is None else f", found on {large} under a memory cap"
            self._line(observation.cell, f"largest batch {known[0]}{capped}")

    def profiled(self, found: Profiled) -> None:
        """A profile ended."""
        how = "profiled" if found.profile is not None else f"{found.outcome}: {found.detail}"
        text = f"batch {found.batch_size} {how}"
        self._trials[found.cell.key].profiled.append(text)
        self._line(found.cell, text)

    def ended(self, cell: Cell, error: str | None) -> None:
        """A trial is over."""
        trial = self._trials[cell.key]
        trial.state, trial.error = ("done" if error is None else "died"), error
        self._line(cell, f"done, {trial.finding()}" if error is None else f"died: {error}")

    def remark(self, text: str) -> None:
        """Something that concerns more than one trial."""
        self._console.print(text)

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
            "" if self.spent_usd is None else f"${self.spent_usd:.3g} spent",
        ]
        return ", ".join(part for part in parts if part)

    def _time_left(self, ended: int, running: int, total: int) -> str:
        if ended in {0, total}:
            return ""
        made = ended + running / 2  # a running trial is, on average, half made
        seconds = (self._clock() - self._started) * (total - made) / made
        return (
            f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
        )

    def _line(self, cell: Cell, text: str) -> None:
        if self._live is None:
            self._console.print(f"[{self.summary()}] {cell.key}: {text}")

    def _table(self) -> Group:
        table = Table("trial", "state", "found so far", box=None, pad_edge=False)
        colours = {"waiting": "dim", "running": "bold", "died": "red"}
        for key, trial in self._trials.items():
            table.add_row(key, trial.state, trial.finding(), style=colours.get(trial.state, ""))
        # A terminal lower than the table shows its beginning.
        return Group(Text(self.summary()), table)
