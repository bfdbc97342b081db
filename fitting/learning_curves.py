"""Training curves, their best epochs, and paired comparisons of held-out scores. Pure."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fitting.numerics.uncertainty import NORMAL_90
from trials.records.cell import Cell
from trials.records.learning import HeldOutScores, LearnData, LearnedEpoch, Training


def experts_text(cell: Cell) -> str:
    """Active experts in words."""
    if cell.experts is None:
        return "no experts"
    kind = "dense" if cell.active_experts == cell.experts else "sparse"
    return f"{kind}, {cell.active_experts} of {cell.experts}"


Score = Literal["accuracy", "loss"]
STOP_RULE = (
    "An epoch is better than the best one so far when more of its held-out answers are right; or, "
    "while not all are, when its held-out loss is lower and no fewer are right: each by more than "
    "one standard error of the difference, example by example."
)


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Training curve of one cell on one data set: its longest attempt, from epoch 0, gapless."""

    epochs: tuple[LearnedEpoch, ...]

    @property
    def cell(self) -> Cell:
        """Cell that was fine-tuned."""
        return self.epochs[-1].cell

    @property
    def training(self) -> Training:
        """Training arguments of the last epoch."""
        return self.epochs[-1].training

    @property
    def data(self) -> LearnData:
        """Data set."""
        return self.epochs[-1].data

    @property
    def key(self) -> str:
        """Key of the curve."""
        return self.epochs[-1].curve

    @property
    def best_scores(self) -> HeldOutScores:
        """Held-out scores of the best epoch."""
        return self.epochs[best(self).epoch].tested


@dataclass(frozen=True, slots=True)
class Gain:
    """Improvement of one evaluation over another on the same examples.

    Attributes:
        mean: difference of the score; positive where the later one is better.
        error: standard error of the difference; infinite for a single example.
    """

    mean: float
    error: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the difference exceeds one standard error."""
        return self.mean > self.error

    @property
    def interval(self) -> tuple[float, float]:
        """90 % confidence interval."""
        return self.mean - NORMAL_90 * self.error, self.mean + NORMAL_90 * self.error


@dataclass(frozen=True, slots=True)
class Best:
    """Best epoch of a curve.

    Attributes:
        epoch: its number; 0 where no epoch beat the untrained model.
        by: score that decided.
        has_stopped: whether ``patience`` epochs after it brought no improvement.
    """

    epoch: int
    by: Score
    has_stopped: bool

    @property
    def is_conclusive(self) -> bool:
        """Whether training helped and then stopped helping."""
        return self.has_stopped and self.epoch > 0


def curves(records: Iterable[LearnedEpoch]) -> list[LearningCurve]:
    """Training curves in order of start: the longest attempt of each, the latest of equals."""
    longest = (
        max(by_attempt.items(), key=lambda item: (len(item[1]), item[0]))[1]
        for by_attempt in attempts(records).values()
    )
    return [LearningCurve(epochs) for epochs in longest if epochs]


def attempts(records: Iterable[LearnedEpoch]) -> dict[str, dict[int, tuple[LearnedEpoch, ...]]]:
    """Epochs by curve key and attempt, from 0 to the first gap."""
    grouped: dict[str, dict[int, dict[int, LearnedEpoch]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        grouped[record.curve][record.attempt].setdefault(record.epoch, record)
    return {
        curve: {attempt: _without_gap(epochs) for attempt, epochs in by_attempt.items()}
        for curve, by_attempt in grouped.items()
    }


def _without_gap(epochs: dict[int, LearnedEpoch]) -> tuple[LearnedEpoch, ...]:
    return tuple(epochs[n] for n in itertools.takewhile(epochs.__contains__, itertools.count()))


def best(curve: LearningCurve, patience: int | None = None) -> Best:
    """Find the best epoch by ``STOP_RULE``, and whether ``patience`` epochs brought no better."""
    at = top = curve.epochs[0]  # the best, and the one with the most right answers
    by: Score = "loss"
    for epoch in curve.epochs[1:]:
        if gain(at.tested, epoch.tested, "accuracy").is_beyond_noise:
            at, by = epoch, "accuracy"
        elif (
            gain(at.tested, epoch.tested, "loss").is_beyond_noise
            and not gain(epoch.tested, top.tested, "accuracy").is_beyond_noise
            and not _all_right(at.tested)
        ):
            at, by = epoch, "loss"
        top = max(top, epoch, key=lambda record: record.tested.accuracy)
    last = curve.epochs[-1].epoch
    return Best(at.epoch, by, has_stopped=last - at.epoch >= (patience or curve.training.patience))


def _all_right(tested: HeldOutScores) -> bool:
    """Whether the accuracy is within one standard error of 1."""
    return 1 - tested.accuracy <= standard_error(tested, "accuracy")


def is_done(curve: LearningCurve, training: Training, *, whole: bool) -> bool:
    """Whether a curve has all epochs asked for, or, unless ``whole``, has stopped improving."""
    if curve.epochs[-1].epoch >= training.epochs:
        return True
    return not whole and best(curve, training.patience).has_stopped


def gain(before: HeldOutScores, after: HeldOutScores, by: Score) -> Gain:
    """Improvement of an evaluation over an earlier one on the same examples.

    The error of an accuracy is that of Agresti and Min (2005) for matched pairs, with half an
    example more of each kind: no change among n examples does not prove that none can happen.
    """
    if by == "loss":
        saved = [a - b for a, b in zip(before.nats, after.nats, strict=True)]
        return Gain(*_ratio(saved, before.tokens))
    pairs = list(zip(before.correct, after.correct, strict=True))
    better, worse = pairs.count((False, True)), pairs.count((True, False))
    count = len(pairs)
    variance = better + worse + 1 - (better - worse) ** 2 / (count + 2)
    return Gain((better - worse) / count, math.sqrt(variance) / (count + 2))


def standard_error(tested: HeldOutScores, by: Score) -> float:
    """Standard error of a score over the held-out examples.

    Of an accuracy half the width of the one-standard-error interval of Agresti and Coull (1998): a
    hundred right of a hundred do not prove that all are.
    """
    if by == "loss":
        return _ratio(tested.nats, tested.tokens)[1]
    count = len(tested.correct) + 1
    part = (sum(tested.correct) + 0.5) / count
    return math.sqrt(part * (1 - part) / count)


def _ratio(values: Sequence[float], weights: Sequence[int]) -> tuple[float, float]:
    """Ratio of sums R = sum d_i / sum t_i and its standard error (Cochran 1977, 6.4).

    The error is the root of n / (n - 1) times the sum of (d_i - R t_i)^2, over the sum of t_i.
    """
    count, total = len(values), sum(weights)
    ratio = math.fsum(values) / total
    if count < 2:
        return ratio, math.inf
    squares = math.fsum((d - ratio * t) ** 2 for d, t in zip(values, weights, strict=True))
    return ratio, math.sqrt(count / (count - 1) * squares) / total
