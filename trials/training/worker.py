"""The child process that owns the model and the device, and answers probes; and its nursery.

It is a process of its own so that a probe that runs out of memory, hangs or crashes can be killed
with everything it holds, and the next one starts clean. ``trials.child_process.fork_server``
starts it once; it forks the children.
"""

import contextlib
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch
from pydantic import BaseModel

# A step that prints a warning is a step that is slower than it need be; the trial reads outcomes.
warnings.filterwarnings("ignore")

from trials.child_process.bootstrap import (
    freeze_garbage_collector,
)
from trials.child_process.parent_death import die_with_parent
from trials.devices.cpu import CpuDevice
from trials.devices.device import Device
from trials.records.failure_classification import classify, is_final
from trials.records.messages import (
    START,
    ChildStarted,
    Ended,
    ProbeReply,
    ProbeRequest,
    Ready,
    Refused,
    Setup,
)
from trials.records.observation import (
    DeviceReading,
    Environment,
    Measurement,
    Outcome,
    StopReason,
)
from trials.records.profile import Profile
from trials.records.timing_rule import TimingRule
from trials.training.finetune import FineTuning, import_libraries
from trials.training.recipe_check import RecipeError, departures

MEMORY_STEPS = 3  # optimizer state exists only after the first step; the third repeats the second
S = TypeVar("S", bound=Setup)
# What of the software makes measurements comparable, where it is installed.
STACK = (
    "bitsandbytes",
    "causal-conv1d",
    "deepspeed",
    "flash-attn",
    "mamba-ssm",
    "peft",
    "torch",
    "transformers",
    "triton",
)


def open_device(setup: Setup) -> Device:
    """The device a trial was sent to.

    Raises:
        DeviceError: it is another one, or cannot be used.
    """
    cap = setup.memory_cap_bytes
    if setup.gpu.kind == "cpu":
        return CpuDevice(setup.gpu, memory_cap_bytes=cap, threads=setup.threads)
    from trials.devices.cuda import CudaDevice  # noqa: PLC0415 - only where there is one

    return CudaDevice(setup.gpu, memory_cap_bytes=cap)


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps with their durations, and what the device drew and said meanwhile."""

    warmup_seconds: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    stop_reason: StopReason | None = None
    energy_joules: float | None = None
    before: DeviceReading | None = None
    after: DeviceReading | None = None


class Worker:
    """A model under its recipe, ready to be probed.

    Attributes:
        device: where it is.
        tuning: the model.

    Raises:
        RecipeError: what was built is not what the recipe implies.
    """

    def __init__(self, setup: Setup) -> None:
        self.device = open_device(setup)
        self._threads = setup.threads
        self.tuning = FineTuning(
            setup.cell, setup.model, device=self.device.torch_device, seed=setup.seed
        )
        self._built = self.tuning.built()
        wrong = departures(setup.cell.recipe, self._built, self.tuning.implied())
        if wrong:
            raise RecipeError(
                f"{setup.cell.recipe.key} on {setup.cell.model} did not take hold: "
                + "; ".join(wrong)
            )

    def environment(self) -> Environment:
        """The stack this process runs."""
        versions = {"python": platform.python_version()} | self.device.versions
        for name in STACK:
            with contextlib.suppress(PackageNotFoundError):
                versions[name] = version(name)
        return Environment(
            versions=tuple(sorted(versions.items())),
            device_name=self.device.name,
            threads=self._threads,
            allocator=self.device.allocator,
            host=socket.gethostname(),
        )

    def probe(self, request: ProbeRequest) -> ProbeReply:
        """Whole optimizer steps at this batch size: memory first, then, if asked, time."""
        tuning = self.tuning
        tuning.start_over()
        self.device.settle()
        tokens = tuning.tokens(request.batch_size, request.draw)
        model_tensors = tuning.tensors()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in model_tensors}
        memory = self.device.measure_memory(
            lambda: tuning.step(tokens),
            steps=MEMORY_STEPS,
            already_live=[*model_tensors, tokens],
        )
        retries = memory.allocator_retries or 0
        timed = Timed()
        if request.timing is not None and not retries:
            timed = self._timed(lambda: tuning.step(tokens), request.timing)
        measurement = Measurement(
            memory_steps=MEMORY_STEPS,
            memory=memory,
            model_memory_bytes=sum(storage.nbytes() for storage in storages.values()),
            built=self._built,
            **asdict(timed),
        )
        if retries:
            return ProbeReply(
                batch_size=request.batch_size,
                outcome=Outcome.THRASHING,
                detail=f"the allocator emptied its cache {retries} times in {MEMORY_STEPS} steps",
                measurement=measurement,
            )
        return ProbeReply(
            batch_size=request.batch_size,
            outcome=Outcome.FITS,
            measurement=measurement,
            profile=self._profile(request, tokens),
        )

    def _profile(self, request: ProbeRequest, tokens: torch.Tensor) -> Profile | None:
        if request.profile is None:
            return None
        from trials.training.profiler import (  # noqa: PLC0415 - a second, and few probes want it
            profiled,
        )

        return profiled(self.tuning, self.device, tokens, request.profile)

    def _timed(self, step: Callable[[], object], rule: TimingRule) -> Timed:
        device = self.device
        warmup: list[float] = []
        while not rule.is_warm(warmup):
            warmup.append(device.step_seconds(step))
        before, joules_before = device.reading(), device.energy_joules()
        seconds: list[float] = []
        while (reason := rule.stop_reason(seconds)) is None:
            seconds.append(device.step_seconds(step))
        joules_after, after = device.energy_joules(), device.reading()
        energy = None
        if joules_before is not None and joules_after is not None:
            energy = joules_after - joules_before
        return Timed(tuple(warmup), tuple(seconds), reason, energy, before, after)


class Line:
    """The two pipes to the trial, unbuffered: nursery and child take turns at them."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = os.fdopen(requests, "rb", buffering=0)
        self._replies = os.fdopen(replies, "wb", buffering=0)

    def hear(self) -> str:
        """The next line, empty when the trial is gone."""
        return self._requests.readline().decode()

    def say(self, message: BaseModel, *, before: bytes = b"") -> None:
        """One message."""
        self._replies.write(before + message.model_dump_json().encode() + b"\n")


def serve(setup: Setup, line: Line) -> None:
    """A child's life: builds the model, answers probes until one does not fit."""
    try:
        worker = Worker(setup)
        limit = worker.device.memory_limit_bytes
        line.say(Ready(environment=worker.environment(), memory_limit_bytes=limit))
    except Exception as error:  # noqa: BLE001 - every failure of a build is an outcome
        outcome, detail = classify(error)
        line.say(Refused(outcome=outcome, detail=detail, final=is_final(error)))
        return
    while request := line.hear():
        asked = ProbeRequest.model_validate_json(request)
        try:
            reply = worker.probe(asked)
        except Exception as error:  # noqa: BLE001 - every failure of a probe is an outcome
            outcome, detail = classify(error)
            reply = ProbeReply(batch_size=asked.batch_size, outcome=outcome, detail=detail)
        line.say(reply)
        if reply.outcome is not Outcome.FITS:
            return


def nurse(line: Line) -> None:
    """The life of a nursery whose children answer probes."""
    serve_forks(line, Setup, serve)


def serve_forks(line: Line, told: type[S], live: Callable[[S, Line], None]) -> None:
    """A nursery's life: imports once what every child needs, then forks them one after another.

    It never builds a model nor touches a device, so each child starts as clean as a new process,
    without the seconds that importing the libraries takes.

    Args:
        line: to the trial.
        told: what the first line is.
        live: a child's life.
    """
    setup = told.model_validate_json(line.hear())
    if setup.gpu.kind == "cpu":  # on a GPU they may touch it, which no parent of a child must
        import_libraries(setup.cell.recipe)
    freeze_garbage_collector()
    while request := line.hear():
        if request != START:
            continue  # meant for a child that ended before it read it
        nursery = os.getpid()
        child = os.fork()
        if child == 0:
            die_with_parent(nursery)
            # Said by the child, so that nothing it says can come before it.
            line.say(ChildStarted(pid=os.getpid()))
            live(setup, line)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        # On a line of its own, whatever the child had begun to say.
        line.say(Ended(exit_code=os.waitstatus_to_exitcode(status)), before=b"\n")


def line_to_trial() -> Line:
    """The pipes of a process that a trial has started, which dies with it."""
    die_with_parent(int(sys.argv[1]))
    # Libraries print to standard output; the replies go where nobody else writes.
    replies_fd = os.dup(1)
    os.dup2(2, 1)
    return Line(os.dup(0), replies_fd)


if __name__ == "__main__":
    nurse(line_to_trial())
