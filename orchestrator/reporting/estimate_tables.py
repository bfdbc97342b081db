"""An estimate as JSON, as a Markdown table with notes, and explained part by part."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_catalog.number_text import dollars, gib_of, short
from gpu_catalog.safe_text import spreadsheet_cell
from orchestrator.estimating.estimate_records import Estimate, Estimated, Estimates
from orchestrator.estimating.question import Question
from orchestrator.markdown_table import records_table, table
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.reporting.estimate_recommendation import (
    ends_text,
    exceeds,
    fastest,
    verdict,
)
from orchestrator.reporting.notes.estimate_notes import EXCEEDS, all_notes, brief_notes, first_rows
from orchestrator.reporting.sections.alternative_recipes import (
    recipe_words,
)
from orchestrator.reporting.sections.cost_text import overheads_text
from orchestrator.reporting.sections.memory_section import outcome_text
from orchestrator.reporting.sections.recommendation import offer_text
from orchestrator.spec.job import PACKED
from orchestrator.spec.job_tokens import rows as rows_of
from trials.records.observation import Outcome
from trials.simulation.recording import OperatorClass, Purpose
from trials.simulation.simulated_cell import GIB
from trials.simulation.timing_model import SimulatedStepTime


def as_json(
    estimates: Sequence[Estimated],
    *,
    one: bool,
    explain: bool = False,
    assumed: Sequence[str] = (),
) -> str:
    """Serialise estimates: an object where one GPU was requested, else a list of any length.

    For both objectives, ``best_by`` has those by which a GPU is the best, and ``fastest`` the
    price of its fastest offer.

    Args:
        estimates: sorted by cost.
        one: whether one GPU was requested.
        explain: whether to add ``explained`` to each: memory in GiB and time in seconds by purpose.
        assumed: assumptions beside those of the options, a line each, to add to ``assumed``.
    """
    dumped = [e.estimate.model_dump(mode="json") for e in estimates]
    for fields in dumped:
        fields["assumed"] += assumed
    if explain:
        for fields, e in zip(dumped, estimates, strict=True):
            time = {} if e.step is None else dict(_time(e.step))
            fields["explained"] = {"peak_gib": dict(_memory(e)), "step_seconds": time}
    if estimates and estimates[0].question.constraints.objective == "both":
        for fields, e in zip(dumped, estimates, strict=True):
            fields.update(_both(e, estimates))
    return json.dumps(dumped[0] if one and dumped else dumped, indent=2)


def estimates_csv(estimates: Estimates) -> str:
    """CSV of estimates: a head, and a row for each GPU with the columns of ``to_frame``.

    Several texts of one cell are joined by semicolons.
    """
    cells = estimates.to_frame().map(_cell)
    return str(cells.to_csv(index=False, lineterminator="\n")).rstrip("\n")


def _cell(value: object) -> object:
    return spreadsheet_cell("; ".join(map(str, value)) if isinstance(value, list) else value)


def _both(row: Estimated, estimates: Sequence[Estimated]) -> dict[str, Any]:
    """Fields of an estimate where both the cheapest and the fastest offer are wanted."""
    best = {"cost": estimates[0] if estimates[0].prices else None, "time": fastest(estimates)}
    prices = sorted(row.prices, key=lambda price: (price.hours, price.usd))
    return {
        "best_by": [objective for objective, one in best.items() if one is row],
        "fastest": prices[0].model_dump(mode="json") if prices else None,
    }


def as_table(estimates: Sequence[Estimated], question: Question, *, most: int | None = None) -> str:
    """Render the job, the recommendation, one row for each GPU, and notes on accuracy and gaps.

    Each of several given lengths has a recommendation, and its name before notes of its own.

    Args:
        estimates: sorted by cost, or by time.
        question: the job.
        most: rows of an answer for one screen, with only the notes that may change the decision
            and short lists of GPUs; None for all.
    """
    wanted, groups = question.constraints, _by_length(estimates)
    names = [f"{rows[0].estimate.seq_len:,} tokens: " for rows in groups]
    if len(groups) == 1:
        names = [""]
    has_tokens = len(groups) > 1 or question.finds_seq_len
    is_priced = any(row.estimate.price for row in estimates)
    aim = "time" if wanted.objective == "time" else "cost" if is_priced else "speed"
    order = "length, then by " * has_tokens + aim
    jobs = dict.fromkeys(_job(rows[0]) for rows in groups)
    verdicts = [(name, verdict(rows, wanted)) for name, rows in zip(names, groups, strict=True)]
    if question.finds_seq_len and (text := verdict(_longest(estimates), wanted)):
        verdicts = [(_longest_text(estimates), text)]
    parts = [
        *(f"{name}{text}" for name, text in verdicts if text),
        records_table(
            _row(e.estimate, recipe, wanted, has_tokens=has_tokens)
            for e, recipe in zip(estimates, _recipe_column(estimates), strict=True)
            if most is None or e in first_rows(groups, most)
        ),
        "\n".join(all_notes(names, groups) if most is None else brief_notes(names, groups, most)),
    ]
    job = (
        f"{' '.join(jobs)} Nothing was measured: every value is simulated. Rows are sorted by "
        f"{order}. Brackets are 90 % intervals{_drift(question) if is_priced else ''}."
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


DERIVED = ("startup_minutes", "start-up"), ("checkpoint_seconds", "checkpoints")
"""Overheads that follow from the model's size where they were not given."""


def _job(row: Estimated) -> str:
    """The job and what is assumed about it, with start-up and checkpoints as of the best row."""
    question, workload = row.question, row.question.workload
    given, priced = workload.overheads, row.estimate.overheads
    derived = [word for name, word in DERIVED if getattr(given, name) != getattr(priced, name)]
    by_size = (
        f"; {' and '.join(derived)} by the model's bytes, here of the first row" if derived else ""
    )
    by_default = ", ".join(question.by_default)
    is_assumed = "--seq-len" in question.by_default and not question.recipe.packing
    tokens = f" of {question.seq_len:,} tokens" if is_assumed else ""
    left_out = f" Left out: {text}." if (text := question.recipe.left_out) else ""
    return (
        f"The job: {workload.examples:,} examples{tokens}{_packed(question)} x {workload.epochs} "
        f"epoch{'s' * (workload.epochs != 1)}"
        f"{f' (assumed: {by_default})' if by_default else ''}"
        f"{overheads_text(priced)}{by_size}.{left_out}{_assumed_density(question)}"
    )


def _drift(question: Question) -> str:
    """Words on intervals of dollars, which are wider than those of the hours."""
    overheads = question.workload.overheads
    drifts = overheads.price_drift or overheads.spot_price_drift
    return ", those of dollars with changes of prices since their dates" if drifts else ""


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


def _assumed_density(question: Question) -> str:
    """Sentence on an assumed number of examples in a packed row; empty where none is."""
    if "--examples-per-row" not in question.by_default:
        return ""
    return (
        " Hours of training, and their dollars, are inversely proportional to the "
        f"{question.recipe.examples_per_row} examples a row, which are assumed: give --dataset, "
        "--length-histogram or --examples-per-row."
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
        idle = price.gpus_per_instance - estimate.gpus // estimate.nodes
        offer = offer_text(price, idle, estimate.gpu)
        rate = dollars(price.usd_per_hour)
        hours += EXCEEDS if exceeds(price.hours_interval, wanted.deadline_hours) else ""
        usd = f"{dollars(price.usd)} ({ends_text(price.usd_interval, dollars)})"
        usd += EXCEEDS if exceeds(price.usd_interval, wanted.budget_usd) else ""
    return {
        "GPU": f"{estimate.gpu} {estimate.strategy or ''}".strip(),
        **({"tokens": f"{estimate.seq_len:,}"} if has_tokens else {}),
        "offer": offer,
        "$/h": rate,
        **({"recipe": recipe} if recipe else {}),
        "batch": _batch(estimate),
        "peak GiB": f"{estimate.peak_gib:.1f}",
        "reserved GiB": gib_of(estimate.reserved_gib, estimate.usable_gib),
        "s/step": _short(estimate.step_seconds),
        "examples/s": _short(estimate.examples_per_second),
        "hours": hours,
        "$": usd,
        "basis": estimate.basis,
    }


def _short(value: float | None) -> str:
    return "" if value is None else short(value)


def _batch(estimate: Estimate) -> str:
    """Batch size, and the largest one where memory limits it, or why the batch does not fit."""
    interval = estimate.max_batch_size_interval
    if estimate.outcome is Outcome.FITS:
        times = f" x {estimate.micro_batches}" if estimate.micro_batches > 1 else ""
        bounds = f" of {estimate.lasting_batch_size}"
        if estimate.lasting_batch_size == estimate.max_batch_size:
            bounds += f" ({interval.low:.0f} to {interval.high:.0f})"
        return f"{estimate.batch_size}{times}{'' if estimate.holds_limit else bounds}"
    why = outcome_text(estimate.outcome)
    if largest := estimate.lasting_batch_size:
        return f"{estimate.batch_size}: {why}; largest {largest}"
    if estimate.batch_size > 1:  # whose memory the row has
        return f"{estimate.batch_size}: {why}; {'1 may fit' if interval.high >= 1 else '1, too'}"
    return (
        f"not even one {'packed row' if estimate.examples_per_row > 1 else 'example'} fits: {why}"
    )


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
    OperatorClass.FLASH2_FORWARD: "attention, forward",
    OperatorClass.FLASH2_BACKWARD: "attention, backward",
    OperatorClass.DEQUANTISATION: "4-bit dequantisation",
    OperatorClass.SCAN: "selective scan",
    OperatorClass.UPDATE: "optimizer",
    OperatorClass.HOST_COPY: "copies to and from the host",
    OperatorClass.SCATTERED: "strided, broadcast and upcasting kernels",
    OperatorClass.NORM: "norms, forward",
    OperatorClass.NORM_BACKWARD: "norms, backward",
    OperatorClass.SOFTMAX: "softmax, forward",
    OperatorClass.SOFTMAX_BACKWARD: "softmax, backward",
    OperatorClass.GATHER: "gather, scatter and embedding gradients",
    OperatorClass.PICKED_LOSS: "loss of the picked tokens",
    OperatorClass.MEMORY: "other memory-bound operators",
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
