"""Parent's side of the learning child: requests epochs, reports failures in one line."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from pydantic import ValidationError

from gpu_catalog.errors import UserError
from trials.child_process.forked_child import ChildGoneError, ForkedChild
from trials.child_process.token_counter import offline_variables
from trials.records.learning import EpochReply, EpochRequest, Heartbeat, LearnReady, LearnSetup
from trials.records.observation import Outcome

LEARN_WORKER = (
    sys.executable,
    "-m",
    "trials.child_process.bootstrap",
    "trials.training.learning_worker",
)
BUILD_TIMEOUT_SECONDS = 3600.0  # pretrained weights may have to be downloaded
SILENCE_SECONDS = 600.0  # longest pause between two heartbeats: far more than a step takes
# Errors whose text stands alone.
SELF_EXPLANATORY = frozenset(
    {"DeviceError", "FamilyError", "KernelError", "ExamplesError", "RecipeError", "TokenizerError"}
)
REMEDIES = {
    Outcome.OUT_OF_MEMORY: "give a smaller --batch-size or --cutoff, or another recipe",
    Outcome.HOST_OUT_OF_MEMORY: "free memory on this machine, and run the same command again",
    Outcome.TIMED_OUT: "run the same command again, it goes on after the last epoch",
}


class LearnError(UserError):
    """Learning ended early; one line on why and what to do."""


class NoStartError(LearnError):
    """Learning ended before the first epoch."""


class ChildLearner(ForkedChild):
    """Fine-tunes in a child process. A context manager that kills the child on exit.

    Attributes:
        ready: first message of the child.

    Raises:
        NoStartError: on entering, when the child cannot start.
    """

    ready: LearnReady

    def __init__(self, setup: LearnSetup, worker: Sequence[str] = LEARN_WORKER) -> None:
        super().__init__(setup, worker)
        self._sources = [setup.tokenizer]
        if setup.cell.weights == "pretrained" and setup.model.weights is not None:
            self._sources.append(setup.model.weights)

    def __enter__(self) -> Self:
        with self._closing_on(NoStartError, self._setup.cell.model):
            variables = offline_variables(*self._sources)
            line = self.start_child(BUILD_TIMEOUT_SECONDS, variables)
            self.ready = LearnReady.model_validate_json(line)
        return self

    def epoch(self, number: int, attempt: int, listen: Callable[[Heartbeat], None]) -> EpochReply:
        """Train and evaluate one epoch; 0 only evaluates, from initial weights.

        Args:
            number: the next epoch, or 0 to start over.
            attempt: attempt at this curve, from 1.
            listen: called with progress.

        Raises:
            LearnError: the child failed.
        """
        with self._closing_on(LearnError, f"{self._setup.cell.key}: epoch {number}"):
            self.send(EpochRequest(epoch=number, attempt=attempt))
            while True:
                line = self.receive(SILENCE_SECONDS, f"epoch {number}")
                try:
                    listen(Heartbeat.model_validate_json(line))
                except ValidationError:
                    return EpochReply.model_validate_json(line)

    @contextlib.contextmanager
    def _closing_on(self, failure: type[LearnError], where: str) -> Iterator[None]:
        """Kill the child on any error, and raise the expected ones as a failure."""
        try:
            yield
        except (ChildGoneError, ValidationError, OSError) as error:
            self.close()
            raise failure(f"{where}: {_line(error)}") from error
        except BaseException:
            self.close()
            raise


def _line(error: ChildGoneError | ValidationError | OSError) -> str:
    """One line on a failure and its remedy."""
    if isinstance(error, ValidationError):
        return "the child sent an invalid message"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    end = error.end
    detail = end.detail or "no reason was given"
    name, colon, text = detail.partition(": ")
    if colon and name in SELF_EXPLANATORY:
        return text
    if colon and name == "NotTrainingError":
        return f"{text}: give a smaller --learning-rate, or --precision fp32"
    if end.outcome is not Outcome.FAILED:
        detail = f"{end.outcome} ({detail})"
    remedy = REMEDIES.get(end.outcome)
    return detail if remedy is None else f"{detail}: {remedy}"
