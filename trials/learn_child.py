"""The parent's side of the learning child: asks for epochs, says in one line what went wrong."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Self

from pydantic import ValidationError

from trials.child import ChildGoneError, Nursery, ProbeEnd
from trials.learning import EpochReply, EpochRequest, Heartbeat, LearnReady, LearnSetup
from trials.models.tokens import offline_variables
from trials.observation import Outcome
from trials.probe import Refused

LEARN_WORKER = (sys.executable, "-m", "trials.begin", "trials.learn_worker")
BUILD_TIMEOUT_SECONDS = 3600.0  # pretrained weights may have to be fetched
SILENCE_SECONDS = 600.0  # of a child in the midst of an epoch: more than any step takes


class LearnError(RuntimeError):
    """Learning that ended before its end; one line on why and what to do."""


class NoStartError(LearnError):
    """It did not come to the first epoch."""


class ChildLearner:
    """Learns in a child process. A context manager: on leaving, the child is gone.

    Attributes:
        ready: what the child said first.

    Args:
        setup: what to learn, and how.
        worker: the command that starts a nursery.

    Raises:
        LearnError: on entering, when the child cannot learn it.
    """

    ready: LearnReady

    def __init__(self, setup: LearnSetup, worker: Sequence[str] = LEARN_WORKER) -> None:
        self._setup = setup
        self._worker = worker
        self._nursery: Nursery | None = None

    def __enter__(self) -> Self:
        try:
            self.ready = self._started()
        except (ChildGoneError, ValidationError, OSError) as error:
            self.close()
            raise NoStartError(f"{self._setup.cell.model}: {_line(error)}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def child_pid(self) -> int | None:
        """Process id of the living child."""
        return None if self._nursery is None else self._nursery.child_pid

    def close(self) -> None:
        """Kills the child and its nursery."""
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def epoch(self, number: int, attempt: int, listen: Callable[[Heartbeat], None]) -> EpochReply:
        """One epoch: learnt and tested, or 0: tested alone.

        Args:
            number: the next one, or 0 to begin anew.
            attempt: at this curve, from 1.
            listen: told of steps meanwhile.

        Raises:
            LearnError: it came to nothing.
        """
        try:
            return self._answered(EpochRequest(epoch=number, attempt=attempt), listen)
        except (ChildGoneError, ValidationError, OSError) as error:
            raise LearnError(f"{self._setup.cell.key}: epoch {number}: {_line(error)}") from error

    def _started(self) -> LearnReady:
        setup = self._setup
        loaded = [setup.tokenizer]
        if setup.cell.weights == "pretrained" and setup.model.weights is not None:
            loaded.append(setup.model.weights)
        self._nursery = Nursery(self._worker, setup.threads, offline_variables(*loaded))
        self._nursery.tell(self._setup.model_dump_json() + "\n")
        line = self._nursery.start_child(BUILD_TIMEOUT_SECONDS)
        with contextlib.suppress(ValidationError):
            refused = Refused.model_validate_json(line)
            raise ChildGoneError(ProbeEnd(refused.outcome, refused.detail))
        return LearnReady.model_validate_json(line)

    def _answered(self, request: EpochRequest, listen: Callable[[Heartbeat], None]) -> EpochReply:
        assert self._nursery is not None
        self._nursery.tell(request.model_dump_json() + "\n")
        while True:
            line = self._nursery.answer(SILENCE_SECONDS, f"epoch {request.epoch}")
            try:
                listen(Heartbeat.model_validate_json(line))
            except ValidationError:
                break
        reply = EpochReply.model_validate_json(line)
        if reply.outcome is not Outcome.FITS or reply.tested is None:
            raise ChildGoneError(ProbeEnd(reply.outcome, reply.detail))
        return reply


# Errors whose text needs no more.
SAY_IT_ALL = (
    *("DeviceError", "FamilyError", "KernelError", "QueriesError", "RecipeError"),
    "TokenizerError",
)
REMEDIES = {
    Outcome.OUT_OF_MEMORY: "give a smaller --batch-size or --cutoff, or another recipe",
    Outcome.HOST_OUT_OF_MEMORY: "free memory on this machine, and run the same command again",
    Outcome.TIMED_OUT: "run the same command again, it goes on after the last epoch",
}


def _line(error: ChildGoneError | ValidationError | OSError) -> str:
    """What went wrong, and what to do."""
    if isinstance(error, ValidationError):
        return "the child's answer is not one"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    end = error.end
    detail = end.detail or "no reason was given"
    name, colon, said = detail.partition(": ")
    if colon and name in SAY_IT_ALL:
        return said
    if colon and name == "NotTrainingError":
        return f"{said}: give a smaller --learning-rate, or --precision fp32"
    told = detail if end.outcome is Outcome.FAILED else f"{end.outcome} ({detail})"
    remedy = REMEDIES.get(end.outcome)
    return told if remedy is None else f"{told}: {remedy}"
