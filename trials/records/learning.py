"""Records of learning: training arguments, data, held-out scores, one line per epoch. No torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gpu_catalog.record import Record, former_names
from trials.recipes.fields import PositiveInt
from trials.records.cell import Cell
from trials.records.messages import Ready, Setup
from trials.records.observation import Environment

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with its role and content."""
Schedule = Literal["constant", "linear", "cosine"]
Count = Annotated[int, Field(strict=True, ge=0)]
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Training(Record):
    """Training arguments beside the recipe.

    Attributes:
        learning_rate: peak learning rate.
        schedule: learning-rate schedule of transformers; all but ``constant`` reach zero after
            ``epochs``.
        warmup_steps: steps of linear warm-up.
        batch_size: examples per step; the last batch of an epoch may be smaller.
        epochs: maximum number of epochs.
        patience: epochs without improvement after which learning has stopped.
        seed: seed of weights and shuffling.
        cutoff: maximum tokens; longer training examples are truncated.
    """

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    schedule: Schedule = "constant"
    warmup_steps: Count = 0
    batch_size: PositiveInt
    epochs: PositiveInt
    patience: PositiveInt = 2
    seed: Count = 0
    cutoff: PositiveInt

    @property
    def identity(self) -> dict[str, Any]:
        """Arguments that determine an epoch; ``epochs`` is none at a constant rate."""
        aside = {"patience"} | ({"epochs"} if self.schedule == "constant" else set())
        return self.model_dump(mode="json", exclude=aside)


class LearnData(Record):
    """Facts of a data set after the split.

    Attributes:
        source: file, folder or hub name.
        rendering: rendering of an example.
        held_out_from: source of the held-out set, or ``the same``.
        tokenizer: name of the tokenizer.
        fingerprint: hash of examples, split and tokenizer.
        train_examples: number of training examples.
        held_out_examples: number of held-out examples.
        accuracy: definition of a correct answer. ``choices``: the right choice is the likeliest.
            ``exact``: every token of the answer, its end included, is the likeliest.
    """

    _former = model_validator(mode="before")(
        former_names(
            train_queries="train_examples",
            held_out_queries="held_out_examples",
            made_by="rendering",
        )
    )

    source: str
    rendering: str
    held_out_from: str
    tokenizer: str
    fingerprint: str
    train_examples: PositiveInt
    held_out_examples: PositiveInt
    accuracy: Literal["choices", "exact"]


class LearnExample(Record):
    """One example.

    Attributes:
        held_out: whether it is in the held-out set.
        prompt: text or messages before the answer.
        answer: text of the answer, which has the loss.
        choices: every possible answer, the right one included; empty without choices.
    """

    held_out: bool
    prompt: str | tuple[dict[str, Any], ...]
    answer: str
    choices: tuple[str, ...] = ()

    @property
    def conversation(self) -> Conversation | None:
        """Messages before the answer; None for a text."""
        return None if isinstance(self.prompt, str) else self.prompt


class LearnSetup(Setup):
    """First message to the learning child.

    Attributes:
        training: training arguments.
        tokenizer: a folder, a tokenizer.json, or a hub name.
        examples_file: JSONL file of ``LearnExample``.
        curve: ``curve_key`` of the curve; a checkpoint of another one is refused.
        checkpoint_file: file of the checkpoint; absent for no checkpoint.
    """

    training: Training
    tokenizer: str
    examples_file: str
    curve: str
    checkpoint_file: str | None = None


class LearnReady(Ready):
    """First message of the learning child.

    Attributes:
        epoch: epoch of its checkpoint; 0 without one.
        attempt: attempt of its checkpoint; absent without one.
        cut_off: number of training examples truncated at the cutoff.
        left_out: number of examples without a usable answer within the cutoff.
        remark: message for the user; absent for none.
    """

    epoch: int
    attempt: PositiveInt | None
    cut_off: int
    left_out: int
    remark: str | None = None


class EpochRequest(Record):
    """Request for one epoch: 0 evaluates the untrained model, others train first."""

    epoch: int
    attempt: PositiveInt


class Heartbeat(Record):
    """Progress within an epoch, in steps or answers."""

    doing: Literal["training", "testing"]
    done: int
    total: int


class HeldOutScores(Record):
    """Scores of each held-out example, in order.

    Attributes:
        nats: negative log-likelihood of each right answer.
        tokens: tokens of each right answer, its end included.
        correct: whether each example is answered correctly.
    """

    nats: tuple[Nats, ...]
    tokens: tuple[PositiveInt, ...]
    correct: tuple[bool, ...]

    @property
    def loss(self) -> float:
        """Nats per token of the answers."""
        return sum(self.nats) / sum(self.tokens)

    @property
    def accuracy(self) -> float:
        """Share of examples answered correctly."""
        return sum(self.correct) / len(self.correct)


class Epoch(Record):
    """Result of one epoch.

    Attributes:
        epoch: its number; 0 before any training.
        train_loss: nats per token, averaged over steps; absent for epoch 0.
        steps: optimizer steps.
        skipped_steps: steps that fp16 loss scaling skipped.
        tested: held-out scores after the epoch.
    """

    epoch: Count
    train_loss: Nats | None = None
    steps: Count = 0
    skipped_steps: Count = 0
    tested: HeldOutScores


class EpochReply(Epoch):
    """Answer of the learning child, with a message for the user if there is one."""

    remark: str | None = None


class LearnedEpoch(Epoch):
    """One epoch of one training curve, a line of ``learned.jsonl``.

    Attributes:
        kind: kind of record.
        cell: what was fine-tuned; its length is the cutoff.
        training: training arguments.
        data: data set.
        attempt: from 1; higher after the curve had to start over.
        environment: software and host.
        started_at: UTC time in ISO 8601.
    """

    kind: Literal["learn"] = "learn"
    cell: Cell
    training: Training
    data: LearnData
    attempt: PositiveInt = 1
    environment: Environment
    started_at: str

    @property
    def curve(self) -> str:
        """Key of its curve."""
        return curve_key(self.cell, self.training, self.data)

    @property
    def key(self) -> str:
        """Unique key within a run."""
        return f"{self.curve}/t{self.attempt}/e{self.epoch}"


def curve_key(cell: Cell, training: Training, data: LearnData) -> str:
    """Stable key of one training curve."""
    text = json.dumps([training.identity, data.fingerprint], sort_keys=True)
    return f"{cell.key}/{hashlib.sha256(text.encode()).hexdigest()[:12]}"
