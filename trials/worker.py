"""The child process that owns the model and the device, and answers probes; and its nursery.

It is a process of its own so that a probe that runs out of memory, hangs or crashes can be killed
with everything it holds, and the next one starts clean. ``trials.child`` starts a nursery, which
forks the children.
"""

import ctypes
import gc
import os
import platform
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version

from pydantic import BaseModel

# A step that prints a warning is a step that is slower than it need be; the trial reads outcomes.
warnings.filterwarnings("ignore")

from trials.devices.cpu import CpuDevice  # noqa: E402 - the filter must come before these imports
from trials.devices.live_tensors import DeviceOutOfMemoryError  # noqa: E402
from trials.finetune import FineTuning, import_libraries  # noqa: E402
from trials.models.preset import preset_by_name  # noqa: E402
from trials.observation import Environment, Measurement, Outcome, StopReason  # noqa: E402
from trials.probe import (  # noqa: E402
    START,
    Born,
    Ended,
    ProbeReply,
    ProbeRequest,
    Ready,
    Refused,
    Setup,
)
from trials.timing import TimingRule  # noqa: E402

MEMORY_STEPS = 3  # optimizer state exists only after the first step; the third repeats the second
STACK = ("bitsandbytes", "peft", "torch", "transformers")


class Worker:
    """A model under its recipe, ready to be probed.

    Raises:
        RecipeError: what was built is not what the recipe implies.
    """

    def __init__(self, setup: Setup) -> None:
        self._device = CpuDevice(setup.gpu, threads=setup.threads)
        preset = preset_by_name(setup.cell.model)
        self._tuning = FineTuning(setup.cell, preset, seed=setup.seed)
        self.parameters = self._tuning.parameters()
        expected = preset.parameters(setup.cell.recipe)
        if self.parameters != expected:
            raise RecipeError(
                f"{setup.cell.recipe.key} on {setup.cell.model} implies {expected}, "
                f"the built model has {self.parameters}"
            )

    def environment(self) -> Environment:
        """The stack this process runs."""
        versions = {name: version(name) for name in STACK} | {"python": platform.python_version()}
        return Environment(
            versions=tuple(sorted(versions.items())),
            device_name=self._device.name,
            threads=self._device.threads,
            host=socket.gethostname(),
        )

    def probe(self, request: ProbeRequest) -> ProbeReply:
        """Whole optimizer steps at this batch size: memory first, then, if asked, time."""
        tuning = self._tuning
        tuning.start_over()
        tokens = tuning.tokens(request.batch_size)
        model_tensors = tuning.tensors()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in model_tensors}
        peak = self._device.peak_memory_bytes(
            lambda: tuning.step(tokens),
            steps=MEMORY_STEPS,
            already_live=[*model_tensors, tokens],
        )
        seconds, reason = self._timed(lambda: tuning.step(tokens), request.timing)
        measurement = Measurement(
            memory_steps=MEMORY_STEPS,
            peak_memory_bytes=peak,
            model_memory_bytes=sum(storage.nbytes() for storage in storages.values()),
            step_seconds=tuple(seconds),
            stop_reason=reason,
            parameters=self.parameters,
        )
        return ProbeReply(outcome=Outcome.FITS, measurement=measurement)

    def _timed(
        self, step: Callable[[], object], rule: TimingRule | None
    ) -> tuple[list[float], StopReason | None]:
        seconds: list[float] = []
        if rule is None:
            return seconds, None
        # The counted steps before this were the warm-up.
        while (reason := rule.stop_reason(seconds)) is None:
            seconds.append(self._device.step_seconds(step))
        return seconds, reason


class RecipeError(RuntimeError):
    """The built model does not follow its recipe."""


def classify(error: BaseException) -> tuple[Outcome, str]:
    """The outcome an exception stands for, and one line on it."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, DeviceOutOfMemoryError):
        return Outcome.OUT_OF_MEMORY, line
    # torch raises a plain RuntimeError with this text when the host refuses an allocation.
    if isinstance(error, MemoryError) or "can't allocate memory" in line:
        return Outcome.HOST_OUT_OF_MEMORY, line
    return Outcome.FAILED, f"{type(error).__name__}: {line}"


class Line:
    """The two pipes to the trial, unbuffered: nursery and child take turns at them."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = os.fdopen(requests, "rb", buffering=0)
        self._replies = os.fdopen(replies, "wb", buffering=0)

    def hear(self) -> str:
        """The next line, empty when the trial is gone."""
        return self._requests.readline().decode()

    def say(self, message: BaseModel) -> None:
        """One message."""
        self._replies.write(message.model_dump_json().encode() + b"\n")


def serve(setup: Setup, line: Line) -> None:
    """A child's life: builds the model, answers probes until one does not fit."""
    try:
        worker = Worker(setup)
        line.say(Ready(environment=worker.environment(), parameters=worker.parameters))
    except Exception as error:  # noqa: BLE001 - every failure of a build is an outcome
        outcome, detail = classify(error)
        line.say(Refused(outcome=outcome, detail=detail))
        return
    while request := line.hear():
        try:
            reply = worker.probe(ProbeRequest.model_validate_json(request))
        except Exception as error:  # noqa: BLE001 - every failure of a probe is an outcome
            outcome, detail = classify(error)
            reply = ProbeReply(outcome=outcome, detail=detail)
        line.say(reply)
        if reply.outcome is not Outcome.FITS:
            return


def nurse(line: Line) -> None:
    """A nursery's life: imports once what every child needs, then forks them one after another.

    It never builds a model nor touches a device, so each child starts as clean as a new process,
    without the seconds that importing the libraries takes.
    """
    setup = Setup.model_validate_json(line.hear())
    import_libraries(setup.cell.recipe)
    # The collector looks through a child's own objects only, not through half a million of these.
    gc.freeze()
    while request := line.hear():
        if request != START:
            continue  # meant for a child that ended before it read it
        nursery = os.getpid()
        child = os.fork()
        if child == 0:
            die_with_parent(nursery)
            serve(setup, line)
            os._exit(0)
        line.say(Born(pid=child))
        _, status = os.waitpid(child, 0)
        line.say(Ended(exit_code=os.waitstatus_to_exitcode(status)))


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when the one that started it dies, however it dies."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # Libraries print to standard output; the replies go where nobody else writes.
    replies_fd = os.dup(1)
    os.dup2(2, 1)
    nurse(Line(os.dup(0), replies_fd))
