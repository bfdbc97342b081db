"""Several real ranks as one child of a trial: what they measure, and every way one of them can end.

Importing torch and transformers takes a fork server seconds, so the tests share one prober. Each
leaves it able to answer, as a trial does.
"""

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from builders.gangs import gang_cell, gone_within, ranks_of, seconds_to_end
from builders.long_cases import long_cases
from builders.observations import MIB, environment, measurement
from builders.small_probes import BUDGET_BYTES, ENDLESS, SMALL, TIMED, TOO_LARGE, small_setup

from trials.child_process.child_prober import ChildProber
from trials.child_process.rank_verdict import measurement_of_ranks, with_reading
from trials.records.messages import LINK_REQUEST, Ready, Setup
from trials.records.observation import Measurement, MemoryReading, Outcome
from trials.training.gang import rank_process
from trials.training.gang.gang import Gang, GangEndError, RankEnd
from trials.training.gang.rank_process import visible_gpu
from trials.training.serving.message_pipe import MessagePipe

SOON_SECONDS = 5.0  # some hundredths of a second where a core is free
SECOND = 1.0
KILLS = 7
DEADLINE_SECONDS = 300.0  # for what takes a moment; a machine that is busy may take longer
SETUP = small_setup(gang_cell(seq_len=8))


@pytest.fixture(scope="module")
def shared() -> Iterator[ChildProber]:
    """The prober that the tests of this file share."""
    with ChildProber(SETUP, build_timeout_seconds=300, probe_timeout_seconds=15) as made:
        yield made


@pytest.fixture
def prober(shared: ChildProber) -> ChildProber:
    """The shared prober, with living ranks that have answered."""
    end = shared.probe(SMALL)
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    return shared


def ranks(prober: ChildProber) -> list[psutil.Process]:
    """Processes of the living ranks, in their order."""
    assert prober.child_pid is not None
    return ranks_of(prober.child_pid)


def in_a_probe(prober: ChildProber, harm: int, rank: int) -> float:
    """Send a signal to a rank in the middle of its steps; return when."""
    time.sleep(1.0)
    at = time.monotonic()
    ranks(prober)[rank].send_signal(harm)
    return at


def test_a_fit_records_each_rank_the_slowest_step_and_the_largest_peak(
    prober: ChildProber,
) -> None:
    """The measurement is that of the slowest step and of the largest peak, beside those of each."""
    end = prober.probe(TIMED)
    assert end.measurement is not None
    assert end.environment is not None
    of_ranks = end.measurement.ranks
    assert [reading.rank for reading in of_ranks] == [0, 1]
    steps = list(zip(*(reading.step_seconds for reading in of_ranks), strict=True))
    assert len(steps) == 7
    assert end.measurement.step_seconds == tuple(max(step) for step in steps)
    peaks = [reading.peak_allocated_bytes for reading in of_ranks]
    assert end.measurement.memory is not None
    assert end.measurement.memory.peak_allocated_bytes == max(peaks)
    assert end.environment.backend == "gloo"
    assert end.memory_limit_bytes == BUDGET_BYTES


def test_collectives_are_timed_where_requested(prober: ChildProber) -> None:
    """Every collective, at growing buffers from 1 MiB up that the memory allows; no step."""
    end = prober.probe(LINK_REQUEST)
    assert (end.outcome, end.measurement) == (Outcome.FITS, None)
    times = end.collectives or ()
    assert {one.collective for one in times} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert {one.buffer_bytes for one in times} == {MIB}  # an eighth of the budget
    assert end.environment is not None
    assert end.environment.backend == "gloo"
    plain = prober.probe(SMALL)
    assert plain.measurement is not None
    assert plain.collectives is None


def test_ranks_that_fit_share_their_processes(prober: ChildProber) -> None:
    """The model is built again only after a failure."""
    before = ranks(prober)
    assert prober.probe(SMALL).outcome is Outcome.FITS
    assert ranks(prober) == before


def test_out_of_memory_of_the_ranks_is_a_verdict(prober: ChildProber) -> None:
    """The first rank to run out of memory is named, and the others end with it."""
    before = ranks(prober)
    end = prober.probe(TOO_LARGE)
    assert end.outcome is Outcome.OUT_OF_MEMORY
    assert end.detail is not None
    assert end.detail.startswith("rank ")
    assert end.detail.endswith(f"exceed the budget of {BUDGET_BYTES} bytes")
    assert gone_within(before, SOON_SECONDS)


@pytest.mark.parametrize("rank", [1, *long_cases([0])])
def test_a_killed_rank_ends_the_others_and_costs_the_probe_alone(
    prober: ChildProber, rank: int
) -> None:
    """The end is a failure of that rank within a second, and the next probe fits."""
    before = ranks(prober)
    killed: list[float] = []
    killing = threading.Thread(
        target=lambda: killed.append(in_a_probe(prober, signal.SIGKILL, rank))
    )
    killing.start()
    end = prober.probe(ENDLESS)
    ended = time.monotonic()
    killing.join()
    assert (end.outcome, end.detail) == (
        Outcome.FAILED,
        f"rank {rank}: the child was killed by SIGKILL",
    )
    assert gone_within(before, SOON_SECONDS)
    assert ended - killed[0] < SOON_SECONDS
    assert prober.probe(SMALL).outcome is Outcome.FITS


def test_a_rank_that_ends_between_probes_ends_the_others(prober: ChildProber) -> None:
    """They hold memory while nobody asks; the next probe has the reason, and the one after fits."""
    idle = ranks(prober)
    idle[1].kill()
    assert gone_within(idle, SOON_SECONDS)
    end = prober.probe(SMALL)
    assert end.outcome is Outcome.FAILED
    assert end.detail is not None
    assert end.detail.startswith("rank 1: ")
    assert prober.probe(SMALL).outcome is Outcome.FITS


def test_a_rank_that_ends_after_its_answer_ends_those_that_have_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may wait for it."""

    def answer_and_die(_setup: Setup, pipe: MessagePipe, make: partial[object]) -> None:
        if make.keywords["rank"].number == 1:
            signal.pause()
        pipe.send(Ready(environment=environment(), memory_limit_bytes=BUDGET_BYTES))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(rank_process, "serve", answer_and_die)
    limits = {"build_timeout_seconds": 20.0, "probe_timeout_seconds": 20.0}
    with Gang(SETUP.model_copy(update=limits)) as gang, pytest.raises(GangEndError) as gone:
        gang.ready()
    assert gone.value.end.line == "rank 0: the child was killed by SIGKILL"


@pytest.mark.long
def test_a_rank_that_hangs_is_named(prober: ChildProber) -> None:
    """The probe times out; the rank that the others wait for is said, and all end."""
    before = ranks(prober)
    stopping = threading.Thread(target=in_a_probe, args=(prober, signal.SIGSTOP, 1))
    stopping.start()
    end = prober.probe(ENDLESS)
    stopping.join()
    assert end.outcome is Outcome.TIMED_OUT
    assert end.detail == "no answer within 15 s, batch 1: rank 1 hung, the others waited"
    assert gone_within(before, SOON_SECONDS)


TRIAL = """
import sys
sys.path.insert(0, {tests!r})
from test_gang_gang import ENDLESS, SETUP, ChildProber
prober = ChildProber(SETUP, build_timeout_seconds=300, probe_timeout_seconds=300)
prober.probe(ENDLESS)
"""


def seconds_after_trial() -> float:
    """Kill -9 of a trial in a probe; seconds until its fork server and all ranks have ended."""
    script = TRIAL.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as trial:
        try:
            return seconds_to_end(psutil.Process(trial.pid), lineage(trial.pid))
        finally:
            trial.kill()


@pytest.mark.long
def test_no_rank_outlives_its_trial() -> None:
    """Kill -9 of the trial ends its fork server and all ranks."""
    assert seconds_after_trial() < SOON_SECONDS


@pytest.mark.long
def test_ranks_end_within_a_second_of_a_killed_one_or_of_their_trial(prober: ChildProber) -> None:
    """Medians of seven kills: 0.07 and 0.41 s on two cores that ten busy processes shared."""
    after_rank = []
    for kill in range(KILLS):
        assert prober.probe(SMALL).outcome is Outcome.FITS
        before = ranks(prober)
        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(seconds_to_end, before[kill % 2], before)
            assert prober.probe(ENDLESS).outcome is Outcome.FAILED
        after_rank.append(killing.result())
    after_trial = [seconds_after_trial() for _ in range(KILLS)]
    assert statistics.median(after_rank) < SECOND
    assert statistics.median(after_trial) < SECOND


@pytest.mark.long
def test_no_rank_outlives_its_parent(prober: ChildProber) -> None:
    """Kill -9 of the parent of the ranks, or of the fork server, ends them; the next probe fits."""
    for generations in (0, 1):
        before = ranks(prober)
        parent = before[0].parent()
        assert parent is not None
        victim = parent if generations == 0 else parent.parent()
        assert victim is not None
        victim.kill()
        assert gone_within(before, SOON_SECONDS)
        assert prober.probe(SMALL).outcome is Outcome.FAILED
        assert prober.probe(SMALL).outcome is Outcome.FITS


def lineage(trial: int) -> list[psutil.Process]:
    """Fork server, parent of the ranks and both ranks, once these have met."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        family = psutil.Process(trial).children(recursive=True)
        if len(family) == 4 and all(rank.num_threads() > 1 for rank in family[2:]):
            return family
        time.sleep(0.05)
    raise AssertionError("the ranks never began")


def test_the_measurement_of_ranks_is_the_worst_of_each() -> None:
    """Steps are the slowest rank's, memory the largest, energy the sum, readings the slowest's."""
    fast = measured(peak=5, seconds=(1.0, 2.0), joules=3.0)
    slow = measured(peak=4, seconds=(1.5, 1.9), joules=4.0)
    merged = measurement_of_ranks([with_reading(n, m) for n, m in enumerate((fast, slow))])
    assert merged.step_seconds == (1.5, 2.0)
    assert merged.memory == MemoryReading(peak_allocated_bytes=5, allocator_retries=1)
    assert merged.energy_joules == 7.0
    assert [r.step_seconds for r in merged.ranks] == [(1.0, 2.0), (1.5, 1.9)]


def measured(*, peak: int, seconds: tuple[float, ...], joules: float) -> Measurement:
    """Measurement of one rank."""
    memory = MemoryReading(peak_allocated_bytes=peak, allocator_retries=peak - 4)
    return measurement(step_seconds=seconds).model_copy(
        update={"memory": memory, "energy_joules": joules}
    )


def test_records_of_one_gpu_stay_as_they_were() -> None:
    """Neither ranks, collectives nor a backend are written where there is one GPU."""
    written = measurement().model_dump_json()
    assert not any(name in written for name in ("ranks", "collectives", "exposed"))
    assert "backend" not in environment().model_dump_json()


def test_a_lost_connection_is_the_echo_of_another_ranks_end() -> None:
    """A crash and lack of memory are not."""
    lost = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"
    assert RankEnd(0, Outcome.FAILED, lost).is_echo
    assert not RankEnd(0, Outcome.FAILED, "the child was killed by SIGSEGV").is_echo
    assert not RankEnd(0, Outcome.OUT_OF_MEMORY, lost).is_echo


def test_each_rank_sees_its_own_gpu_of_those_of_the_trial() -> None:
    """The trial's own CUDA_VISIBLE_DEVICES is respected, whatever its names."""
    assert visible_gpu(1, None) == "1"
    assert visible_gpu(1, "4, 6") == "6"
    assert visible_gpu(0, "GPU-77,GPU-78") == "GPU-77"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None
