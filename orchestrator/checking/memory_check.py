"""Whether a training fits the memory of its GPUs, and the cheapest change under which it does."""

import datetime as dt

from fitting.laws.fit_result import Interval
from gpu_catalog.number_text import dollars, gib_of, short
from gpu_catalog.record import Record
from orchestrator.estimating.choosing.layouts import names_by_count
from orchestrator.estimating.choosing.recipe_choice import fits
from orchestrator.estimating.estimate_job import estimate_job
from orchestrator.estimating.estimate_records import (
    FROZEN_IN_FP32,
    SEVERAL_UNTRIED,
    Alternative,
    Estimate,
)
from orchestrator.estimating.estimate_request import EstimateRequest, without_electricity
from orchestrator.estimating.question import EstimateError
from orchestrator.estimating.requested_gpus import requested_gpus
from orchestrator.pricing.host_memory import NOT_IN_IT
from trials.recipes.parallel import Strategy
from trials.records.observation import Basis

UNSURE = "Memory is too near the limit to be sure"


class MemoryCheck(Record):
    """Verdict on one training on one GPU, or on several of a node. Memory is that of each.

    Attributes:
        fits: whether a micro-batch of ``batch_size`` fits.
        gpu: key of the GPU, after their number where there are several: ``8xH100-SXM``.
        gpus: number of GPUs.
        strategy: how several GPUs share the training; None for one.
        certain: whether the whole 90 % interval of the memory agrees.
        micro_batches: micro-batches per optimizer step.
        max_batch_size: largest micro-batch that fits; 0 where not even one example does. None
            larger is tried than the effective batch needs.
        peak_gib, peak_gib_interval: peak of the memory that PyTorch's allocator has in use, and its
            90 % interval.
        reserved_gib: peak of the memory that it reserves.
        usable_gib: memory of the GPU that it may reserve.
        host_gib: memory that the processes of a node keep on its host; None where they keep nothing
            there. It does not count for ``fits``.
        freezes_in_fp32: whether frozen weights are in fp32, as TRL's trainer loads them for LoRA.
        most_tokens: longest example that the model supports; None where it states no limit.
        examples, epochs: the job that the change's dollars are of.
        assumed: options that were not given, and whose values are assumed.
        change: cheapest change under which it fits; None where it fits, or where no change helps.
            A card that the user owns has dollars only where electricity has a price.
    """

    fits: bool
    certain: bool
    model: str
    gpu: str
    gpus: int
    strategy: Strategy | None
    recipe: str
    seq_len: int
    batch_size: int
    micro_batches: int
    max_batch_size: int
    peak_gib: float
    peak_gib_interval: Interval
    reserved_gib: float
    usable_gib: float
    host_gib: float | None = None
    freezes_in_fp32: bool
    most_tokens: int | None
    examples: int
    epochs: int
    assumed: tuple[str, ...]
    change: Alternative | None
    basis: Basis = Basis.SIMULATED


def memory_check(request: EstimateRequest, today: dt.date) -> MemoryCheck:
    """Simulate a training on its GPUs, and look for a change where it does not fit.

    Args:
        request: the training; its GPU must be of one kind and number, and its length one.
        today: day that the change's price has moved until.

    Raises:
        UserError: options, data, model or prices are wrong, or the training cannot be simulated.
    """
    if request.seq_len == "max" or isinstance(request.seq_len, tuple):
        raise EstimateError("--seq-len: a check is of one length: give a number")
    priced, request = request, without_electricity(request)
    prices = request.prices.in_use()
    catalog = prices.over(prices.catalog)
    keys = [
        f"{count}x{gpu.key}" if count > 1 else gpu.key
        for count, names in names_by_count(request.gpu, request.counts).items()
        for gpu in requested_gpus(names, request.memory_gib, catalog)
    ]
    if len(keys) > 1:
        raise EstimateError(
            f"--gpu {','.join(request.gpu)} matches {len(keys)} GPUs: name one: {', '.join(keys)}"
        )
    estimates = estimate_job(request, today)
    if not estimates.estimated:
        raise EstimateError("\n".join(estimates.skipped))
    row = estimates.estimated[0]
    estimate, is_fit = row.estimate, fits(row)
    change = None if is_fit else next(iter(estimate.alternatives), None)
    if change is not None and request != priced:
        change = change.model_copy(update={"usd": None})
    fields = set(MemoryCheck.model_fields) & set(Estimate.model_fields)
    return MemoryCheck(
        **estimate.model_dump(include=fields),
        fits=is_fit,
        certain=_is_certain(estimate, is_fit=is_fit),
        freezes_in_fp32=row.freezes_in_fp32,
        most_tokens=row.question.model.positions,
        change=change,
    )


def _is_certain(estimate: Estimate, *, is_fit: bool) -> bool:
    if is_fit:
        return estimate.surely_fits
    return estimate.max_batch_size_interval.high < estimate.batch_size


def check_text(check: MemoryCheck) -> str:
    """The verdict in a line, and below it the change that helps."""
    verdict = "fits" if check.fits else "does not fit"
    layout = "" if check.strategy is None else f" on each GPU ({check.strategy})"
    batch = f"{check.batch_size} x {check.micro_batches} of {check.seq_len} tokens{layout}"
    peak = check.peak_gib_interval
    doubt = "" if check.certain else f". {UNSURE}"
    first = (
        f"**{check.model} {verdict} {check.gpu}**: batch {batch} reserves "
        f"{gib_of(check.reserved_gib, check.usable_gib)} GiB. Peak in use "
        f"{check.peak_gib:.1f} GiB, 90 % interval {peak.low:.1f} to {peak.high:.1f}{doubt}."
    )
    lines = [first]
    if "--seq-len" in check.assumed:
        lines.append(f"The length is assumed: --seq-len {check.seq_len} or --dataset gives yours.")
    if check.freezes_in_fp32 and not (check.fits and check.certain):
        lines.append(f"{FROZEN_IN_FP32}: --precision bf16-mixed halves them.")
    if check.host_gib is not None:
        lines.append(f"The host holds {short(check.host_gib, 4)} GiB: {NOT_IN_IT}.")
    if check.most_tokens is not None and check.seq_len > check.most_tokens:
        lines.append(f"{check.model} supports examples of at most {check.most_tokens:,} tokens.")
    if check.change is not None:
        change = check.change
        alters = "" if change.learns_alike else ", which alters training"
        job = f"{check.examples:,} examples x {check.epochs} epoch{'s' * (check.epochs != 1)}"
        cost = "" if change.usd is None else f", ${dollars(change.usd)} for {job}"
        lines.append(
            f"It fits with {change.options}{alters}: batch {change.batch_size} x "
            f"{change.micro_batches}, {change.reserved_gib:.1f} GiB{cost}"
            f"{'' if change.surely_fits else f'. {UNSURE}'}."
        )
    elif not check.fits:
        several = f" {SEVERAL_UNTRIED}: --gpu 2xGPU checks two." if check.strategy is None else ""
        lines.append(f"No change that was tried makes it fit.{several}")
    return "\n".join(lines)
