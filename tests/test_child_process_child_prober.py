"""A real child process and every way it can end: each is an outcome, and none outlives its trial.

Importing torch and transformers takes a fork server seconds, so the tests share one prober. Each
leaves it able to answer, as a trial does.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from builders.observations import tiny_cell
from builders.small_probes import BUDGET_BYTES, ENDLESS, SMALL, TIMED, TOO_LARGE, small_setup

from trials.child_process import forked_child
from trials.child_process.child_prober import ChildProber
from trials.child_process.forked_child import ProbeEnd
from trials.records.messages import ProbeRequest, Setup
from trials.records.observation import Outcome

DEADLINE_SECONDS = 60.0  # for what takes a moment; a machine that is busy may take longer
SETUP = small_setup(tiny_cell(seq_len=8))


def prober_of(setup: Setup) -> ChildProber:
    """A prober with timeouts long enough for a busy machine."""
    return ChildProber(setup, build_timeout_seconds=120, probe_timeout_seconds=60)


@pytest.fixture(scope="module")
def shared() -> Iterator[ChildProber]:
    """The prober that the tests of this file share."""
    with prober_of(SETUP) as made:
        yield made


@pytest.fixture
def prober(shared: ChildProber) -> ChildProber:
    """The shared prober, with a living child that has answered."""
    fitting_probe(shared)
    return shared


def fitting_probe(prober: ChildProber) -> ProbeEnd:
    """End of a small probe, which must fit."""
    end = prober.probe(SMALL)
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    return end


def living_pid(prober: ChildProber) -> int:
    """Process id of the child, which must be alive."""
    assert prober.child_pid is not None
    return prober.child_pid


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition until it holds; fail after the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


def test_a_probe_that_fits_records_memory_model_and_environment(prober: ChildProber) -> None:
    """A fit records peak memory, parameter counts of the built model and software versions."""
    end = fitting_probe(prober)
    assert end.measurement is not None
    assert end.measurement.memory_steps == 3
    weights_bytes = 4 * end.measurement.built.parameters.total
    assert weights_bytes <= end.measurement.model_memory_bytes < weights_bytes + 4096
    # Weights, gradients and AdamW's two numbers a weight are all there, and more than that.
    assert 4 * weights_bytes < end.measurement.memory.peak_allocated_bytes <= BUDGET_BYTES
    assert end.memory_limit_bytes == BUDGET_BYTES
    assert end.measurement.step_seconds == ()
    assert end.environment is not None
    assert {"python", "torch", "transformers"} <= {name for name, _ in end.environment.versions}
    assert end.environment.threads == 1


def test_a_probe_with_a_timing_rule_keeps_its_raw_step_times(prober: ChildProber) -> None:
    """The probe times as many steps as the rule allows and records why it stopped."""
    end = prober.probe(TIMED)
    assert end.measurement is not None
    assert len(end.measurement.step_seconds) == 7
    assert min(end.measurement.step_seconds) > 0
    assert end.measurement.stop_reason == "step cap"


def test_probes_that_fit_share_a_child(prober: ChildProber) -> None:
    """The model is built again only after a failure."""
    before = prober.child_pid
    fitting_probe(prober)
    assert prober.child_pid == before


def test_out_of_memory_is_an_outcome_and_the_next_child_is_fresh(prober: ChildProber) -> None:
    """A child that ran out of memory ends; its successor measures the same as before."""
    measured, old = fitting_probe(prober).measurement, living_pid(prober)
    end = prober.probe(TOO_LARGE)
    assert end.outcome is Outcome.OUT_OF_MEMORY
    assert end.measurement is None
    assert end.detail is not None
    assert end.detail.endswith(f"exceed the budget of {BUDGET_BYTES} bytes")
    assert end.environment is not None
    assert prober.child_pid is None
    assert is_gone(old)
    assert fitting_probe(prober).measurement == measured
    assert prober.child_pid not in {None, old}


def test_a_fresh_child_can_be_requested(prober: ChildProber) -> None:
    """The largest batch size is confirmed in a child that has run no other probe."""
    old = living_pid(prober)
    end = prober.probe(SMALL, fresh=True)
    assert end.outcome is Outcome.FITS
    assert is_gone(old)
    assert living_pid(prober) != old


def test_a_child_killed_in_the_middle_of_a_probe_failed(prober: ChildProber) -> None:
    """The record names the signal that killed the child, and the next child answers."""
    child = psutil.Process(living_pid(prober))
    idle_seconds = child.cpu_times().user

    def kill_when_at_work() -> None:
        wait_until(lambda: child.cpu_times().user > idle_seconds + 0.1)
        child.kill()

    killer = threading.Thread(target=kill_when_at_work)
    killer.start()
    end = prober.probe(ENDLESS)
    killer.join()
    assert end.outcome is Outcome.FAILED
    assert end.detail is not None
    assert end.detail.endswith("SIGKILL")
    fitting_probe(prober)


def test_the_steps_before_the_end_of_a_child_are_kept(prober: ChildProber) -> None:
    """Of drawn lengths, whether the child runs out of memory or is killed."""
    missed = prober.probe(ProbeRequest(batch_size=32, timing=None, lengths=(2, 2, 8)))
    assert missed.outcome is Outcome.OUT_OF_MEMORY
    assert missed.measurement is not None
    assert missed.measurement.memory_steps == len(missed.measurement.step_peak_bytes) == 2
    fitting_probe(prober)
    child = psutil.Process(living_pid(prober))
    idle_seconds = child.cpu_times().user

    def kill_when_at_work() -> None:
        wait_until(lambda: child.cpu_times().user > idle_seconds + 0.5)
        child.kill()

    killer = threading.Thread(target=kill_when_at_work)
    killer.start()
    end = prober.probe(ProbeRequest(batch_size=1, timing=None, lengths=(8,) * 10_000))
    killer.join()
    assert end.outcome is Outcome.FAILED
    assert end.measurement is not None
    assert 0 < end.measurement.memory_steps < 10_000
    fitting_probe(prober)


def test_a_child_that_hangs_is_timed_out_and_replaced(
    prober: ChildProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process neither answers nor ends; it is killed."""
    hanging = living_pid(prober)
    os.kill(hanging, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(prober, "_probe_timeout_seconds", 0.5)
        end = prober.probe(SMALL)
    assert end.outcome is Outcome.TIMED_OUT
    assert end.detail is not None
    assert "0.5 s, batch 1" in end.detail
    assert is_gone(hanging)
    fitting_probe(prober)


@pytest.mark.long
def test_a_fork_server_that_is_killed_or_too_slow_is_replaced(
    prober: ChildProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child of a killed fork server ends with it; a slow fork server times out."""
    child = living_pid(prober)
    fork_server = psutil.Process(child).parent()
    assert fork_server is not None
    fork_server.kill()
    wait_until(lambda: is_gone(child))
    killed = prober.probe(SMALL)
    assert killed.outcome is Outcome.FAILED
    assert killed.detail is not None
    assert killed.detail.endswith("SIGKILL")

    with monkeypatch.context() as patch:
        patch.setattr(prober, "_build_timeout_seconds", 0.1)
        slow = prober.probe(SMALL)
    assert slow.outcome is Outcome.TIMED_OUT
    assert slow.detail is not None
    assert "0.1 s, importing" in slow.detail
    assert slow.environment is None

    fitting_probe(prober)


@pytest.mark.parametrize(
    ("worker", "detail"),
    [
        (("/nowhere/python",), "FileNotFoundError: [Errno 2] No such file or directory"),
        (
            (sys.executable, "-c", "raise SystemExit('no such module')"),
            "the child ended with exit code 1: no such module",
        ),
        (
            (sys.executable, "-c", "import os, time; os.closerange(0, 2); time.sleep(3600)"),
            "the child was killed by SIGKILL",
        ),
    ],
)
def test_a_fork_server_that_cannot_start_is_a_failed_outcome(
    worker: tuple[str, ...], detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing, ended or silent fork server is a FAILED outcome each time and leaves no child."""
    monkeypatch.setattr(forked_child, "FORK_SERVER_TIMEOUT_SECONDS", 0.2)
    with ChildProber(
        SETUP, build_timeout_seconds=60, probe_timeout_seconds=60, worker=worker
    ) as prober:
        for _ in range(2):
            end = prober.probe(SMALL)
            assert end.outcome is Outcome.FAILED
            assert end.detail is not None
            assert end.detail.startswith(detail)
            assert prober.child_pid is None


TRIAL = """
import sys
from trials.child_process.child_prober import ChildProber
from trials.records.messages import ProbeRequest, Setup

setup = Setup.model_validate_json(sys.argv[1])
prober = ChildProber(setup, build_timeout_seconds=120, probe_timeout_seconds=60)
end = prober.probe(ProbeRequest(batch_size=1, timing=None))
print(end.outcome, prober.child_pid, prober._server.pid, flush=True)
prober.probe(ProbeRequest.model_validate_json(sys.argv[2]))
"""


@pytest.mark.long
def test_child_and_fork_server_die_with_the_process_of_their_trial() -> None:
    """When the trial's process is killed, as on a lost spot node, its child and fork server end."""
    packages = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", TRIAL, SETUP.model_dump_json(), ENDLESS.model_dump_json()],
        env=os.environ | {"PYTHONPATH": str(packages)},
        stdout=subprocess.PIPE,
        text=True,
    ) as trial:
        assert trial.stdout is not None
        outcome, child, fork_server = trial.stdout.readline().split()
        assert outcome == "FITS"
        assert not is_gone(int(child))
        trial.kill()
    wait_until(lambda: is_gone(int(child)) and is_gone(int(fork_server)))


def test_closing_leaves_no_process(prober: ChildProber) -> None:
    """Closing ends the child and the fork server, and can be repeated."""
    child = living_pid(prober)
    fork_server = psutil.Process(child).ppid()
    prober.close()
    prober.close()
    assert is_gone(fork_server)
    wait_until(lambda: is_gone(child))
    assert prober.child_pid is None
