"""Estimates as JSON, as a table, and explained."""

import json
from collections.abc import Iterable, Iterator, Sequence

from fitting.laws.fit_result import Interval
from orchestrator.estimating.estimate import MEMORY_ERROR
from orchestrator.estimating.estimate_records import Estimate, Estimated
from orchestrator.estimating.question import Question
from orchestrator.markdown_table import table
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.ranking.ranking import overheads_text
from orchestrator.reporting.estimate_recommendation import (
    batch_text,
    exceeds,
    is_sure,
    missed_text,
    padding_text,
    verdict,
)
from trials.records.observation import Outcome
from trials.simulation.recording import OperatorClass, Purpose
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB
from trials.simulation.timing_model import SimulatedStepTime

BEYOND = " !"  # the deadline, or the budget, by the interval


def as_json(found: Sequence[Estimated], *, one: bool, explain: bool = False) -> str:
    """An object where one GPU was asked for, else a list, however many there are.

    Args:
        found: the estimates.
        one: whether one GPU was asked for.
        explain: whether each is to have what fills its memory, in GiB, and what its time goes to,
            in seconds: ``explained``.
    """
    dumped = [each.estimate.model_dump(mode="json") for each in found]
    if explain:
        for told, each in zip(dumped, found, strict=True):
            time = {} if each.step is None else dict(_time(each.step))
            told["explained"] = {"peak_gib": dict(_memory(each)), "step_seconds": time}
    return json.dumps(dumped[0] if one and dumped else dumped, indent=2)


def as_table(found: Sequence[Estimated], question: Question) -> str:
    """What to rent, one line for each GPU, and what must be known of them."""
    headers = (
        "GPU",
        "offer",
        "$/h",
        "batch",
        "peak GiB",
        "reserved GiB",
        "s/step",
        "examples/s",
        "hours",
        "$",
        "basis",
    )
    workload, wanted = question.workload, question.constraints
    by_default = ", ".join(question.by_default)
    job = (
        f"The job: {workload.examples:,} examples x {workload.epochs} epochs"
        f"{f' (the default: {by_default})' if by_default else ''}"
        f"{overheads_text(workload.overheads)}. Nothing was measured. "
        "The cheapest first; in brackets 90 % intervals."
    )
    rows = [_row(each.estimate, wanted) for each in found]
    parts = (job, verdict(found, wanted), table(headers, rows), _remarks(found, question))
    return "\n\n".join(part for part in parts if part)


def _row(told: Estimate, wanted: Constraints) -> tuple[object, ...]:
    fits = told.outcome is Outcome.FITS
    batch = (
        f"{told.batch_size} of {told.max_batch_size}"
        f" ({told.max_batch_size_interval.low:.0f} to {told.max_batch_size_interval.high:.0f})"
    )
    price = told.price
    offer, rate, hours, usd = ("", "", "", "")
    if told.hours is not None and told.hours_interval is not None:
        hours = _between(told.hours, told.hours_interval)
    if price is not None:
        several = f" ({price.gpus_per_instance} GPUs)" if price.gpus_per_instance > 1 else ""
        offer = f"{price.provider} {price.instance}{several} {price.market}"
        rate = f"{price.usd_per_hour:.3g}"
        hours += BEYOND if exceeds(price.hours_interval, wanted.deadline_hours) else ""
        usd = _between(price.usd, price.usd_interval)
        usd += BEYOND if exceeds(price.usd_interval, wanted.budget_usd) else ""
    return (
        told.gpu,
        offer,
        rate,
        batch
        if fits
        else (
            f"{told.batch_size} {told.outcome}, the largest is {told.max_batch_size}"
            if told.max_batch_size
            else f"not even one example fits: {told.outcome}"
        ),
        f"{told.peak_gib:.1f}",
        f"{told.reserved_gib:.1f} of {told.usable_gib:.1f}",
        "" if told.step_seconds is None else f"{told.step_seconds:.3g}",
        "" if told.examples_per_second is None else f"{told.examples_per_second:.3g}",
        hours,
        usd,
        told.basis,
    )


def _between(value: float, interval: Interval) -> str:
    return f"{value:.3g} ({interval.low:.3g} to {interval.high:.3g})"


def _remarks(found: Sequence[Estimated], question: Question) -> str:
    told = found[0].estimate
    every = [each.estimate for each in found]
    lines = [f"{told.model}, {told.recipe}, {_lengths(every)}."]
    lines += filter(None, (batch_text(found, question), padding_text(found, question)))
    if any(each.price and not is_sure(each.price, question.constraints) for each in every):
        lines.append(
            f"{BEYOND.strip()} the 90 % interval goes beyond the deadline or the budget; what is "
            "expected decides what is left out."
        )
    lines += _stood_in(every)
    lines += [
        f"Step times by {told.constants}.",
        f"Memory within {MEMORY_ERROR:.0%}, as far as a prototype was off published runs.",
        f"CUDA's context is taken to have {CONTEXT_BYTES / GIB:.1f} GiB of the GPU's.",
    ]
    guessed = sorted(e.gpu.key for e in found if e.gpu.usable_memory_bytes is None)
    if guessed:
        lines.append(f"Usable memory as on the box, which nobody measured: {', '.join(guessed)}.")
    if sum(each.price is not None for each in every) > 1:
        lines.append(
            "Most of what is unknown of the times all GPUs share: their order is surer than the "
            "hours. Each is told at its cheapest offer."
        )
    lines += missed_text(found, question.constraints)
    endless = sorted(each.gpu for each in every if each.max_batch_size >= each.batch_limit)
    if endless:
        lines.append(f"No batch above {told.batch_limit} was tried: {', '.join(endless)}.")
    priceless = [e.estimate for e in found if e.estimate.no_price and not e.missed]
    for reason in dict.fromkeys(each.no_price for each in priceless):
        gpus = sorted(each.gpu for each in priceless if each.no_price == reason)
        lines.append(f"No dollars for {', '.join(gpus)}: {reason}.")
    timeless = sorted(e.estimate.gpu for e in found if _lacks_speed(e.estimate))
    if timeless:
        lines.append(
            f"No time for {', '.join(timeless)}: the catalog does not know its speed. --catalog "
            "mine.yaml can tell it: bf16_dense_tflops and memory_bandwidth_gb_per_second of a GPU."
        )
    positions = found[0].cell.model.positions
    if positions is not None and told.seq_len > positions:
        lines.append(f"{told.model} was made for examples of {positions} tokens at most.")
    for each in every:
        if each.routed_peak_gib is not None:
            median, upper = each.routed_peak_gib
            lines.append(
                f"{each.gpu}, over the drawn shares of the experts: peak {median:.1f} GiB in the "
                f"median, {upper:.1f} at the 95th percentile."
            )
    return "\n".join(lines)


def _stood_in(every: Sequence[Estimate]) -> Iterator[str]:
    """What is not the very stack that would run, and on which GPUs."""
    stood_in = dict.fromkeys(what for each in every for what in each.approximations)
    for what in stood_in:
        gpus = [each.gpu for each in every if what in each.approximations]
        where = "" if len(gpus) == len(every) else f" ({', '.join(sorted(gpus))})"
        yield f"Approximate: {what}{where}."
    if not stood_in:
        yield "Traced: the installed libraries themselves."


def _lengths(every: Sequence[Estimate]) -> str:
    """Which lengths memory and times are of."""
    longest, padded = every[0].seq_len, sorted(each.tokens_per_example for each in every)
    if padded[0] == longest:
        return f"{longest} tokens an example"
    most = "" if round(padded[-1]) == round(padded[0]) else f" to {padded[-1]:.0f}"
    return (
        f"memory at {longest} tokens an example, times at {padded[0]:.0f}{most}, padding included"
    )


def _lacks_speed(told: Estimate) -> bool:
    return told.outcome is Outcome.FITS and told.step_seconds is None


def explanation(estimated: Estimated) -> str:
    """What fills the memory at the peak, and what the time goes to."""
    told = estimated.estimate
    parts = [f"## {told.gpu}, batch {told.batch_size}"]
    memory = _memory(estimated)
    total = sum(gib for _, gib in memory)
    rows = [(what, f"{gib:.2f}", f"{gib / total:.1%}") for what, gib in memory]
    parts.append(table(("in use at the peak", "GiB", "part"), rows))
    if estimated.step is not None:
        whole = estimated.step.seconds
        rows = [
            (what, f"{took:.4f}", f"{took / whole:.1%}") for what, took in _time(estimated.step)
        ]
        parts.append(table(("of a step", "seconds", "part"), rows))
    return "\n\n".join(parts)


PURPOSES = {
    Purpose.ACTIVATION: "activations and their gradients",
    Purpose.WORKSPACE: "workspace within kernels",
    Purpose.GRADIENT: "gradients",
    Purpose.OPTIMIZER: "optimizer state",
    Purpose.HEAD: "logits and loss",
    Purpose.CHECKPOINT: "kept by the layers for the backward pass",
    Purpose.WEIGHT: "weights",
    Purpose.QUANTISATION: "quantisation constants",
    Purpose.LIBRARY: "cuBLAS workspace",
}
WORKS = {
    OperatorClass.MATRIX_PRODUCT: "matrix products",
    OperatorClass.GROUPED_PRODUCT: "experts' matrix products, grouped",
    OperatorClass.ATTENTION_FORWARD: "attention, forward",
    OperatorClass.ATTENTION_BACKWARD: "attention, backward",
    OperatorClass.DEQUANTISATION: "4-bit dequantisation",
    OperatorClass.SCAN: "selective scan",
    OperatorClass.UPDATE: "optimizer",
    OperatorClass.MEMORY: "everything bound by memory",
}


def _memory(estimated: Estimated) -> list[tuple[str, float]]:
    """GiB at the peak by what they are for, the most first."""
    memory = estimated.cell.at_peak(estimated.estimate.batch_size, estimated.gpu)
    return _largest_first((PURPOSES[purpose], size / GIB) for purpose, size in memory.items())


def _time(step: SimulatedStepTime) -> list[tuple[str, float]]:
    """Seconds of a step by what they go to, the most first."""
    busy = [(WORKS[work], float(step.busy_seconds[work])) for work in WORKS]
    waiting = step.seconds - sum(seconds for _, seconds in busy)
    return _largest_first([*busy, ("the GPU waits for the host", waiting)])


def _largest_first(parts: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
