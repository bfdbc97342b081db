"""The law of a family, as a record: what was chosen, fitted to what, and how sure it is. Pure."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fitting.laws.fit_result import Parameter
from fitting.laws.forms import Form
from gpu_catalog.record import Record
from trials.records.cell import Weights
from trials.records.observation import Basis

Number = Annotated[float, Field(allow_inf_nan=False)]


class FamilyName(Record):
    """What shares one law of the step time.

    Attributes:
        model: name of the model.
        weights: random or pretrained; they route differently. Absent where nobody says.
        recipe: how it is fine-tuned, by its key or as a table has it.
        basis: measured or simulated.
        software: fingerprint of the stack, device and driver left out; absent where nobody says.
    """

    model: str
    weights: Weights | None = "random"
    recipe: str
    basis: Basis
    software: str | None = None

    @property
    def key(self) -> str:
        """A stable name, for example ``mixtral-8x7b/qlora-r16-bf16/measured/0123456789ab``."""
        model = self.model if self.weights != "pretrained" else f"{self.model}+{self.weights}"
        return f"{model}/{self.recipe}/{self.basis}/{self.software or 'unknown-stack'}"


class LawCandidate(Record):
    """A form that was tried, and how far it is off.

    Errors are those of the throughput, each as a part of it.

    Attributes:
        form: which.
        error: mean over the points, each by the law without it, to first order; a point that the
            law then does not speak of counts 1. It is what the choice is made by.
        standard_error: of that mean.
        growing_error: mean over the larger batches of each curve, by a fit to the smaller half;
            only over those that it speaks of, absent where there are none.
        length_error: mean, by a fit without any point of that length (of more than ten, several
            are left out at once), as above; absent for a form by series.
        parameters: how many were free.
        condition: of the worst group's terms, each scaled to length 1.
    """

    form: Form
    error: Number
    standard_error: Number
    growing_error: Number | None
    length_error: Number | None
    parameters: int
    condition: Number | None


class GroupLaw(Record):
    """What the form has fitted to one GPU, or to one series.

    Attributes:
        name: of the GPU, with its stack, or of the series.
        points: how many it has.
        parameters: the floor t0 and the slope, in the order of the form's terms; empty where its
            points are too few.
        held_at_zero: names of those that would be below zero.
        sparsity: the only one that it speaks of; absent where it speaks of any.
        remedy: what to measure where there are no parameters.
    """

    name: str
    points: int
    parameters: tuple[Parameter, ...]
    held_at_zero: tuple[str, ...]
    sparsity: Number | None
    remedy: str | None


class Suspect(Record):
    """A point that the law does not believe.

    Attributes:
        gpu: with its stack.
        series: GPU and length, or data set.
        seq_len: padded tokens per example.
        sparsity: active experts over experts.
        batch_size: examples per step.
        seconds: as measured.
        expected_seconds: by the law without the point, to first order.
        spreads: how far apart these are: the logarithm of their ratio, over the law's spread.
    """

    gpu: str
    series: str
    seq_len: Number
    sparsity: Number
    batch_size: Number
    seconds: Number
    expected_seconds: Number
    spreads: Number


class BatchSizeRange(Record):
    """The batch sizes seen of a series at one sparsity, from the smallest to the largest."""

    sparsity: Number
    smallest: Number
    largest: Number


class SeriesSeen(Record):
    """What was seen of one series, and how far the law is off there.

    Attributes:
        name: GPU, stack and length.
        curves: one for each sparsity, ascending.
        sigma: of ``log(law / measured)`` at points that the law had not seen; a series of few
            points borrows from the family. Absent where the family has none.
        half_width: half the interval of the logarithm of a step time; absent as above.
    """

    name: str
    curves: tuple[BatchSizeRange, ...]
    sigma: Number | None
    half_width: Number | None


class Intervals(Record):
    """How the family's intervals were made: conformal, with a scale of each series' own.

    Attributes:
        level: how often an interval is to hold, for points like those seen.
        residuals: ``nested``: each point by the form chosen and fitted without it, where there is
            one; ``first order``: by the form chosen, the point's pull taken off. The first take
            long, and are made for few points; of fewer than ten, the second hold less often than
            they say, about eight times in ten.
        sigma: of ``log(law / measured)`` over all of them, for a series that was never seen.
        half_width: half the interval of the logarithm of a step time of such a series.
        coverage: how often the interval made without a point holds it; absent for few points.
    """

    level: Number
    residuals: Literal["nested", "first order"]
    sigma: Number
    half_width: Number
    coverage: Number | None


class LengthLaw(Record):
    """The law that tells how a step's time changes with the length of its examples.

    It is the one by GPU that is least off on lengths that it has not seen, whichever form is best
    at those that were: a form by series is fitted to each length by itself, and tells of no other.

    Attributes:
        form: which.
        error: its ``LawCandidate.length_error``.
        half_width: half the interval of the logarithm of a step time at a length that it has not
            seen, at the level of the fit's intervals.
        exponent: g, of the sparsity; absent where it was never varied.
        groups: what was fitted to each GPU.
    """

    form: Form
    error: Number
    half_width: Number
    exponent: Parameter | None
    groups: tuple[GroupLaw, ...]


class FamilyFit(Record):
    """The law of a family, or the reason that there is none and a remedy.

    Attributes:
        name: what it is the law of.
        visits: timed probes.
        points: visits of one batch size put together by their median.
        form: the one chosen; absent where no form can be fitted.
        equation: of that form: t seconds of a step, b examples, N padded tokens, s sparsity.
        why: what the form was chosen for, or the reason that there is none.
        remedy: what to measure; present when, and only when, there is no form.
        candidates: every form that the points can carry, the best first.
        exponent: g, of the sparsity; absent where it is not shared, or was never varied.
        groups: what was fitted to each GPU or series.
        spread: of the residuals, by their median: a part of the step time.
        suspects: points that the law does not believe.
        series: what was seen: elsewhere the law extrapolates.
        intervals: how sure predictions are; absent where nothing is left to tell it from.
        by_length: the law of lengths; absent where there is one length, or too few points.
    """

    name: FamilyName
    visits: int
    points: int
    form: Form | None
    equation: str | None
    why: str
    remedy: str | None
    candidates: tuple[LawCandidate, ...]
    exponent: Parameter | None
    groups: tuple[GroupLaw, ...]
    spread: Number | None
    suspects: tuple[Suspect, ...]
    series: tuple[SeriesSeen, ...]
    intervals: Intervals | None
    by_length: LengthLaw | None = None

    @model_validator(mode="after")
    def _is_a_law_or_a_refusal(self) -> Self:
        if len({self.form is None, self.equation is None, self.remedy is not None}) != 1:
            raise ValueError("a family has a form and its equation, or a remedy")
        return self
