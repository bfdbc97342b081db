"""Progress of a sweep: plain lines in a log, a live table on a terminal."""

import io
import re
from dataclasses import dataclass

import pytest
from builders.observations import measurement, observation
from builders.runs import TWO_CELLS, spec_of, whole_trial

from orchestrator.planning.plan import trial_task
from orchestrator.running.progress import Progress
from orchestrator.spec.spec_file import shipped_specs
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Basis, Outcome
from trials.trial import TrialTask

SPEC = spec_of(TWO_CELLS.replace("[16, 32]", "[8, 16, 32, 64]"))
FIRST, SECOND, THIRD, FOURTH = CELLS = SPEC.all_cells()


def task_of(cell: Cell, spec: SweepSpec = SPEC) -> TrialTask:
    """Input of a cell's trial."""
    return trial_task(spec, spec.merged_catalog(), cell, [])


@dataclass
class Clock:
    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(log: io.StringIO) -> list[str]:
    """The lines that were written."""
    return log.getvalue().splitlines()


def assert_lines(written: list[str], *expected: tuple[str, ...]) -> None:
    """Check that there are as many lines as expected, each with all of its parts."""
    absent = [
        (line, [part for part in parts if part not in line])
        for line, parts in zip(written, expected, strict=True)
    ]
    assert absent == [(line, []) for line in written]


def test_a_resumed_trial_shows_its_earlier_results() -> None:
    """Earlier observations of this and other cells count."""
    log = io.StringIO()
    *before, last = whole_trial(FIRST, SPEC)
    earlier = [*before, *whole_trial(SECOND, SPEC)]
    with Progress([FIRST], complete=1, earlier=earlier, stream=log) as progress:
        progress.started(task_of(FIRST))
        progress.observed(last)
        progress.ended(FIRST, None)
    counts = ("2/2 done", "0 running", "0 waiting")
    assert_lines(lines(log)[1:], (*counts, f"{FIRST.key}: done", "batch 40", "800 examples/s"))


def test_log_has_a_plain_line_for_every_start_result_and_end() -> None:
    """Every line has the progress; trials completed before count as done."""
    log, clock = io.StringIO(), Clock()
    with Progress(CELLS, complete=2, stream=log, clock=clock) as progress:
        progress.started(task_of(FIRST))
        progress.started(task_of(SECOND))
        for o in whole_trial(FIRST, SPEC):
            progress.observed(o)
        clock.seconds += 20
        progress.ended(FIRST, None)
        progress.ended(SECOND, "the node is gone")
    first, second = f"{FIRST.key}: ", f"{SECOND.key}: "
    assert_lines(
        lines(log),
        ("2/6 done", "1 running", "3 waiting", f"{first}started"),
        ("2/6 done", "2 running", "2 waiting", f"{second}started"),
        ("2/6 done", "2 running", "2 waiting", first, "batch 40"),
        (
            "3/6 done",
            "1 running",
            "2 waiting",
            "21 s",
            f"{first}done",
            "batch 40",
            "800 examples/s",
        ),
        ("1 died", "2 waiting", "20 s", f"{second}died: the node"),
    )


@pytest.mark.parametrize(
    ("elapsed", "left"), [(0.0, " 0 s "), (29.6, " 89 s "), (100.0, " 5 min ")]
)
def test_remaining_time_is_proportional_to_the_trials_left(elapsed: float, left: str) -> None:
    """One of four trials took this long on the test's clock."""
    clock = Clock()
    progress = Progress(CELLS, complete=0, stream=io.StringIO(), clock=clock)
    clock.seconds += elapsed
    assert progress.summary().startswith("0/4 done")
    assert "left" not in progress.summary()
    progress.ended(FIRST, None)
    assert_lines([progress.summary()], ("1/4 done", "0 running", "3 waiting", left))
    for cell in (SECOND, THIRD, FOURTH):
        progress.ended(cell, None)
    assert_lines([progress.summary()], ("4/4 done", "0 running", "0 waiting"))
    assert "$" not in progress.summary()
    progress.spent_usd = 1.2345
    assert "4/4 done" in progress.summary()
    assert "$1.23" in progress.summary()


def test_trials_that_are_simulated_later_count() -> None:
    """They are no part of the time left."""
    progress = Progress([FIRST], complete=1, stream=io.StringIO(), clock=Clock())
    progress.to_simulate = 7
    assert progress.summary() == "1/9 done, 0 running, 1 waiting, then 7 simulated"
    progress.ended(FIRST, None)
    assert progress.summary() == "2/9 done, 0 running, 0 waiting, then 7 simulated"


def test_interleaved_and_reversed_trials_are_kept_apart() -> None:
    """The largest batch appears with its last piece of evidence, in whatever order."""
    log = io.StringIO()
    progress = Progress(CELLS, complete=0, stream=log)
    small = whole_trial(FIRST, SPEC, largest=3)
    large = whole_trial(SECOND, SPEC, largest=50)
    for turn in range(max(len(small), len(large))):
        for observations in (small, large):
            if turn < len(observations):
                progress.observed(observations[-1 - turn])
    assert_lines(lines(log), (FIRST.key, "largest batch 3"), (SECOND.key, "largest batch 50"))


def test_a_smaller_largest_batch_is_reported_again() -> None:
    """A second visit may miss where the first fitted."""
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


def test_repeats_of_the_largest_batch_are_reported() -> None:
    """Each has its outcome; after one miss no fit confirms that size."""
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
    assert_lines(
        lines(log),
        ("largest batch 12",),
        ("batch 12 confirmed",),
        ("batch 12 THRASHING",),
        ("batch 12 FITS",),
        ("largest batch 11",),
    )


def test_largest_batch_that_missed_is_no_longer_shown(terminal: Terminal) -> None:
    """It is unknown until the search finds the next one."""
    with Progress(CELLS, complete=0, stream=terminal) as progress:
        progress.observed(observation(12, cell=FIRST))
        progress.observed(observation(13, Outcome.OUT_OF_MEMORY, cell=FIRST))
        progress.observed(observation(12, Outcome.THRASHING, cell=FIRST, purpose="boundary"))
    _, _, _, first, *_ = last_picture(terminal)
    assert first.split(maxsplit=2) == ["seq8", "waiting", "boundary 12 THRASHING"]


def test_capped_cell_names_the_larger_gpu_and_has_no_speed() -> None:
    """Another GPU measured its largest batch size, and has another speed."""
    cell = FIRST.model_copy(update={"gpu": "A40", "capped_on": "H200-SXM"})
    log = io.StringIO()
    progress = Progress([cell], complete=0, stream=log)
    fit = {"cell": cell, "basis": Basis.CAPPED, "measurement": measurement(step_seconds=(0.1,))}
    progress.observed(observation(8, **fit))
    progress.observed(observation(9, Outcome.OUT_OF_MEMORY, cell=cell, basis=Basis.CAPPED))
    progress.ended(cell, None)
    limit, end = lines(log)
    assert_lines([limit, end], ("batch 8", "H200-SXM"), ("done", "batch 8", "9 OUT_OF_MEMORY"))
    assert "examples/s" not in end


def test_failed_probe_shows_its_message_unchanged() -> None:
    """Brackets and colons are not taken for markup or emoji."""
    log = io.StringIO()
    progress = Progress(CELLS, complete=0, stream=log)
    detail = "[bold]x.py:100: std::bad_alloc [/red] " + "long " * 60
    progress.observed(observation(4, Outcome.FAILED, cell=FIRST, detail=detail))
    progress.ended(FIRST, "worker.py:100: [red]gone")
    failure, end = lines(log)
    assert failure.endswith(f"{FIRST.key}: batch 4 FAILED: {detail}")
    assert end.endswith(f"{FIRST.key}: died: worker.py:100: [red]gone")


def assert_plain_start(stream: io.StringIO) -> None:
    """Check that the start of the first cell is one line without control sequences."""
    assert_lines(lines(stream), ("0/4 done", "1 running", "3 waiting", f"{FIRST.key}: started"))
    assert stream.getvalue().removesuffix("\n").isprintable()


def test_log_stays_plain_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build servers force colours; a log file is no terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = io.StringIO()
    with Progress(CELLS, complete=0, stream=log) as progress:
        progress.started(task_of(FIRST))
    assert_plain_start(log)


def last_picture(terminal: Terminal) -> list[str]:
    """The last picture of the terminal as lines without colours."""
    picture = re.split(r"\r|\x1b\[1A", terminal.getvalue())[-1]
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", picture).splitlines()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 120 columns and 12 rows."""
    for name, value in {"COLUMNS": "120", "LINES": "12", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_terminal_shows_every_trial_with_its_state_and_result(terminal: Terminal) -> None:
    """A dead trial has its reason."""
    with Progress(CELLS, complete=1, stream=terminal) as progress:
        for cell in (FIRST, SECOND, THIRD):
            progress.started(task_of(cell))
        for o in whole_trial(FIRST, SPEC):
            progress.observed(o)
        progress.observed(observation(4, cell=THIRD))
        progress.ended(FIRST, None)
        progress.ended(SECOND, "worker.py:100: [red]gone")
    summary, shared, _, *rows = last_picture(terminal)
    assert_lines([summary], ("━ 0:00 elapsed, 2/5 done", "1 died", "1 running", "1 waiting"))
    assert shared == "each: cpu/llama-tiny/full-fp32/dense"
    assert [row.split()[:2] for row in rows] == [
        ["seq8", "done"],
        ["seq16", "died"],
        ["seq32", "running"],
        ["seq64", "waiting"],
    ]
    reasons = ("worker.py:100: [red]gone",)
    assert_lines(rows, ("batch 40", "800 examples/s"), reasons, ("4 FITS",), ())


@pytest.mark.parametrize("columns", ["80", "120"])
def test_rows_of_the_shipped_sweep_are_distinct(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Also while trials run, whose states leave less room."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "200")
    spec = spec_of(shipped_specs()["laptop"])
    cells = spec.all_cells()
    with Progress(cells, complete=0, stream=terminal) as progress:
        progress.started(task_of(cells[0], spec))
        progress.observed(observation(4, cell=cells[0]))
    shown = {line.split()[0] for line in last_picture(terminal) if "cpu/" in line or "seq" in line}
    assert len(shown) == len(cells)
    assert not any("…" in label for label in shown)


def test_low_terminal_still_shows_the_progress(terminal: Terminal) -> None:
    """The terminal has fewer rows than there are trials."""
    many = spec_of(TWO_CELLS.replace("[16, 32]", str(list(range(1, 41))))).all_cells()
    with Progress(many, complete=0, stream=terminal) as progress:
        progress.started(task_of(many[0]))
        shown = last_picture(terminal)
    assert "0/40 done, " in shown[0]
    assert len(shown) == 12
    assert shown[3].startswith("seq1 ")


def test_low_terminal_shows_first_what_runs(terminal: Terminal) -> None:
    """Trials that ended give way to those that run."""
    many = spec_of(TWO_CELLS.replace("[16, 32]", str(list(range(1, 41))))).all_cells()
    with Progress(many, complete=0, stream=terminal) as progress:
        progress.started(task_of(many[0]))
        progress.ended(many[0], None)
        progress.started(task_of(many[30]))
    assert last_picture(terminal)[3].startswith("seq31 ")


def test_a_running_trial_shows_since_when_and_how_long_its_probe_takes(terminal: Terminal) -> None:
    """The time of a probe begins with the result before it."""
    clock = Clock()
    with Progress(CELLS, complete=0, stream=terminal, clock=clock) as progress:
        progress.started(task_of(FIRST))
        progress.started(task_of(SECOND))
        clock.seconds += 62
        progress.observed(observation(4, cell=FIRST))
        clock.seconds += 5
    summary, _, _, first, second, *_ = last_picture(terminal)
    assert "1:07 elapsed" in summary
    assert "running 1:07, trying batch 64 0:05" in first
    assert second.split(maxsplit=1)[1] == "running 1:07, trying batch 1 1:07"


def test_a_running_trial_shows_what_its_probe_does(terminal: Terminal) -> None:
    """It follows from the results until now: those of the search, a repeat, then the ladder."""
    spec = spec_of(TWO_CELLS.replace("boundary_repeats: 0", "boundary_repeats: 1"))
    cell = spec.all_cells()[0]
    *results, last = whole_trial(cell, spec)
    with Progress(spec.all_cells(), complete=0, stream=terminal, clock=Clock()) as progress:
        progress.started(task_of(cell, spec))
        shown = []
        for result in (*results, last):
            progress._live.refresh()  # it is drawn twice a second
            shown.append(re.findall(r"running 0:00, (.*) 0:00", last_picture(terminal)[3])[0])
            progress.observed(result)
    words = {"search": "trying", "boundary": "confirming", "ladder": "timing"}
    assert shown == [f"{words[o.purpose]} batch {o.batch_size}" for o in (*results, last)]
    assert {text.split()[0] for text in shown} == set(words.values())


@pytest.mark.parametrize("no_color", ["", "1"])
def test_states_have_colours_unless_no_color_is_set(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    """A trial that ended is green, one that died red."""
    monkeypatch.setenv("NO_COLOR", no_color)
    with Progress(CELLS, complete=0, stream=terminal) as progress:
        progress.ended(FIRST, None)
        progress.ended(SECOND, "gone")
    assert ("\x1b[32mseq8" in terminal.getvalue()) is (no_color == "")
    assert ("\x1b[1;31mseq16" in terminal.getvalue()) is (no_color == "")


def test_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal of an editor is one."""
    monkeypatch.setenv("TERM", "dumb")
    with Progress(CELLS, complete=0, stream=terminal) as progress:
        progress.started(task_of(FIRST))
    assert_plain_start(terminal)
