"""Peaks of replays on disk: a cached answer is the computed one, and a damaged one is replaced."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders.observations import recipe, tiny_cell
from fakes.in_process_traces import InProcess

from gpu_catalog.catalog import load_catalog
from trials.drawn_lengths import DrawnBatch
from trials.records.model import find_model
from trials.records.observation import Outcome
from trials.simulation import simulated_cell, varying_lengths
from trials.simulation.memory import stored_peaks
from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.memory.stored_peaks import StoredPeaks
from trials.simulation.memory.streams import Moves, peaks_on_streams
from trials.simulation.recording import IntArray
from trials.simulation.simulated_cell import SimulatedCell, like
from trials.simulation.trace_cache import Traces
from trials.simulation.varying_lengths import MOST_FAILED, RUNS, VaryingLengths

pytestmark = pytest.mark.usefixtures("made_for_small_steps")
A40 = load_catalog().gpu("A40")
LIMIT = 64 * 2**20
PEAKS = (AllocatorPeaks(100, 512, 0, None), AllocatorPeaks(100, 1024, 2, 7))


class Replayed:
    """A replay that counts its calls."""

    def __init__(self, peaks: tuple[AllocatorPeaks, ...] = PEAKS) -> None:
        self.calls = 0
        self._peaks = peaks

    def __call__(self) -> tuple[AllocatorPeaks, ...]:
        self.calls += 1
        return self._peaks


def lengths(batch_size: int, seed: int) -> Sequence[DrawnBatch]:
    """Lengths of a short run."""
    tokens = (16, 24 + 8 * (seed % 4), 64, 16 + batch_size)
    return [DrawnBatch(length, is_padded=length > 16) for length in tokens]


@pytest.fixture(scope="module")
def traced() -> InProcess:
    """Traces that the tests share; each test has a folder of its own."""
    return InProcess()


def simulated(traced: InProcess, folder: Path | None, **settings: Any) -> SimulatedCell:
    """A new cell, as a process makes it."""
    traced.folder = folder
    cell = tiny_cell(recipe=recipe("full", precision="bf16", **settings), seq_len=64)
    return SimulatedCell(cell, find_model("llama-tiny"), traced)


def answers(traced: InProcess, folder: Path | None) -> list[object]:
    """Answers on plain, accumulating and drawn steps."""
    collected: list[object] = []
    for accumulation in (1, 2):
        cell = simulated(traced, folder, gradient_accumulation=accumulation)
        largest = cell.largest_batch(A40, LIMIT, 512)
        varying = VaryingLengths(cell, lengths)
        collected += [largest, cell.without_limit(1, A40), cell.memory(largest + 1, A40, LIMIT)]
        collected += [varying.memory(3, A40), varying.most(largest, A40, LIMIT)]
    return collected


def no_replay(*_: object, **__: object) -> AllocatorPeaks:
    """Fail in place of a replay."""
    raise AssertionError("nothing is to be replayed")


def test_a_stored_answer_is_the_computed_one(
    traced: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process stores the peaks, and the second one replays nothing."""
    computed = answers(traced, None)
    assert answers(traced, tmp_path) == computed
    for module in (simulated_cell, varying_lengths):
        monkeypatch.setattr(module, "peaks_on_streams", no_replay)
    assert answers(traced, tmp_path) == computed
    with pytest.raises(AssertionError):
        answers(traced, None)


def test_runs_below_a_limit_are_not_replayed_again(
    traced: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of all runs under the limit."""
    replays: list[tuple[Moves, IntArray, int | None]] = []

    def counted(moves: Moves, held: IntArray, limit: int | None, **setting: bool) -> AllocatorPeaks:
        replays.append((moves, held, limit))
        return peaks_on_streams(moves, held, limit, **setting)

    monkeypatch.setattr(varying_lengths, "peaks_on_streams", counted)
    limit = 384 * 2**20
    most = VaryingLengths(simulated(traced, None), lengths).most(100, A40, limit)
    unlimited = [(moves, held) for moves, held, limited in replays if limited is None]
    assert len(unlimited) == RUNS
    assert RUNS < len(replays) < 2 * RUNS
    each = [peaks_on_streams(*run, limit, expandable_segments=False) for run in unlimited]
    each.sort(key=lambda peaks: (peaks.failed_at is not None, peaks.peak_reserved_bytes))
    assert most == each[-1 - MOST_FAILED]


def test_everything_that_determines_the_peaks_distinguishes_them(
    traced: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another limit, trace or setting is another result, and so is another version of the code."""

    def stored(batch_size: int = 2, **changes: Any) -> int:
        like(simulated(traced, tmp_path), **changes).without_limit(batch_size, A40)
        return len(list((tmp_path / "replays").iterdir()))

    assert [stored(), stored()] == [1, 1]
    assert [stored(3), stored(tokens=32), stored(expandable_segments=True)] == [2, 3, 4]
    simulated(traced, tmp_path).memory(2, A40, LIMIT)
    assert stored() == 5
    monkeypatch.setattr(stored_peaks, "simulation_code", lambda: "changed")
    assert stored() == 6


@pytest.mark.parametrize("damage", [b"", b"[[100,512,0", b"null", b'[{"peak": 1}]', b"\xff\x00"])
def test_a_damaged_result_is_computed_and_replaced(tmp_path: Path, damage: bytes) -> None:
    """A power cut may leave any content."""
    replay = Replayed()
    assert StoredPeaks(tmp_path).get(("content",), replay) == PEAKS
    (path,) = (tmp_path / "replays").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert StoredPeaks(tmp_path).get(("content",), replay) == PEAKS
    assert path.read_bytes() == whole
    assert StoredPeaks(tmp_path).get(("content",), replay) == PEAKS
    assert replay.calls == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    """The peaks are computed each time, without a message."""
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    replay = Replayed()
    assert [StoredPeaks(blocked).get(("content",), replay) for _ in range(2)] == [PEAKS, PEAKS]
    assert replay.calls == 2


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even an empty one: it would never be removed."""

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(self), None, str(target))

    monkeypatch.setattr(Path, "replace", full)
    assert StoredPeaks(tmp_path).get(("content",), Replayed()) == PEAKS
    assert list((tmp_path / "replays").iterdir()) == []


def test_processes_that_store_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each reads nothing or a whole result."""

    def get(number: int) -> tuple[AllocatorPeaks, ...]:
        return StoredPeaks(tmp_path).get((number % 3,), Replayed())

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(get, range(200))) == {PEAKS}
    assert len(list((tmp_path / "replays").iterdir())) == 3


def test_the_oldest_of_too_many_results_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds a bounded number of them."""
    monkeypatch.setattr(stored_peaks, "MOST_FILES", 10)
    replay = Replayed()
    for number in range(35):
        StoredPeaks(tmp_path).get((number,), replay)
    assert len(list((tmp_path / "replays").iterdir())) <= 10
    StoredPeaks(tmp_path).get((34,), replay)
    assert replay.calls == 35


def test_one_example_that_fits_in_use_alone_does_not_fit(traced: InProcess) -> None:
    """The allocator holds more than is in use, also where no batch was replayed before."""
    held = simulated(traced, None).without_limit(1, A40).peak_reserved_bytes
    cell = simulated(traced, None)
    assert cell.in_use(1, A40, held - 1).outcome is Outcome.FITS
    assert cell.memory(1, A40, held - 1).outcome is not Outcome.FITS
    assert cell.memory(1, A40, held).outcome is Outcome.FITS


def test_an_estimate_loads_numba_for_a_replay_alone(tmp_path: Path) -> None:
    """Loading it takes longer than all other parts of an estimate whose results are stored."""
    program = "import orchestrator.estimating.estimate_request, sys; print('numba' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ended.stdout == "False\n"


def test_the_replay_is_loaded_once_while_processes_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no trace is missing, nothing is loaded."""
    loaded: list[str] = []
    traces = Traces(tmp_path, workers=1, meanwhile=lambda: loaded.append("replay"))

    def traced(_: Any, requests: Sequence[Any], **__: Any) -> dict[str, str | None]:
        return {request.key: "refused here" for request in requests}

    monkeypatch.setattr(Traces, "_traced", traced)
    for seq_len in (16, 32):
        traces.prepare(
            SimulatedCell(tiny_cell(seq_len=seq_len), find_model("llama-tiny"), traces).requests()
        )
    assert loaded == ["replay"]
