"""The record of one profiled batch size: where the time of its steps went. No torch here.

It is kept apart from observations: steps run slower under a profiler, so what they took enters no
law, no ranking and no search.
"""

import re
import statistics
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from gpu_catalog.record import Record, former_names
from trials.records.cell import Cell
from trials.records.observation import Environment, Observation, Outcome, Seconds
from trials.records.recipe import PositiveInt

Stage = Literal["forward", "backward", "recompute", "optimizer"]
"""A part of the step. ``recompute`` is what gradient checkpointing runs again in the backward
pass, and a part of that."""
Layer = Literal[
    "embeddings", "norms", "attention", "mamba", "experts", "mlp", "head", "loss", "other",
    "optimizer", "idle",
]  # fmt: skip
"""Whose operator it was. ``experts`` has the router; ``other`` is what stands between the layers
(residuals, positions, masks); ``idle`` is a GPU that waits for its host."""
STAGES: tuple[Stage, ...] = get_args(Stage)
LAYERS: tuple[Layer, ...] = get_args(Layer)
ATTEMPTS = 3  # a profile that came to nothing is tried again, this often in all


class ProfileRule(Record):
    """How many steps a profile takes.

    Attributes:
        steps: of each kind: plain ones, ones with their stages timed, ones under the profiler.
        least_seconds: the first two kinds go on for so long, where steps are short.
        most_steps: but have no more than these.
        warmup_steps: under the profiler before those that count.
        training_steps: between the two counts of the experts' tokens.
    """

    steps: PositiveInt = 3
    least_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 2.0
    most_steps: PositiveInt = 30
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 2
    training_steps: PositiveInt = 10

    def is_enough(self, plain_seconds: Sequence[float]) -> bool:
        """Whether no further step need be timed without the profiler."""
        count = len(plain_seconds)
        if count < self.steps:
            return False
        return count >= self.most_steps or 2 * sum(plain_seconds) >= self.least_seconds


class ProfileRow(Record):
    """What one class of operators of one kind of layer took in one stage of a step.

    Attributes:
        stage: of the step.
        layer: whose they are.
        kernel: what they do: ``matmul gate``, ``dequantise``, ``gather/scatter``, …; ``host`` is
            Python, views and what else moves no data.
        seconds: of the CPU, or of a GPU's kernels.
        calls: operators or kernels.
        flops: floating-point operations of matrix products and attention.
    """

    stage: Stage
    layer: Layer
    kernel: str
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    calls: int
    flops: int


class ExpertLoad(Record):
    """How many tokens each expert was given, before and after some training.

    Attributes:
        examples: of the batch they were counted on, the same both times.
        training_steps: between the two, on other batches.
        before: tokens of each expert, (layers, experts), at the first weights.
        after: the same after training.
    """

    _former = model_validator(mode="before")(former_names(queries="examples"))

    examples: int
    training_steps: int
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


def tokens_per_example(counts: Sequence[Sequence[int]], examples: int) -> list[float]:
    """Of each expert, the mean over the layers: the bars of 2408.04693, Fig. 11."""
    return [sum(of) / len(counts) / examples for of in zip(*counts, strict=True)]


def load_variance(counts: Sequence[Sequence[int]], examples: int) -> float:
    """Variance over the experts of ``tokens_per_example``, as 2408.04693 tells it for Fig. 11."""
    return statistics.pvariance(tokens_per_example(counts, examples))


def load_imbalance(counts: Sequence[Sequence[int]]) -> float:
    """The busiest expert's tokens over an equal share, the mean over the layers; 1 is balanced."""
    return statistics.fmean(max(layer) * len(layer) / sum(layer) for layer in counts)


class Profile(Record):
    """Where the time of a step goes.

    Attributes:
        of: whose time the rows are: operators on the CPU, or kernels on a GPU.
        plain_seconds: raw durations of steps with nothing attached.
        forward_seconds, backward_seconds, optimizer_seconds: of steps whose stages were timed and
            that were not profiled; the three of one step stand at one place. The loss is the
            forward pass's, a recomputed forward the backward pass's.
        profiled_seconds: raw durations of the steps under the profiler.
        rows: by stage, layer and kernel, of the median one of these (the lower of two).
        load: tokens of each expert; absent without experts, or where none can be counted.
    """

    of: Literal["cpu", "gpu"]
    plain_seconds: Seconds
    forward_seconds: Seconds
    backward_seconds: Seconds
    optimizer_seconds: Seconds
    profiled_seconds: Seconds
    rows: tuple[ProfileRow, ...]
    load: ExpertLoad | None = None

    @property
    def step_seconds(self) -> float:
        """Median of the plain steps."""
        return statistics.median(self.plain_seconds)

    @property
    def overhead(self) -> float:
        """How much longer a profiled step takes, as a part of a plain one.

        By the shortest of each, which whoever else uses the machine has disturbed least.
        """
        return min(self.profiled_seconds) / min(self.plain_seconds) - 1

    def stage_seconds(self, stage: Stage) -> float:
        """Median of a stage without the profiler; of recomputing, its profiled share of that.

        ``backward`` has ``recompute`` in it.
        """
        match stage:
            case "forward":
                return statistics.median(self.forward_seconds)
            case "backward":
                return statistics.median(self.backward_seconds)
            case "optimizer":
                return statistics.median(self.optimizer_seconds)
            case "recompute":
                backward = self.profiled(("backward", "recompute"))
                share = self.profiled([stage]) / backward if backward > 0 else 0.0
                return share * self.stage_seconds("backward")

    def profiled(self, stages: Collection[Stage]) -> float:
        """Seconds of all rows of some stages."""
        return sum(row.seconds for row in self.rows if row.stage in stages)

    def unprofiled_seconds(self, row: ProfileRow) -> float:
        """A row's seconds in a plain step: its profiled share of its stage's."""
        stages: tuple[Stage, ...] = (row.stage,)
        whole: Stage = row.stage
        if row.stage in ("backward", "recompute"):
            stages, whole = ("backward", "recompute"), "backward"
        profiled = self.profiled(stages)
        return row.seconds / profiled * self.stage_seconds(whole) if profiled > 0 else 0.0


class Profiled(Record):
    """One batch size of one cell, profiled. An observation of its own kind.

    Attributes:
        kind: tells its lines from those of observations.
        cell: what was profiled.
        batch_size: examples per step.
        attempt: 1 for the first try.
        outcome: how it ended.
        detail: one line on why, for everything but FITS.
        seed: what data and weights were drawn from.
        profile: present when it ended well.
        environment: present when the child lived long enough to say where it ran.
        started_at: UTC time in ISO 8601.
        seconds: wall time of the whole.
    """

    kind: Literal["profile"] = "profile"
    cell: Cell
    batch_size: int
    attempt: int = 1
    outcome: Outcome
    detail: str | None = None
    seed: int
    profile: Profile | None = None
    environment: Environment | None = None
    started_at: str
    seconds: float

    @property
    def key(self) -> str:
        """What makes it one of a kind within a run."""
        return f"{self.cell.key}/profile/b{self.batch_size}/t{self.attempt}"


PROFILE_LINE = re.compile(rb'\s*\{\s*"kind"\s*:\s*"profile"')
Logged = Observation | Profiled
"""What a run's log of observations holds."""


def logged(line: bytes) -> Logged:
    """One line of the log.

    Raises:
        ValidationError: it is none.
    """
    if is_profile(line):
        return Profiled.model_validate_json(line)
    return Observation.model_validate_json(line)


def is_profile(line: bytes) -> bool:
    """Whether a line of the log is of a profile, which its first field tells."""
    return PROFILE_LINE.match(line) is not None


def sizes_to_profile(largest: int, profiled: Sequence[Profiled]) -> list[int]:
    """Of one example and the largest batch, those still to be profiled.

    Args:
        largest: batch size of the cell.
        profiled: what was tried of the cell.
    """
    done = {p.batch_size for p in profiled if p.outcome.is_verdict}
    tries = [p.batch_size for p in profiled]
    sizes = sorted({1, largest}) if largest > 0 else []
    return [size for size in sizes if size not in done and tries.count(size) < ATTEMPTS]
