"""Progress display of a sweep: a bar and a live table on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from gpu_catalog.number_text import dollars
from gpu_catalog.safe_text import printable
from orchestrator.planning.throughput import fastest
from orchestrator.scheduling.node_queue import Task
from orchestrator.trial_labels import fitted_labels, label_forms, labels
from trials.records.cell import Cell
from trials.records.observation import Observation, Purpose, largest_batch
from trials.records.profile import Logged, Profiled
from trials.trial import TrialTask, probe_after

STYLES = {"waiting": "dim", "running": "cyan", "done": "green", "died": "bold red"}
DOING: Mapping[Purpose, str] = {
    "search": "trying batch {}",
    "boundary": "confirming batch {}",
    "drawn": "trying drawn lengths of batch {}",
    "ladder": "timing batch {}",
}
BAR_COLUMNS = 24
HEAD_LINES = 4  # above the rows of the table
MOST_DONE = 0.95  # of a trial that still runs
USUAL_RESULTS = 12  # of a trial, until one has ended (tests/benchmarks/end_forecast.py)
LATER = 1.25  # a new forecast counts once it adds a quarter to the time left
LATER_AT_FIRST = 1.5  # the same before a trial has ended: its first probes are its shortest


@dataclass(frozen=True, slots=True)
class Pace:
    """Results of a trial, and the seconds it has run."""

    results: int
    seconds: float


@dataclass(slots=True)
class EndedTrials:
    """Number of trials that ended, and what they took in all."""

    count: int = 0
    results: int = 0
    seconds: float = 0.0

    def add(self, pace: Pace, count: int = 1) -> None:
        """Count a trial; -1 takes it away, as it runs again."""
        self.count += count
        self.results += count * pace.results
        self.seconds += count * pace.seconds


@dataclass(slots=True)
class _Trial:
    """One trial: its state, since when, and its results until now.

    Attributes:
        label: parts of the cell's key in which the trials differ, from whole ones to the shortest.
        since: when it began to run, on the clock of the display.
        seconds: how long it ran, once it ended.
        heard: when its last result came, or it began.
        results: number of its results since it began.
        task: input of the trial, once it began.
        earlier: number of its observations before it began.
    """

    label: tuple[str, ...]
    state: str = "waiting"
    since: float | None = None
    seconds: float = 0.0
    heard: float = 0.0
    results: int = 0
    task: Task | None = None
    earlier: int = 0
    observations: list[Observation] = field(default_factory=list)
    largest: int | None = None
    profiled: list[str] = field(default_factory=list)
    error: str | None = None

    def pace(self) -> Pace:
        """Its results and seconds, once it ended."""
        return Pace(self.results, self.seconds)

    def doing(self) -> str:
        """Work of the probe that runs now."""
        if not isinstance(self.task, TrialTask):
            return "profiling"
        probe = probe_after(self.task, self.observations[self.earlier :])
        # None: it has what it is for, and ends.
        return "ending" if probe is None else DOING[probe.purpose].format(probe.batch_size)

    def state_at(self, now: float) -> str:
        """Its state; for one that runs, for how long, what its probe does, and for how long."""
        if self.state != "running" or self.since is None:
            return self.state
        probe = f"{self.doing()} {clock_text(now - self.heard)}"
        return f"running {clock_text(now - self.since)}, {probe}"

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


class _Tally:
    """Numbers of trials by state, counted as these change: each line of the progress has them."""

    def __init__(self, number: int) -> None:
        self.states = Counter(waiting=number)
        self.ended = EndedTrials()
        self._running: dict[int, _Trial] = {}

    def start(self, trial: _Trial) -> None:
        """Have a trial run, for the first time or again."""
        self._enter(trial, "running")
        self._running[id(trial)] = trial

    def end(self, trial: _Trial, state: str, seconds: float) -> None:
        """Have a trial end."""
        self._enter(trial, state)
        self._running.pop(id(trial), None)
        trial.seconds = seconds
        self.ended.add(trial.pace())

    def _enter(self, trial: _Trial, state: str) -> None:
        if trial.state in {"done", "died"}:
            self.ended.add(trial.pace(), -1)
        self.states[trial.state] -= 1
        self.states[state] += 1
        trial.state = state

    def running(self, now: float) -> list[Pace]:
        """Paces of the trials that run."""
        trials = self._running.values()
        return [Pace(t.results, now - t.since) for t in trials if t.since is not None]


class EndForecast:
    """Forecast of the end of a sweep, from the pace until now.

    A trial that runs counts by its results or its seconds, of as many as an ended trial took in the
    mean; before any has ended, by its results of as many as is usual. The forecast counts down
    while trials keep about the pace; it is put off only once a new one adds a quarter to the time
    left, and half before any trial has ended.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._end: float | None = None

    def seconds_left(
        self, now: float, total: int, ended: EndedTrials, running: Sequence[Pace]
    ) -> float | None:
        """Seconds to the end; None before the first result.

        Args:
            now: seconds on the clock that the start was on.
            total: number of trials.
            ended: trials that ended.
            running: trials that run.
        """
        if ended.count == total or not (ended.count or any(pace.results for pace in running)):
            return None
        results, seconds = float(USUAL_RESULTS), math.inf
        if ended.count:
            results = max(ended.results / ended.count, 1.0)
            seconds = max(ended.seconds / ended.count, 1e-9)
        parts = (max(pace.results / results, pace.seconds / seconds) for pace in running)
        done = ended.count + sum(min(part, MOST_DONE) for part in parts)
        left = (now - self._started) * (total - done) / done
        later = LATER if ended.count else LATER_AT_FIRST
        if self._end is None or left > later * (self._end - now):
            self._end = now + left
        self._end = min(self._end, now + left)
        return max(self._end - now, 0.0)


def clock_text(seconds: float) -> str:
    """A duration as a clock shows it: 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
        to_simulate: number of trials that are simulated after these.
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
        self._shared, _ = labels(cells)
        forms = label_forms(cells)
        self._trials = {cell.key: _Trial(label) for cell, label in zip(cells, forms, strict=True)}
        for result in earlier:
            if isinstance(result, Observation) and result.cell.key in self._trials:
                self._trials[result.cell.key].observations.append(result)
        for trial in self._trials.values():
            largest = largest_batch(trial.observations)
            trial.largest = None if largest is None else largest[0]
        self._tally = _Tally(len(self._trials))
        self._complete = complete
        self._clock = clock
        self._started = clock()
        self._forecast = EndForecast(self._started)
        self.spent_usd: float | None = None
        self.to_simulate = 0
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

    def started(self, task: Task) -> None:
        """Show that a trial runs."""
        trial = self._trials[task.cell.key]
        self._tally.start(trial)
        trial.error = None
        trial.since = trial.heard = self._clock()
        trial.results, trial.task, trial.earlier = 0, task, len(trial.observations)
        self._line(task.cell, "started")

    def observed(self, observation: Observation) -> None:
        """Show the result of a probe."""
        trial = self._trials[observation.cell.key]
        trial.observations.append(observation)
        self._hear(trial)
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
        trial = self._trials[result.cell.key]
        trial.profiled.append(text)
        self._hear(trial)
        self._line(result.cell, text)

    def _hear(self, trial: _Trial) -> None:
        trial.heard = self._clock()
        trial.results += 1

    def ended(self, cell: Cell, error: str | None) -> None:
        """Show that a trial ended."""
        trial = self._trials[cell.key]
        seconds = 0.0 if trial.since is None else self._clock() - trial.since
        self._tally.end(trial, "done" if error is None else "died", seconds)
        trial.error = error
        self._line(cell, f"done, {trial.result()}" if error is None else f"died: {error}")

    def remark(self, text: str) -> None:
        """Show a line that concerns more than one trial."""
        self._console.print(printable(text))

    @property
    def _total(self) -> int:
        return self._complete + len(self._trials) + self.to_simulate

    def summary(self) -> str:
        """Trials done, died, running and waiting, their time left, dollars spent."""
        states = self._tally.states
        parts = [
            f"{self._complete + states['done']}/{self._total} done",
            f"{states['died']} died" if states["died"] else "",
            f"{states['running']} running",
            f"{states['waiting']} waiting",
            self._time_left(),
            f"then {self.to_simulate} simulated" if self.to_simulate else "",
            "" if self.spent_usd is None else f"${dollars(self.spent_usd)} spent",
        ]
        return ", ".join(part for part in parts if part)

    def _time_left(self) -> str:
        now, total = self._clock(), len(self._trials)
        running = self._tally.running(now)
        seconds = self._forecast.seconds_left(now, total, self._tally.ended, running)
        if seconds is None:
            return ""
        left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        return f"about {left} left"

    def _line(self, cell: Cell, text: str) -> None:
        if self._live is None:
            self._console.print(printable(f"[{self.summary()}] {cell.key}: {text}"))

    def _table(self) -> Group:
        ended = self._complete + self._tally.ended.count
        bar = Table.grid(padding=(0, 1))
        elapsed = clock_text(self._clock() - self._started)
        bar.add_row(
            ProgressBar(
                total=max(self._total, 1),
                completed=ended,
                width=BAR_COLUMNS,
                complete_style="green",
                finished_style="green",
            ),
            Text(f"{elapsed} elapsed, {self.summary()}"),
        )
        shared = [Text(printable(f"each: {self._shared}"), style="dim")] if self._shared else []
        table = Table(box=None, pad_edge=False)
        table.add_column("trial", no_wrap=True)  # the others break their lines for it
        table.add_column("state")
        table.add_column("result until now")
        forms = [trial.label for trial in self._trials.values()]
        own = dict(zip(forms, fitted_labels(forms, self._console.width // 2), strict=True))
        for trial in self._rows():
            cells = (own[trial.label], trial.state_at(self._clock()), trial.result())
            table.add_row(*map(printable, cells), style=STYLES[trial.state])
        return Group(bar, *shared, table)

    def _rows(self) -> Sequence[_Trial]:
        """Trials in the order of the sweep; those that run first where not all have a row."""
        trials = list(self._trials.values())
        if len(trials) + HEAD_LINES <= self._console.height:
            return trials
        order = ("running", "died", "waiting", "done")
        return sorted(trials, key=lambda trial: order.index(trial.state))
