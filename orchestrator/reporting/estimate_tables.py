"""An estimate as JSON, as a Markdown table with notes, and explained part by part."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu_catalog.number_text import short
from orchestrator.estimating.estimate_records import Estimate, Estimated
from orchestrator.estimating.memory_error import published_errors
from orchestrator.estimating.question import Question
from orchestrator.markdown_table import records_table, span, table
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.reporting.estimate_recommendation import (
    batch_text,
    ends_text,
    exceeds,
    fastest,
    is_sure,
    length_text,
    missed_text,
    padding_text,
    varying_text,
    verdict,
)
from orchestrator.reporting.notes.box_notes import box_notes
from orchestrator.reporting.notes.data_notes import data_notes
from orchestrator.reporting.notes.gap_notes import gap_notes
from orchestrator.reporting.sections.alternative_recipes import (
    recipe_words,
    remedies_text,
    runners_up_text,
)
from orchestrator.reporting.sections.cost_text import overheads_text
from orchestrator.spec.job import PACKED
from orchestrator.spec.job_tokens import rows as rows_of
from trials.records.observation import Outcome
from trials.simulation.recording import OperatorClass, Purpose
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB
from trials.simulation.timing_model import SimulatedStepTime

EXCEEDS = " !"  # marks an interval that exceeds the deadline or the budget


def as_json(estimates: Sequence[Estimated], *, one: bool, explain: bool = False) -> str:
    """Serialise estimates: an object where one GPU was requested, else a list of any length.

    For both objectives, ``best_by`` has those by which a GPU is the best, and ``fastest`` the
    price of its fastest offer.

    Args:
        estimates: sorted by cost.
        one: whether one GPU was requested.
        explain: whether to add ``explained`` to each: memory in GiB and time in seconds by purpose.
    """
    dumped = [e.estimate.model_dump(mode="json") for e in estimates]
    if explain:
        for fields, e in zip(dumped, estimates, strict=True):
            time = {} if e.step is None else dict(_time(e.step))
            fields["explained"] = {"peak_gib": dict(_memory(e)), "step_seconds": time}
    if estimates and estimates[0].question.constraints.objective == "both":
        for fields, e in zip(dumped, estimates, strict=True):
            fields.update(_both(e, estimates))
    return json.dumps(dumped[0] if one and dumped else dumped, indent=2)


def _both(row: Estimated, estimates: Sequence[Estimated]) -> dict[str, Any]:
    """Fields of an estimate where both the cheapest and the fastest offer are wanted."""
    best = {"cost": estimates[0] if estimates[0].prices else None, "time": fastest(estimates)}
    prices = sorted(row.prices, key=lambda price: (price.hours, price.usd))
    return {
        "best_by": [objective for objective, one in best.items() if one is row],
        "fastest": prices[0].model_dump(mode="json") if prices else None,
    }


def as_table(estimates: Sequence[Estimated], question: Question) -> str:
    """Render the job, the recommendation, one row for each GPU, and notes on accuracy and gaps.

    Each of several given lengths has a recommendation, and its name before notes of its own.
    """
    wanted, groups = question.constraints, _by_length(estimates)
    names = [f"{rows[0].estimate.seq_len:,} tokens: " for rows in groups]
    if len(groups) == 1:
        names = [""]
    has_tokens = len(groups) > 1 or question.finds_seq_len
    order = "length, then by " * has_tokens + ("time" if wanted.objective == "time" else "cost")
    jobs = dict.fromkeys(_job(rows[0].question) for rows in groups)
    verdicts = [(name, verdict(rows, wanted)) for name, rows in zip(names, groups, strict=True)]
    if question.finds_seq_len and (text := verdict(_longest(estimates), wanted)):
        verdicts = [(_longest_text(estimates), text)]
    parts = [
        *(f"{name}{text}" for name, text in verdicts if text),
        records_table(
            _row(e.estimate, recipe, wanted, has_tokens=has_tokens)
            for e, recipe in zip(estimates, _recipe_column(estimates), strict=True)
        ),
        "\n".join(_all_notes(names, groups)),
    ]
    job = (
        f"{' '.join(jobs)} Nothing was measured: every value is simulated. Rows are sorted by "
        f"{order}. Brackets are 90 % intervals."
    )
    return "\n\n".join([job, *parts])


def _recipe_column(estimates: Sequence[Estimated]) -> list[str]:
    """Recipe of each row; empty texts where all have the same."""
    recipes = [recipe_words(row) for row in estimates]
    return recipes if len(set(recipes)) > 1 else [""] * len(recipes)


def _longest(estimates: Sequence[Estimated]) -> list[Estimated]:
    """Estimates of the longest sequence, which come first."""
    most = estimates[0].estimate.seq_len
    return [row for row in estimates if row.estimate.seq_len == most]


def _longest_text(estimates: Sequence[Estimated]) -> str:
    row = estimates[0].estimate
    if row.outcome is not Outcome.FITS:
        return ""
    return f"The longest sequence that fits has {row.seq_len:,} tokens. "


def _by_length(estimates: Sequence[Estimated]) -> list[list[Estimated]]:
    """Estimates of each given length; all in one group where each GPU has its own."""
    groups: dict[int | None, list[Estimated]] = {}
    for row in estimates:
        length = None if row.question.finds_seq_len else row.estimate.seq_len
        groups.setdefault(length, []).append(row)
    return list(groups.values())


def _job(question: Question) -> str:
    workload = question.workload
    by_default = ", ".join(question.by_default)
    left_out = f" Left out: {text}." if (text := question.recipe.left_out) else ""
    return (
        f"The job: {workload.examples:,} examples{_packed(question)} x {workload.epochs} epochs"
        f"{f' (assumed: {by_default})' if by_default else ''}"
        f"{overheads_text(workload.overheads)}.{left_out}"
    )


def _all_notes(names: Sequence[str], groups: Sequence[Sequence[Estimated]]) -> list[str]:
    """Notes of all groups once; those that differ follow the name of their group."""
    notes = [list(_notes(rows, rows[0].question)) for rows in groups]
    shared = [note for note in notes[0] if all(note in others for others in notes)]
    own = [
        f"{name}{note}"
        for name, group in zip(names, notes, strict=True)
        for note in group
        if note not in shared
    ]
    return [*own, *shared]


def _packed(question: Question) -> str:
    """Rows that the examples are packed into; empty where they are not packed."""
    workload, row = question.workload, question.seq_len
    if workload.padding not in PACKED:
        return ""
    rows, data = rows_of(workload), workload.lengths
    cut = 0 if data is None else data.cut_off(row)
    return (
        f" packed into {rows:,} rows of up to {row:,} tokens ({short(workload.examples / rows)} "
        f"examples a row{f'; {cut:,} examples are truncated' if cut else ''})"
    )


def _row(
    estimate: Estimate,
    recipe: str,
    wanted: Constraints,
    *,
    has_tokens: bool,
) -> dict[str, object]:
    """Row of a GPU, with its recipe where the rows differ in it."""
    price = estimate.price
    offer, rate, hours, usd = ("", "", "", "")
    if estimate.hours is not None and estimate.hours_interval is not None:
        hours = f"{short(estimate.hours)} ({ends_text(estimate.hours_interval)})"
    if price is not None:
        idle = price.gpus_per_instance - estimate.gpus
        several = f" ({price.gpus_per_instance} GPUs{f', {idle} idle' if idle else ''})"
        several *= price.gpus_per_instance > 1
        offer = f"{price.provider} {price.instance}{several} {price.market}"
        if price.provider == OWN and price.instance == estimate.gpu:
            offer = "your own"
        rate = short(price.usd_per_hour)
        hours += EXCEEDS if exceeds(price.hours_interval, wanted.deadline_hours) else ""
        usd = f"{short(price.usd)} ({ends_text(price.usd_interval)})"
        usd += EXCEEDS if exceeds(price.usd_interval, wanted.budget_usd) else ""
    return {
        "GPU": f"{estimate.gpu} {estimate.strategy or ''}".strip(),
        **({"tokens": f"{estimate.seq_len:,}"} if has_tokens else {}),
        "offer": offer,
        "$/h": rate,
        **({"recipe": recipe} if recipe else {}),
        "batch": _batch(estimate),
        "peak GiB": f"{estimate.peak_gib:.1f}",
        "reserved GiB": f"{estimate.reserved_gib:.1f} of {estimate.usable_gib:.1f}",
        "s/step": _short(estimate.step_seconds),
        "examples/s": _short(estimate.examples_per_second),
        "hours": hours,
        "$": usd,
        "basis": estimate.basis,
    }


def _short(value: float | None) -> str:
    return "" if value is None else short(value)


def _batch(estimate: Estimate) -> str:
    """Batch size and the largest one, or why the batch does not fit."""
    largest, interval = estimate.max_batch_size, estimate.max_batch_size_interval
    if estimate.outcome is Outcome.FITS:
        times = f" x {estimate.micro_batches}" if estimate.micro_batches > 1 else ""
        bounds = f"({interval.low:.0f} to {interval.high:.0f})"
        return f"{estimate.batch_size}{times} of {largest} {bounds}"
    if largest:
        return f"{estimate.batch_size} {estimate.outcome}, the largest is {largest}"
    return f"not even one example fits: {estimate.outcome}"


def _notes(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    """Lines below the table: recipe, batch size, accuracy, and what is missing."""
    rows = [e.estimate for e in estimates]
    yield f"{question.recipe_text}."
    yield from data_notes(question)
    yield from _recipe_notes(rows, question)
    yield from box_notes(estimates)
    yield from runners_up_text(estimates)
    yield from remedies_text(estimates)
    texts = (length_text, batch_text, varying_text, padding_text)
    yield from filter(None, (text(estimates, question) for text in texts))
    if question.recipe.has_square_mask:
        yield (
            "Packing without FlashAttention-2 needs a mask of all pairs of a batch's tokens, and "
            "computes all of their scores: memory and time grow with the square of the batch. "
            "--attention flash_attention_2 needs neither."
        )
    fitting = [row for row in rows if row.outcome is Outcome.FITS]
    if fitting:
        yield _steps_text(fitting, question)
    if any(row.price and not is_sure(row.price, question.constraints) for row in rows):
        yield (
            f"{EXCEEDS.strip()} the 90 % interval exceeds the deadline or the budget. Offers are "
            "excluded by their expected hours and dollars."
        )
    yield from _accuracy_notes(estimates, question.constraints)
    yield from missed_text(estimates, question.constraints)
    yield from gap_notes(estimates, question)
    for row in rows:
        if row.routed_peak_gib is not None:
            median, upper = row.routed_peak_gib
            yield (
                f"{row.gpu}: over random expert routings, the peak is {median:.1f} GiB in the "
                f"median and {upper:.1f} GiB at the 95th percentile."
            )


def _steps_text(estimates: Sequence[Estimate], question: Question) -> str:
    """Optimizer steps of an epoch, which decide whether a batch trains well."""
    sizes = {row.batch_size * row.micro_batches * row.gpus for row in estimates}
    steps = sorted(math.ceil(max(rows_of(question.workload) / size, 1)) for size in sizes)
    unit = "packed rows" if question.recipe.packing else "examples"
    if len(steps) == 1:
        (size,) = sizes
        assumed = ", which is assumed (--effective-batch)" if question.assumes_batch else ""
        return f"An epoch has {steps[0]:,} optimizer steps of {size} {unit}{assumed}."
    return (
        f"An epoch has {steps[0]:,} to {steps[-1]:,} optimizer steps of {max(sizes)} to "
        f"{min(sizes)} {unit}: with --effective-batch all GPUs train alike."
    )


def _recipe_notes(rows: Sequence[Estimate], question: Question) -> Iterator[str]:
    """A line for each recipe that the default comes to: GPUs without bf16 have another."""
    on: dict[str, list[str]] = {}
    for row in rows:
        on.setdefault(row.recipe, []).append(row.gpu)
    for recipe, gpus in on.items():
        where = f" on {', '.join(gpus)}" if len(on) > 1 else ""
        yield f"{rows[0].model}, {recipe}{where}, {_lengths(rows, question)}."


def _accuracy_notes(estimates: Sequence[Estimated], wanted: Constraints) -> Iterator[str]:
    """Known errors of memory and times, and the assumptions behind them."""
    rows = [e.estimate for e in estimates]
    yield from _approximations(rows)
    yield f"Constants of the step times: {rows[0].constants}."
    yield from _memory_notes(rows)
    yield f"CUDA's context is assumed to take {CONTEXT_BYTES / GIB:.1f} GiB of the GPU's memory."
    assumed = sorted(e.gpu.key for e in estimates if e.gpu.usable_memory_bytes is None)
    if assumed:
        yield f"Usable memory is the marketed size, not measured: {', '.join(assumed)}."
    if sum(row.price is not None for row in rows) > 1:
        shown = "fastest" if wanted.objective == "time" else "cheapest"
        yield (
            "Timing errors are mostly shared by all GPUs: trust the order more than the hours. "
            f"Each row shows the GPU's {shown} offer."
        )


def _memory_notes(rows: Sequence[Estimate]) -> Iterator[str]:
    """Interval of the memory by published runs, and parts of the recipe that none of them has.

    docs/explanation/evidence.md has the runs.
    """
    errors = published_errors()
    for error in dict.fromkeys(row.memory_error for row in rows):
        yield (
            f"Memory of {error.method}: the 90 % interval is {1 - error.low:.0%} below to "
            f"{error.high - 1:.0%} above the prediction, by {error.runs} published runs of "
            f"{error.sources} sources ({error.pooled}). Such intervals held {errors.covered:.0%} "
            f"of {errors.runs} runs whose source was left out."
        )
    missing = ", ".join(dict.fromkeys(name for row in rows for name in row.not_compared))
    if missing:
        yield (
            f"Memory was compared with no published run that has: {missing}. "
            "The interval may be too narrow for it."
        )


def _approximations(rows: Sequence[Estimate]) -> Iterator[str]:
    """Differences between the traced stack and the one that would run, with their GPUs."""
    approximations = dict.fromkeys(text for row in rows for text in row.approximations)
    for text in approximations:
        gpus = [row.gpu for row in rows if text in row.approximations]
        on_gpus = "" if len(gpus) == len(rows) else f" ({', '.join(sorted(gpus))})"
        yield f"Approximate: {text}{on_gpus}."
    if not approximations:
        yield "The installed libraries were traced without any approximation."


def _lengths(rows: Sequence[Estimate], question: Question) -> str:
    """Lengths, in tokens per row of a batch, at which memory and times are predicted."""
    longest, padded = rows[0].seq_len, sorted(row.tokens_per_example for row in rows)
    unit = question.recipe.row
    padding = "" if question.recipe.packing else " including padding"
    if all(row.tokens_per_example == row.seq_len for row in rows):
        return f"{span([row.seq_len for row in rows], '.0f')} tokens per {unit}"
    most = "" if round(padded[-1]) == round(padded[0]) else f" to {padded[-1]:.0f}"
    return f"memory at {longest} tokens per {unit}, times at {padded[0]:.0f}{most}{padding}"


def explanation(estimated: Estimated) -> str:
    """Render two tables: memory at the peak and step time, each by purpose."""
    parts = [f"## {estimated.estimate.gpu}, batch {estimated.estimate.batch_size}"]
    memory = _memory(estimated)
    total = sum(gib for _, gib in memory)
    rows = [(purpose, f"{gib:.2f}", f"{gib / total:.1%}") for purpose, gib in memory]
    parts.append(table(("memory at the peak", "GiB", "share"), rows))
    if (step := estimated.step) is not None:
        rows = [(work, f"{s:.4f}", f"{s / step.seconds:.1%}") for work, s in _time(step)]
        parts.append(table(("time of a step", "seconds", "share"), rows))
    return "\n\n".join(parts)


PURPOSES = {
    Purpose.ACTIVATION: "activations and their gradients",
    Purpose.WORKSPACE: "kernel workspace",
    Purpose.GRADIENT: "gradients",
    Purpose.OPTIMIZER: "optimizer state",
    Purpose.HEAD: "logits and loss",
    Purpose.CHECKPOINT: "saved by the layers for the backward pass",
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
    OperatorClass.HOST_COPY: "copies of activations to and from the host",
    OperatorClass.MEMORY: "memory-bound operators",
}


def _memory(estimated: Estimated) -> list[tuple[str, float]]:
    """Memory in use at the peak by purpose, in GiB, the largest first."""
    memory = estimated.cell.at_peak(estimated.estimate.batch_size, estimated.gpu)
    return _largest_first((PURPOSES[purpose], size / GIB) for purpose, size in memory.items())


def _time(step: SimulatedStepTime) -> list[tuple[str, float]]:
    """Time of a step by class of operator, in seconds, the largest first."""
    busy = [(WORKS[work], float(step.busy_seconds[work])) for work in WORKS]
    busy += [("the GPU waits for other GPUs", step.exposed_seconds)]
    waits = "the GPU waits for the host", step.seconds - sum(s for _, s in busy)
    return _largest_first([*busy, waits])


def _largest_first(parts: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
