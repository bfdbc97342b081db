"""What is learnt of a data set: how it is trained, what each epoch came to. No torch here."""

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field

from gpu_catalog.record import Record
from trials.models.tokens import Conversation
from trials.observation import Environment, Outcome
from trials.probe import Ready, Setup
from trials.recipe import PositiveInt
from trials.workload import Cell

Schedule = Literal["constant", "linear", "cosine"]
Count = Annotated[int, Field(strict=True, ge=0)]
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Training(Record):
    """How a model is trained on a data set, beside its recipe.

    Attributes:
        learning_rate: of every step, but for warm-up and schedule.
        schedule: ``constant``; or falling to zero at the last of ``epochs``, in a line or as half a
            cosine.
        warmup_steps: steps in which the learning rate rises to its own, in a line.
        batch_size: queries per step; the last of an epoch may be smaller.
        epochs: how often each query is seen, at most.
        patience: after so many epochs in a row without one that is better, learning has stopped.
        seed: weights, and the order of queries, are drawn from it.
        cutoff: tokens; longer queries are cut off there.
    """

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    schedule: Schedule = "constant"
    warmup_steps: Count = 0
    batch_size: PositiveInt
    epochs: PositiveInt
    patience: PositiveInt = 2
    seed: Count = 0
    cutoff: PositiveInt

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of one step.

        Args:
            step: which one, from 0.
            steps: of all epochs together.
        """
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        left = 1.0
        if self.schedule != "constant":
            done = max(0, step - self.warmup_steps) / max(1, steps - self.warmup_steps)
            left = 1 - done if self.schedule == "linear" else _half_cosine(done)
        return self.learning_rate * warm * max(left, 0.0)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides how every epoch turns out: not how many there are, unless the rate falls."""
        aside = {"patience"} | ({"epochs"} if self.schedule == "constant" else set())
        return self.model_dump(mode="json", exclude=aside)


def _half_cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


class LearnData(Record):
    """The data that is learnt and tested on, as read.

    Attributes:
        source: file, folder or hub name.
        made_by: how an example becomes a query.
        held_out_from: where the held-out queries are from: the same source, or which other.
        tokenizer: whose tokens they are.
        fingerprint: the same for the same queries, split and tokenizer.
        train_queries: learnt from.
        held_out_queries: tested on, and never learnt from.
        accuracy: ``choices``: the answer is the likeliest of those the query has. ``exact``: every
            token of the answer, and the end after it, is the likeliest.
    """

    source: str
    made_by: str
    held_out_from: str
    tokenizer: str
    fingerprint: str
    train_queries: PositiveInt
    held_out_queries: PositiveInt
    accuracy: Literal["choices", "exact"]


class LearnQuery(Record):
    """One query in its parts.

    Attributes:
        held_out: tested on, not learnt from.
        prompt: what stands before the answer: a text, or the messages of a conversation.
        answer: what is learnt.
        choices: every answer that may be given, this one among them; empty where any may be.
    """

    held_out: bool
    prompt: str | tuple[dict[str, Any], ...]
    answer: str
    choices: tuple[str, ...] = ()

    @property
    def conversation(self) -> Conversation | None:
        """The messages before the answer; None for a text."""
        return None if isinstance(self.prompt, str) else self.prompt


class LearnSetup(Setup):
    """What the learning child is told first.

    Attributes:
        training: how to train.
        tokenizer: a folder, a tokenizer.json, or a hub name.
        queries_file: a ``LearnQuery`` a line.
        curve: the ``curve_key`` of what is learnt: it goes on from no other's state.
        checkpoint_file: where the state after each epoch is kept; absent for nowhere.
    """

    training: Training
    tokenizer: str
    queries_file: str
    curve: str
    checkpoint_file: str | None = None


class LearnReady(Ready):
    """The learning child's first word.

    Attributes:
        epoch: what its checkpoint has learnt; 0 when there is none.
        attempt: the one that its checkpoint is of; absent when there is none.
        cut_off: queries to learn from that are longer than the cut-off, and were cut.
        left_out: those of which no answer is left, and held-out ones longer than the cut-off.
        remark: what to tell the user; absent for nothing.
    """

    epoch: int
    attempt: PositiveInt | None
    cut_off: int
    left_out: int
    remark: str | None = None


class EpochRequest(Record):
    """Asks for one epoch.

    Attributes:
        epoch: 0 tests the model as it is, another one trains, then tests.
        attempt: of the curve; kept with the state.
    """

    epoch: int
    attempt: PositiveInt


class Heartbeat(Record):
    """Said now and then meanwhile.

    Attributes:
        doing: ``training`` or ``testing``.
        done, total: steps, or queries.
    """

    doing: Literal["training", "testing"]
    done: int
    total: int


class HeldOutScores(Record):
    """What a model makes of the held-out queries, in their order; raw values.

    Attributes:
        nats: of each answer: less the logarithm of its probability.
        tokens: of each answer, its end included.
        correct: whether each answer is the model's own; of choices, or token for token.
    """

    nats: tuple[Nats, ...]
    tokens: tuple[PositiveInt, ...]
    correct: tuple[bool, ...]

    @property
    def loss(self) -> float:
        """Nats a token of the answers."""
        return sum(self.nats) / sum(self.tokens)

    @property
    def accuracy(self) -> float:
        """Part of the answers that are right."""
        return sum(self.correct) / len(self.correct)


class EpochReply(Record):
    """What an epoch came to.

    Attributes:
        epoch: which one.
        outcome: FITS when it ran.
        detail: one line on why not.
        train_loss: nats a token of the answers, as each step met them; absent of epoch 0.
        steps: optimizer steps in it.
        skipped_steps: those that fp16's loss scaling skipped.
        tested: present when it ran.
        remark: what to tell the user; absent for nothing.
    """

    epoch: int
    outcome: Outcome = Outcome.FITS
    detail: str | None = None
    train_loss: Nats | None = None
    steps: Count = 0
    skipped_steps: Count = 0
    tested: HeldOutScores | None = None
    remark: str | None = None


class LearnedEpoch(Record):
    """One epoch of one cell on one data set: an observation of its own kind.

    Attributes:
        kind: tells it from other records.
        cell: what was fine-tuned, its length the cut-off.
        training: how.
        data: on what.
        attempt: 1, and one more each time it had to begin anew.
        epoch: 0 before any training.
        train_loss, steps, skipped_steps, tested: as in ``EpochReply``.
        environment: where it ran.
        started_at: UTC time in ISO 8601.
    """

    kind: Literal["learn"] = "learn"
    cell: Cell
    training: Training
    data: LearnData
    attempt: PositiveInt = 1
    epoch: Count
    train_loss: Nats | None
    steps: Count
    skipped_steps: Count
    tested: HeldOutScores
    environment: Environment
    started_at: str

    @property
    def curve(self) -> str:
        """What all epochs of one curve share."""
        return curve_key(self.cell, self.training, self.data)

    @property
    def key(self) -> str:
        """What makes this record one of a kind within a run."""
        return f"{self.curve}/t{self.attempt}/e{self.epoch}"


def curve_key(cell: Cell, training: Training, data: LearnData) -> str:
    """A stable name of one curve."""
    said = json.dumps([training.identity, data.fingerprint], sort_keys=True)
    return f"{cell.key}/{hashlib.sha256(said.encode()).hexdigest()[:12]}"
