"""What was learnt: curves, the epoch at which they stop improving, which learns better. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fitting.doubt import NORMAL_90
from trials.learning import HeldOutScores, LearnData, LearnedEpoch, Training
from trials.workload import Cell

Score = Literal["accuracy", "loss"]
STOP_RULE = (
    "An epoch is better than the best one so far when more of its held-out answers are right; or, "
    "while not all are, when its held-out loss is lower and no fewer are right: each by more than "
    "one standard error of the difference, query by query."
)


@dataclass(frozen=True, slots=True)
class Curve:
    """The epochs of one cell on one data set, those of its longest attempt.

    Attributes:
        epochs: from 0, without a gap.
    """

    epochs: tuple[LearnedEpoch, ...]

    @property
    def cell(self) -> Cell:
        """What was fine-tuned."""
        return self.epochs[-1].cell

    @property
    def training(self) -> Training:
        """How, as it was asked last."""
        return self.epochs[-1].training

    @property
    def data(self) -> LearnData:
        """On what."""
        return self.epochs[-1].data

    @property
    def key(self) -> str:
        """Its name."""
        return self.epochs[-1].curve


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much one test beats another.

    Attributes:
        mean: of the score; positive where the later one is better.
        error: its standard error over the held-out queries; infinite where there is but one.
    """

    mean: float
    error: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether it is more than one standard error."""
        return self.mean > self.error

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end of 90 %."""
        return self.mean - NORMAL_90 * self.error, self.mean + NORMAL_90 * self.error


@dataclass(frozen=True, slots=True)
class Best:
    """The best epoch of a curve.

    Attributes:
        epoch: which one: no later one is better beyond noise; 0 where none ever was.
        by: the score that said so.
        has_stopped: whether ``patience`` epochs after it are known.
    """

    epoch: int
    by: Score
    has_stopped: bool

    @property
    def is_told(self) -> bool:
        """Whether it tells a number of epochs: some were better, and no more will be."""
        return self.has_stopped and self.epoch > 0


def curves(records: Iterable[LearnedEpoch]) -> list[Curve]:
    """The curves of records, in the order they were begun.

    Of a curve that had to begin anew the longest attempt counts, the latest of equals.
    """
    whole = []
    for runs in attempts(records).values():
        longest = max(runs, key=lambda attempt: (len(runs[attempt]), attempt))
        if runs[longest]:
            whole.append(Curve(runs[longest]))
    return whole


def attempts(records: Iterable[LearnedEpoch]) -> dict[str, dict[int, tuple[LearnedEpoch, ...]]]:
    """Of each curve, by its key, the epochs of each attempt: from 0, as far as there is no gap."""
    found: dict[str, dict[int, dict[int, LearnedEpoch]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        found[record.curve][record.attempt].setdefault(record.epoch, record)
    return {
        curve: {attempt: _without_gap(epochs) for attempt, epochs in own.items()}
        for curve, own in found.items()
    }


def _without_gap(epochs: dict[int, LearnedEpoch]) -> tuple[LearnedEpoch, ...]:
    count = 0
    while count in epochs:
        count += 1
    return tuple(epochs[number] for number in range(count))


def best(curve: Curve, patience: int | None = None) -> Best:
    """The best epoch by ``STOP_RULE``, and whether learning has stopped there.

    Args:
        curve: what was learnt.
        patience: epochs after the best one that none of may be better; absent for the curve's own.
    """
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
        top = max(top, epoch, key=lambda each: each.tested.accuracy)
    last = curve.epochs[-1].epoch
    return Best(at.epoch, by, has_stopped=last - at.epoch >= (patience or curve.training.patience))


def _all_right(tested: HeldOutScores) -> bool:
    """Whether every answer is right, as far as these queries tell."""
    return 1 - tested.accuracy <= standard_error(tested, "accuracy")


def is_done(curve: Curve, training: Training, *, whole: bool) -> bool:
    """Whether no more is to be learnt.

    Args:
        curve: what was learnt.
        training: how many epochs are wanted, at most, and the patience.
        whole: whether all of them are, though learning has stopped.
    """
    if curve.epochs[-1].epoch >= training.epochs:
        return True
    return not whole and best(curve, training.patience).has_stopped


def gain(before: HeldOutScores, after: HeldOutScores, by: Score) -> Gain:
    """By how much a test beats one on the same queries."""
    return _accuracy_gain(before, after) if by == "accuracy" else _loss_gain(before, after)


def _accuracy_gain(before: HeldOutScores, after: HeldOutScores) -> Gain:
    """Part of the queries that went right, less that which went wrong.

    The error is that of Agresti and Min (2005) for matched pairs, which has half a query more of
    each kind: nothing that changed does not say that nothing can.
    """
    pairs = list(zip(before.correct, after.correct, strict=True))
    better, worse = pairs.count((False, True)), pairs.count((True, False))
    count = len(pairs)
    variance = better + worse + 1 - (better - worse) ** 2 / (count + 2)
    return Gain((better - worse) / count, math.sqrt(variance) / (count + 2))


def _loss_gain(before: HeldOutScores, after: HeldOutScores) -> Gain:
    """Nats a token that are saved."""
    saved = [a - b for a, b in zip(before.nats, after.nats, strict=True)]
    return Gain(*_ratio(saved, before.tokens))


def standard_error(tested: HeldOutScores, by: Score) -> float:
    """Of a score itself, over the held-out queries.

    Of an accuracy half the width of the interval of Agresti and Coull (1998) of one standard error:
    a hundred right of a hundred are not right for ever.
    """
    if by == "loss":
        return _ratio(tested.nats, tested.tokens)[1]
    count = len(tested.correct) + 1
    part = (sum(tested.correct) + 0.5) / count
    return math.sqrt(part * (1 - part) / count)


def _ratio(each: Sequence[float], weights: Sequence[int]) -> tuple[float, float]:
    """A ratio of sums and its standard error, R = sum d_i / sum t_i (Cochran 1977, 6.4).

    The root of n / (n - 1) times the sum of (d_i - R t_i)^2, over the sum of t_i.
    """
    count, total = len(each), sum(weights)
    ratio = math.fsum(each) / total
    if count < 2:
        return ratio, math.inf
    squares = math.fsum((d - ratio * t) ** 2 for d, t in zip(each, weights, strict=True))
    return ratio, math.sqrt(count / (count - 1) * squares) / total
