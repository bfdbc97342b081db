"""Records of a family's law: the chosen form, its parameters, candidates and intervals."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fitting.laws.fit_result import Parameter
from fitting.laws.forms import Form
from gpu_catalog.record import Record
from trials.records.cell import Weights
from trials.records.observation import Basis

Number = Annotated[float, Field(allow_inf_nan=False)]


class FamilyName(Record):
    """Name of a family, the steps that share one law of their time.

    Attributes:
        weights: random or pretrained weights, which route differently; None if not recorded.
        recipe: key of the training recipe, or its name in a table.
        basis: measured or simulated.
        software: fingerprint of the stack without device and driver; None if not recorded.
        layout: ``Parallel.key`` of several GPUs that train together; None for one GPU.
    """

    model: str
    weights: Weights | None = "random"
    recipe: str
    basis: Basis
    software: str | None = None
    # Records of one GPU stay as they were before there were layouts.
    layout: Annotated[str | None, Field(exclude_if=lambda layout: layout is None)] = None

    @property
    def key(self) -> str:
        """Stable name, for example ``mixtral-8x7b/qlora-r16-bf16/measured/0123456789ab``."""
        model = self.model if self.weights != "pretrained" else f"{self.model}+{self.weights}"
        layout = "" if self.layout is None else f"/{self.layout}"
        return f"{model}/{self.recipe}/{self.basis}/{self.software or 'unknown-stack'}{layout}"


class LawCandidate(Record):
    """A candidate form with its relative errors of throughput.

    Attributes:
        error: mean error over the points, each by the law without it, to first order; a point that
            the law cannot predict then counts 1. The choice is made by this error.
        standard_error: standard error of that mean.
        growing_error: mean error over the larger batches of each curve by a fit to the smaller
            half, over those with a prediction; None without any.
        length_error: mean error by fits without the point's length (more than ten lengths are left
            out in folds); None for a form by series.
        condition: largest condition number of a group's terms, each scaled to length 1.
    """

    form: Form
    error: Number
    standard_error: Number
    growing_error: Number | None
    length_error: Number | None
    parameters: int
    condition: Number | None


class GroupLaw(Record):
    """Law of one GPU or one series.

    Attributes:
        name: name of the GPU with its stack, or of the series.
        parameters: floor t0 and slope, in the order of the form's terms; empty with too few points.
        held_at_zero: names of the parameters that would be negative.
        sparsity: the only sparsity that the law covers; None where it covers any.
        remedy: measurements that would give parameters; None where there are parameters.
    """

    name: str
    points: int
    parameters: tuple[Parameter, ...]
    held_at_zero: tuple[str, ...]
    sparsity: Number | None
    remedy: str | None


class Suspect(Record):
    """A point that is far from the law fitted without it.

    Attributes:
        gpu: GPU with its stack.
        series: GPU and length, or data set.
        seq_len: padded tokens per example.
        seconds: seconds per step, measured or simulated as the family's basis says.
        expected_seconds: seconds by the law without the point.
        spreads: absolute logarithm of the ratio of these two, over the law's spread.
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
    """Range of the batch sizes that were observed of a series at one sparsity."""

    sparsity: Number
    smallest: Number
    largest: Number


class ObservedSeries(Record):
    """An observed series, with the errors of the law there.

    Attributes:
        name: GPU, stack and length.
        curves: range of batch sizes at each sparsity, ascending.
        sigma: scale of ``log(law / measured)`` at points left out of the fit, shrunk towards the
            family's; None where the family has no scale.
        half_width: half-width of the interval of the logarithm of a step time; None as above.
    """

    name: str
    curves: tuple[BatchSizeRange, ...]
    sigma: Number | None
    half_width: Number | None


class Intervals(Record):
    """Conformal intervals of a family, with a scale for each series.

    Attributes:
        level: nominal coverage, for points like the measured ones.
        residuals: ``nested``: residual of each point by the form that is chosen and fitted without
            it, for small families only, since it takes long; ``first order``: by the chosen form,
            corrected for the leverage of the point. With fewer than ten points, 90 % intervals from
            first-order residuals cover about 80 %.
        sigma: scale of ``log(law / measured)`` for a series without points.
        half_width: half-width of the interval of the logarithm of a step time of such a series.
        coverage: share of points inside the intervals made without them; None with few points.
    """

    level: Number
    residuals: Literal["nested", "first order"]
    sigma: Number
    half_width: Number
    coverage: Number | None


class LengthLaw(Record):
    """Law of the change of a step time with the length of its examples.

    It is the form by GPU with the least error on lengths left out of the fit. A form by series,
    even if it is the family's choice, is fitted to each length separately and predicts no other.

    Attributes:
        error: its ``LawCandidate.length_error``.
        half_width: half-width of the interval of the logarithm of a step time at a length left out
            of the fit, at the level of the fit's intervals.
        exponent: g, exponent of the sparsity; None where it was never varied.
        groups: law of each GPU.
    """

    form: Form
    error: Number
    half_width: Number
    exponent: Parameter | None
    groups: tuple[GroupLaw, ...]


class FamilyFit(Record):
    """Law of a family, or the reason why there is none and a remedy.

    Attributes:
        visits: number of timed probes.
        points: number of distinct points; the visits of a batch size merge into their median.
        form: chosen form; None where no form can be fitted.
        equation: equation of the form, with t seconds, b examples, N padded tokens, s sparsity.
        why: reason for the choice, or for the failure.
        remedy: measurements that would give a law; present for a failure alone.
        candidates: every form that the points identify, the best first.
        exponent: g, exponent of the sparsity; None where it is not shared or was never varied.
        groups: law of each GPU or series.
        spread: robust standard deviation of the residuals, relative to the step time.
        suspects: points far from the law fitted without them.
        series: observed series; the law extrapolates elsewhere.
        intervals: intervals of predictions; None with too few points.
        by_length: law of lengths; None with a single length or too few points.
    """

    name: FamilyName
    visits: int
    points: int
    form: Form | None = None
    equation: str | None = None
    why: str
    remedy: str | None = None
    candidates: tuple[LawCandidate, ...] = ()
    exponent: Parameter | None = None
    groups: tuple[GroupLaw, ...] = ()
    spread: Number | None = None
    suspects: tuple[Suspect, ...] = ()
    series: tuple[ObservedSeries, ...]
    intervals: Intervals | None = None
    by_length: LengthLaw | None = None

    @model_validator(mode="after")
    def _is_a_law_or_a_failure(self) -> Self:
        if len({self.form is None, self.equation is None, self.remedy is not None}) != 1:
            raise ValueError("a family has a form and its equation, or a remedy")
        return self
