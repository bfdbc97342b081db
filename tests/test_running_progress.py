"""What a person is shown while a sweep runs: plain lines in a log, a live table on a terminal."""

import io
import re
from dataclasses import dataclass

import pytest
from builders.observations import measurement, observation
from builders.runs import TWO_CELLS, spec_of, whole_trial

from orchestrator.running.progress import Progress, fastest
from trials.records.observation import Basis, Outcome

SPEC = spec_of(TWO_CELLS.replace("[16, 32]", "[8, 16, 32, 64]"))
FIRST, SECOND, THIRD, FOURTH = CELLS = SPEC.all_cells()


@dataclass
class Clock:
    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(log: io.StringIO) -> list[str]:
    """What was written."""
    return log.getvalue().splitlines()


def test_a_trial_that_goes_on_is_told_with_what_it_knew() -> None:
    """Its largest batch is of before; so is that of others, which are not of this sweep."""
    log = io.StringIO()
    *before, last = whole_trial(FIRST, SPEC)
    known = [*before, *whole_trial(SECOND, SPEC)]
    with Progress([FIRST], complete=1, earlier=known, stream=log) as progress:
        progress.started(FIRST)
        progress.observed(last)
        progress.ended(FIRST, None)
    assert lines(log)[1:] == [
        f"[2/2 done, 0 running, 0 waiting] {FIRST.key}: done, largest batch 40; 800 examples/s"
    ]


def test_log_has_a_plain_line_for_every_start_find_and_end() -> None:
    """Each with how far the sweep is; trials done before count as done."""
    log, clock = io.StringIO(), Clock()
    with Progress(CELLS, complete=2, stream=log, clock=clock) as progress:
        progress.started(FIRST)
        progress.started(SECOND)
        for o in whole_trial(FIRST, SPEC):
            progress.observed(o)
        clock.seconds += 20
        progress.ended(FIRST, None)
        progress.ended(SECOND, "the node is gone")
    assert lines(log) == [
        f"[2/6 done, 1 running, 3 waiting] {FIRST.key}: started",
        f"[2/6 done, 2 running, 2 waiting] {SECOND.key}: started",
        f"[2/6 done, 2 running, 2 waiting] {FIRST.key}: largest batch 40",
        (
            f"[3/6 done, 1 running, 2 waiting, about 33 s left] {FIRST.key}: done, "
            "largest batch 40; 800 examples/s"
        ),
        (
            f"[3/6 done, 1 died, 0 running, 2 waiting, about 20 s left] {SECOND.key}: "
            "died: the node is gone"
        ),
    ]


@pytest.mark.parametrize(
    ("elapsed", "left"), [(0.0, "about 0 s"), (29.6, "about 89 s"), (100.0, "about 5 min")]
)
def test_time_left_is_told_in_proportion_to_what_ended(elapsed: float, left: str) -> None:
    """From the clock it was given; one of four trials took so long."""
    clock = Clock()
    progress = Progress(CELLS, complete=0, stream=io.StringIO(), clock=clock)
    clock.seconds += elapsed
    assert progress.summary() == "0/4 done, 0 running, 4 waiting"
    progress.ended(FIRST, None)
    assert progress.summary() == f"1/4 done, 0 running, 3 waiting, {left} left"
    for cell in (SECOND, THIRD, FOURTH):
        progress.ended(cell, None)
    assert progress.summary() == "4/4 done, 0 running, 0 waiting"
    progress.spent_usd = 1.2345
    assert progress.summary() == "4/4 done, 0 running, 0 waiting, $1.23 spent"


def test_trials_that_tell_in_turns_and_backwards_are_told_apart() -> None:
    """The largest batch is known when its last witness is there, whichever that is."""
    log = io.StringIO()
    progress = Progress(CELLS, complete=0, stream=log)
    small = whole_trial(FIRST, SPEC, largest=3)
    large = whole_trial(SECOND, SPEC, largest=50)
    for turn in range(max(len(small), len(large))):
        for seen in (small, large):
            if turn < len(seen):
                progress.observed(seen[-1 - turn])
    found = [line.partition("] ")[2] for line in lines(log)]
    assert found == [f"{FIRST.key}: largest batch 3", f"{SECOND.key}: largest batch 50"]


def test_largest_batch_that_turns_out_smaller_is_told_again() -> None:
    """As when a second visit no longer fits."""
    log = io.StringIO()
    progress = Progress(CELLS, complete=0, stream=log)
    for batch_size, outcome in (
        (8, Outcome.FITS),
        (9, Outcome.OUT_OF_MEMORY),
        (8, Outcome.THRASHING),
        (7, Outcome.FITS),
    ):
        progress.observed(observation(batch_size, outcome, cell=FIRST))
    assert [line.rpartition(": ")[2] for line in lines(log)] == [
        "largest batch 8",
        "largest batch 7",
    ]


def test_repeats_of_the_largest_batch_are_told() -> None:
    """Each by what it ended in; after one miss no fit confirms that size any more."""
    log = io.StringIO()
    progress = Progress(CELLS, complete=0, stream=log)
    for purpose, batch_size, outcome in (
        ("search", 12, Outcome.FITS),
        ("search", 13, Outcome.OUT_OF_MEMORY),
        ("boundary", 12, Outcome.FITS),
        ("boundary", 12, Outcome.THRASHING),
        ("boundary", 12, Outcome.FITS),
        ("search", 11, Outcome.FITS),
    ):
        progress.observed(observation(batch_size, outcome, cell=FIRST, purpose=purpose))
    assert [line.rpartition(": ")[2] for line in lines(log)] == [
        "largest batch 12",
        "largest batch 12 confirmed in a fresh process",
        "batch 12 THRASHING in a fresh process",
        "batch 12 FITS in a fresh process",
        "largest batch 11",
    ]


def test_largest_batch_that_missed_is_not_shown_any_more(terminal: Terminal) -> None:
    """Until the search has found the next one, none is known."""
    with Progress(CELLS, complete=0, stream=terminal) as progress:
        progress.observed(observation(12, cell=FIRST))
        progress.observed(observation(13, Outcome.OUT_OF_MEMORY, cell=FIRST))
        progress.observed(observation(12, Outcome.THRASHING, cell=FIRST, purpose="boundary"))
    _, _, first, *_ = last_picture(terminal)
    assert first.split(maxsplit=2) == [FIRST.key, "waiting", "boundary 12 THRASHING"]


def test_capped_cell_is_told_for_what_it_is() -> None:
    """Its largest batch was found on another GPU, whose speed is not its own."""
    cell = FIRST.model_copy(update={"gpu": "A40", "capped_on": "H200-SXM"})
    log = io.StringIO()
    progress = Progress([cell], complete=0, stream=log)
    fit = {"cell": cell, "basis": Basis.CAPPED, "measurement": measurement(step_seconds=(0.1,))}
    progress.observed(observation(8, **fit))
    progress.observed(observation(9, Outcome.OUT_OF_MEMORY, cell=cell, basis=Basis.CAPPED))
    progress.ended(cell, None)
    assert [line.rpartition("seq8: ")[2] for line in lines(log)] == [
        "largest batch 8, found on H200-SXM under a memory cap",
        "done, largest batch 8; search 9 OUT_OF_MEMORY",
    ]


def test_failed_probe_is_told_as_it_was_said() -> None:
    """Neither its brackets nor its colons are taken for markup or pictures."""
    log = io.StringIO()
    progress = Progress(CELLS, complete=0, stream=log)
    detail = "[bold]x.py:100: std::bad_alloc [/red] " + "long " * 60
    progress.observed(observation(4, Outcome.FAILED, cell=FIRST, detail=detail))
    progress.ended(FIRST, "worker.py:100: [red]gone")
    assert lines(log) == [
        f"[0/4 done, 0 running, 4 waiting] {FIRST.key}: batch 4 FAILED: {detail}",
        (
            f"[0/4 done, 1 died, 0 running, 3 waiting, about 0 s left] {FIRST.key}: "
            "died: worker.py:100: [red]gone"
        ),
    ]


def test_log_stays_plain_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build servers do that; a log file is no terminal for it."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = io.StringIO()
    with Progress(CELLS, complete=0, stream=log) as progress:
        progress.started(FIRST)
    assert log.getvalue() == f"[0/4 done, 1 running, 3 waiting] {FIRST.key}: started\n"


def last_picture(terminal: Terminal) -> list[str]:
    """The lines it shows in the end, without colours."""
    picture = re.split(r"\r|\x1b\[1A", terminal.getvalue())[-1]
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", picture).splitlines()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 120 columns and 12 rows."""
    for name, value in {"COLUMNS": "120", "LINES": "12", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_terminal_shows_every_trial_with_its_state_and_find(terminal: Terminal) -> None:
    """And why one died, which a log would have a line for."""
    with Progress(CELLS, complete=1, stream=terminal) as progress:
        for cell in (FIRST, SECOND, THIRD):
            progress.started(cell)
        for o in whole_trial(FIRST, SPEC):
            progress.observed(o)
        progress.observed(observation(4, cell=THIRD))
        progress.ended(FIRST, None)
        progress.ended(SECOND, "worker.py:100: [red]gone")
    summary, _, *rows = last_picture(terminal)
    assert summary.startswith("2/5 done, 1 died, 1 running, 1 waiting")
    assert [row.split(maxsplit=2) for row in rows] == [
        [FIRST.key, "done", "largest batch 40; 800 examples/s"],
        [SECOND.key, "died", "worker.py:100: [red]gone"],
        [THIRD.key, "running", "search 4 FITS"],
        [FOURTH.key, "waiting"],
    ]


def test_low_terminal_still_shows_how_far_the_sweep_is(terminal: Terminal) -> None:
    """Though it has not the rows for every trial."""
    many = spec_of(TWO_CELLS.replace("[16, 32]", str(list(range(1, 41))))).all_cells()
    with Progress(many, complete=0, stream=terminal) as progress:
        progress.started(many[0])
        shown = last_picture(terminal)
    assert shown[0].startswith("0/40 done, ")
    assert len(shown) == 12
    assert shown[2].startswith(f"{many[0].key} ")


def test_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an editor."""
    monkeypatch.setenv("TERM", "dumb")
    with Progress(CELLS, complete=0, stream=terminal) as progress:
        progress.started(FIRST)
    assert terminal.getvalue() == f"[0/4 done, 1 running, 3 waiting] {FIRST.key}: started\n"


def test_fastest_is_the_best_median_of_the_timed_probes() -> None:
    """One slow step does not hide a fast batch; searches without times do not count."""
    assert fastest([]) is None
    assert fastest([observation(64)]) is None
    seen = [
        observation(1, measurement=measurement(step_seconds=(0.01, 0.01, 5.0))),
        observation(4, measurement=measurement(step_seconds=(0.01, 0.02, 0.03, 0.04))),
        observation(8, measurement=measurement(step_seconds=(0.1,))),
        observation(9, Outcome.OUT_OF_MEMORY),
    ]
    assert fastest(seen) == "160 examples/s"


def test_fastest_is_of_sizes_that_one_can_train_at() -> None:
    """A batch that thrashes is not fast, nor is one of a size that missed another time."""
    quick = measurement(step_seconds=(0.001,))
    seen = [
        observation(1, measurement=measurement(step_seconds=(0.5,))),
        observation(8, Outcome.THRASHING, measurement=quick),
        observation(8, measurement=quick),
    ]
    assert fastest(seen) == "2 examples/s"
