"""Faults in the child process: each has the right outcome, and the next probe gets a new child."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.memory_messages import DEVICE_MESSAGES, HOST_MESSAGES
from builders.observations import cpu, tiny_cell

from trials.child_process import fork_server
from trials.child_process.child_prober import ChildProber
from trials.records import failure_classification as outcome_module
from trials.records.messages import ProbeRequest, Setup
from trials.records.model import find_model
from trials.records.observation import Outcome

HERE = Path(__file__).parent
REQUEST = ProbeRequest(batch_size=5, timing=None)


class FaultyProber:
    """A prober whose children fail in the way that a test selects."""

    def __init__(self, prober: ChildProber, orders: Path) -> None:
        self.prober = prober
        self.counters = orders.with_name("counters")
        self._orders = orders

    def ask(self, fault: str = "") -> tuple[Outcome, str]:
        """Return outcome and detail of a probe under a fault."""
        self.counters.write_text("oom_kill 0\n", encoding="utf-8")
        self._orders.write_text(fault, encoding="utf-8")
        end = self.prober.probe(REQUEST)
        return end.outcome, end.detail or ""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProber]:
    """One prober for this file, because starting a fork server takes seconds."""
    orders = tmp_path_factory.mktemp("faults") / "orders"
    orders.write_text("", encoding="utf-8")
    prober = ChildProber(
        Setup(cell=tiny_cell(), model=find_model("llama-tiny"), gpu=cpu(), seed=0, threads=1),
        build_timeout_seconds=120,
        probe_timeout_seconds=60,
        worker=(sys.executable, str(HERE / "fakes/fault_worker.py"), str(orders)),
    )
    with pytest.MonkeyPatch.context() as patch, prober:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), str(HERE.parent))))
        made = FaultyProber(prober, orders)
        patch.setattr(fork_server, "LONGEST_MESSAGE_BYTES", 2**20)
        patch.setattr(outcome_module, "OOM_COUNTERS", (made.counters,))
        yield made


SILENT = ("hung", "half", "empty lines")


@pytest.mark.parametrize("where", ["probe", "build"])
@pytest.mark.parametrize(
    ("fault", "outcome", "detail"),
    [
        ("killed", Outcome.FAILED, "the child was killed by SIGKILL"),
        ("crashed", Outcome.FAILED, "the child was killed by SIGSEGV"),
        ("hung", Outcome.TIMED_OUT, "no answer within 0.7 s"),
        ("half", Outcome.TIMED_OUT, "no answer within 0.7 s"),
        ("empty lines", Outcome.TIMED_OUT, "no answer within 0.7 s"),
        ("poisoned", Outcome.FAILED, "RuntimeError: CUDA error: an illegal memory access"),
        ("device", Outcome.OUT_OF_MEMORY, "CUDA error: out of memory"),
        ("host", Outcome.HOST_OUT_OF_MEMORY, "MemoryError()"),
        ("garbage", Outcome.FAILED, "the child sent an invalid message: Invalid JSON"),
        ("other", Outcome.FAILED, "the child sent an invalid message: Field required"),
        ("endless", Outcome.FAILED, "the child sent an invalid message of over 1048576 bytes"),
        ("exited", Outcome.FAILED, "the child ended with exit code 3"),
        ("told and exited", Outcome.FAILED, "the child ended with exit code 3: what went wrong"),
        ("bitsandbytes", Outcome.OUT_OF_MEMORY, "Error out of memory at line 88 in file"),
        ("aborted", Outcome.HOST_OUT_OF_MEMORY, "terminate called after throwing"),
        ("unnamed signal", Outcome.FAILED, "the child was killed by signal 40"),
        ("killed for memory", Outcome.HOST_OUT_OF_MEMORY, "the host ran out of memory and killed"),
    ],
)
def test_each_fault_has_its_outcome_and_reason(  # noqa: PLR0917 - pytest passes them by name
    faulty: FaultyProber,
    where: str,
    fault: str,
    outcome: Outcome,
    detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault while building or probing changes neither the probe before it nor the one after."""
    assert faulty.ask() == (Outcome.FITS, "")
    first = faulty.prober.child_pid
    with monkeypatch.context() as patch:
        if fault in SILENT:
            patch.setattr(faulty.prober, f"_{where}_timeout_seconds", 0.7)
        if where == "build":
            faulty.prober._discard_child()
        actual, reason = faulty.ask(f"{where} {fault}")
    assert actual is outcome
    assert reason.startswith(detail)
    assert faulty.ask() == (Outcome.FITS, "")
    assert faulty.prober.child_pid not in {None, first}


@pytest.mark.parametrize("where", ["probe", "build"])
@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        *((text, Outcome.OUT_OF_MEMORY) for text in DEVICE_MESSAGES),
        *((text, Outcome.HOST_OUT_OF_MEMORY) for text in HOST_MESSAGES),
    ],
)
def test_every_out_of_memory_message_is_classified(
    faulty: FaultyProber, where: str, message: str, outcome: Outcome
) -> None:
    """PyTorch and CUDA messages mean device memory, those of host allocators host memory."""
    faulty.prober._discard_child()
    assert faulty.ask(f"{where} says: {message}")[0] is outcome


def test_output_of_an_earlier_child_does_not_change_a_later_outcome(
    faulty: FaultyProber,
) -> None:
    """Children share one output file; the reason of one end must not become that of another."""
    assert faulty.ask("probe bitsandbytes")[0] is Outcome.OUT_OF_MEMORY
    outcome, detail = faulty.ask("probe exited")
    assert (outcome, detail[-11:]) == (Outcome.FAILED, "exit code 3")


def test_a_fit_without_a_measurement_is_rejected(faulty: FaultyProber) -> None:
    """The search and the fits depend on measurements, so the probe is FAILED."""
    rejection = (Outcome.FAILED, "the child reported FITS without a measurement")
    assert faulty.ask("probe unmeasured") == rejection
    assert faulty.ask() == (Outcome.FITS, "")


def test_a_reply_for_another_batch_size_is_rejected(faulty: FaultyProber) -> None:
    """A measurement under the wrong batch size would corrupt the fits."""
    rejection = (Outcome.FAILED, "the child answered batch 99, not 5")
    assert faulty.ask("probe wrong") == rejection
    assert faulty.ask() == (Outcome.FITS, "")
