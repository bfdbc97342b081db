"""Sentences of an estimate: which GPU to rent, which GPUs are excluded, which batch size to try."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from fitting.laws.fit_result import Interval
from gpu_catalog.number_text import dollars, ends, given, short
from orchestrator.estimating.estimate_records import Estimate, Estimated, Price
from orchestrator.estimating.longest_sequence import MULTIPLE
from orchestrator.estimating.question import Question
from orchestrator.estimating.varying_memory import LengthRemedy, length_remedies
from orchestrator.markdown_table import span
from orchestrator.pricing.offer_constraints import Constraints, nothing_text
from orchestrator.reporting.sections.alternative_recipes import cheapest_remedy, passed_over_text
from orchestrator.reporting.sections.recommendation import provider_text, rent_text
from orchestrator.spec.job import PACKED, Job
from orchestrator.spec.job_tokens import drawn_lengths, padded_tokens
from trials.records.observation import Outcome
from trials.simulation.varying_lengths import MOST_FAILED, RUNS

MUCH_PADDING = 0.2  # share of the tokens above which a note mentions padding
WORTH_SAYING = 1.01  # growth of the reserved memory above which a note mentions it
SMALL_GIB = 0.05  # what is missing below it would be 0.0 with one decimal


def verdict(estimates: Sequence[Estimated], wanted: Constraints) -> str:
    """Recommend the best GPU by the objective, or say which limit to relax.

    Returns:
        One paragraph, or two for both objectives; empty where the job fits, and its time is
        unknown.
    """
    best = estimates[0].estimate
    if best.price is not None:
        price = best.price
        superlative: Literal["cheapest", "fastest"] = "cheapest"
        lead, last = "", ""
        if wanted.objective == "time":
            superlative = "fastest"
        if wanted.objective == "both":
            last = _fastest_text(estimates, wanted)
        if wanted.objective != "cost":
            lead = f"The {wanted.aim(superlative)}. "
        sure = next((e.estimate for e in estimates if is_sure(e.estimate.price, wanted)), best)
        safer = ""
        if sure is not best and sure.price is not None:
            safer = (
                f" The {superlative} choice whose 90 % interval is within every limit: {sure.gpu} "
                f"{provider_text(sure.price)}, ${dollars(sure.price.usd)} in "
                f"{short(sure.price.hours)} h."
            )
        return (
            f"{lead}{rent_text(best.gpu, price, is_electricity=estimates[0].question.is_own)}: "
            f"the job costs **${dollars(price.usd)}** ({ends_text(price.usd_interval, dollars)}) "
            f"and takes **{short(price.hours)} h** ({ends_text(price.hours_interval)}), simulated, "
            f"{_batch(best)}{passed_over_text(estimates[0])}"
            f"{_doubt_text(estimates, superlative)}{_limits_text(price, wanted)}{safer}{last}"
        )
    misses = [(e.estimate.gpu, e.missed) for e in estimates if e.missed is not None]
    if misses:
        single = all(e.estimate.gpus == 1 for e in estimates)
        faster = "more GPUs (--gpus 2,4,8)" if single else ""
        return f"{nothing_text(wanted, misses, faster)} (Simulated.)"
    unpriced = [e.estimate for e in estimates if e.estimate.no_price is not None]
    if unpriced:
        return _unpriced(unpriced)
    return "" if any(e.step is not None for e in estimates) else _too_large(estimates)


def _doubt_text(estimates: Sequence[Estimated], superlative: str) -> str:
    """Whether the best batch may not fit, and the best that does if not even one example may."""
    rows = [e.estimate for e in estimates]
    best = rows[0]
    row = next((row for row in rows if row.surely_fits), best)
    if best.max_batch_size_interval.low >= 1 or row.price is None or row is best:
        return _row_doubt(best)
    return (
        f"{_row_doubt(best)} The {superlative} choice that surely fits: {row.gpu} "
        f"{provider_text(row.price)}, ${dollars(row.price.usd)} in {short(row.price.hours)} h."
    )


def _row_doubt(row: Estimate) -> str:
    """Whether the batch of a row may not fit; empty where it surely does."""
    within = row.max_batch_size_interval
    if row.surely_fits:
        return ""
    if within.low < row.batch_size:
        return f" A batch of {row.batch_size} may not fit ({ends_text(within)})."
    return (
        f" A batch of {row.batch_size} may not survive the data's lengths: it does not at the "
        "upper end of the memory's interval."
    )


def _batch(row: Estimate) -> str:
    """Batch size of a row, the options that were chosen for it, and what is left out."""
    options = f" with {row.options}" if row.options else ""
    generation = "; generation comes on top" if row.left_out else ""
    return f"at batch size {row.batch_size}{options}{generation}."


def _unpriced(rows: Sequence[Estimate]) -> str:
    """The fastest of the GPUs without a price."""
    row = min(rows, key=lambda row: row.hours or math.inf)
    hours = ""
    if row.hours is not None and row.hours_interval is not None:
        hours = f" takes **{short(row.hours)} h** ({ends_text(row.hours_interval)}), simulated,"
    return f"{row.gpu}{hours} {_batch(row)}{_row_doubt(row)} No price is known: {row.no_price}."


def fastest(estimates: Sequence[Estimated]) -> Estimated | None:
    """Estimate with the fastest offer of all GPUs; None without offers."""
    priced = [row for row in estimates if row.prices]
    return min(priced, key=_least_hours, default=None)


def _least_hours(row: Estimated) -> tuple[float, float]:
    return min((price.hours, price.usd) for price in row.prices)


def _fastest_text(estimates: Sequence[Estimated], wanted: Constraints) -> str:
    """The fastest offer of all GPUs, where it is not the cheapest one."""
    row = fastest(estimates)
    assert row is not None  # the cheapest has a price
    estimate = row.estimate
    price = min(row.prices, key=lambda price: (price.hours, price.usd))
    if price == estimates[0].estimate.price:
        return " It is also the fastest."
    return (
        f"\n\nThe {wanted.aim('fastest')}. "
        f"{rent_text(estimate.gpu, price, is_electricity=row.question.is_own)}: "
        f"**{short(price.hours)} h** ({ends_text(price.hours_interval)}) for "
        f"**${dollars(price.usd)}** ({ends_text(price.usd_interval, dollars)}), at batch size "
        f"{estimate.batch_size}{f' with {estimate.options}' if estimate.options else ''}."
    )


def ends_text(interval: Interval, text: Callable[[float], str] = short) -> str:
    """Both ends of an interval."""
    return ends(interval.low, interval.high, text)


def _limits_text(price: Price, wanted: Constraints) -> str:
    """Whether the whole 90 % interval keeps deadline and budget, or only the expected value."""
    limits = []
    if wanted.deadline_hours is not None:
        name = f"the deadline of {given(wanted.deadline_hours)} h"
        limits.append((name, exceeds(price.hours_interval, wanted.deadline_hours)))
    if wanted.budget_usd is not None:
        name = f"the budget of ${given(wanted.budget_usd)}"
        limits.append((name, exceeds(price.usd_interval, wanted.budget_usd)))
    if not limits:
        return ""
    names = " and ".join(name for name, _ in limits)
    exceeded = [name for name, is_exceeded in limits if is_exceeded]
    if not exceeded:
        return f" The job stays within {names}, even at the upper end of the 90 % interval."
    which = exceeded[0] if len(exceeded) < len(limits) else "it" if len(limits) == 1 else "both"
    return f" The job is expected to stay within {names}, but the 90 % interval exceeds {which}."


def is_sure(price: Price | None, wanted: Constraints) -> bool:
    """Whether the whole 90 % interval keeps deadline and budget."""
    return price is not None and not (
        exceeds(price.hours_interval, wanted.deadline_hours)
        or exceeds(price.usd_interval, wanted.budget_usd)
    )


def missed_text(estimates: Sequence[Estimated], wanted: Constraints) -> Iterator[str]:
    """GPUs that are excluded by the deadline, by the budget, or only by both together."""
    missed = [(e.estimate.gpu, e.missed) for e in estimates if e.missed is not None]
    late = {gpu: f"{short(m.quickest_hours)} h" for gpu, m in missed if m.misses_deadline(wanted)}
    expensive = {
        gpu: f"${dollars(m.cheapest_usd)}" for gpu, m in missed if m.exceeds_budget(wanted)
    }
    both = {
        gpu: f"at best {short(m.quickest_hours)} h, or ${dollars(m.cheapest_usd)}"
        for gpu, m in missed
        if gpu not in late and gpu not in expensive
    }
    if late:
        yield f"Excluded by the deadline of {given(wanted.deadline_hours)} h: {_listed(late)}."
    if expensive:
        yield f"Excluded by the budget of ${given(wanted.budget_usd)}: {_listed(expensive)}."
    if both:
        yield f"Excluded because no offer is within both deadline and budget: {_listed(both)}."


def _listed(best_by_gpu: Mapping[str, str]) -> str:
    return ", ".join(f"{gpu} ({best})" for gpu, best in best_by_gpu.items())


def exceeds(interval: Interval, limit: float | None) -> bool:
    """Whether the upper end of an interval is above a limit; False where there is no limit."""
    return limit is not None and interval.high > limit


def _too_large(estimates: Sequence[Estimated]) -> str:
    """Memory that is missing on the nearest GPU; empty where the batch fits on any."""
    rows = [e.estimate for e in estimates]
    if any(row.outcome is Outcome.FITS for row in rows):
        return ""  # it fits on a GPU of unknown speed
    nearest = min(rows, key=lambda row: row.needed_gib - row.usable_gib)
    problem = "Not even one example fits"
    if nearest.batch_size > 1:
        where = nearest.gpu if len(rows) == 1 else "any GPU"
        problem = f"A batch of {nearest.batch_size} does not fit {where}"
    most = max(rows, key=lambda row: row.lasting_batch_size)
    largest = (
        f" The largest batch size that fits is {most.lasting_batch_size}, on {most.gpu}."
        if most.lasting_batch_size
        else ""
    )
    up_to = "" if nearest.varying_reserved_gib is None else "up to "
    lacks = nearest.needed_gib - nearest.usable_gib
    closest = f"{nearest.gpu} is the closest and" if len(rows) > 1 else "It"
    return (
        f"{problem}. {closest} needs {up_to}"
        f"{short(lacks, 1) if lacks < SMALL_GIB else f'{lacks:,.1f}'} GiB more.{largest}"
        f"{cheapest_remedy(estimates)}"
    )


def length_text(estimates: Sequence[Estimated], question: Question) -> str | None:
    """Rule by which sequence lengths were found; None where they were given."""
    if not question.finds_seq_len:
        return None
    rows = [e.estimate for e in estimates]
    capped = [row.gpu for row in rows if row.seq_len == row.seq_len_limit]
    short = [row.gpu for row in rows if row.outcome is not Outcome.FITS]
    batch_size = rows[0].batch_size
    lines = [f"Tokens: the longest that fits at a batch of {batch_size}, a multiple of {MULTIPLE}."]
    if capped:
        positions = rows[0].seq_len_limit
        why = "the model's own longest" if question.model.positions else "the longest tried"
        lines.append(f"{', '.join(capped)}: {positions:,} is {why}, and may not fill the memory.")
    if short:
        lines.append(f"{', '.join(short)}: not even the shortest tried fits.")
    return " ".join(lines)


def batch_text(estimates: Sequence[Estimated], question: Question) -> str | None:
    """Rule by which the batch sizes were chosen; None where the user gave one."""
    tried = [e.hours for e in estimates if e.hours]
    if tried:
        sizes = sorted({size for hours in tried for size in hours if size < max(hours)})
        slower = sorted(hours[max(hours)] / min(hours.values()) - 1 for hours in tried)
        rule = (
            f"Batch size: on each GPU the fastest of {', '.join(map(str, sizes))} and the largest "
            "that fits"
        )
        if round(slower[-1], 2) == 0:
            return f"{rule}; the largest is as fast."
        why = "At"
        if question.has_square_mask:
            why = "The mask grows with the square of the batch: at"
        elif question.workload.lengths:
            why = "Larger batches contain more padding: at"
        return (
            f"{rule}. {why} the largest batch size, the job's steps would take "
            f"{span(slower, '.0%')} longer (--batch-size max)."
        )
    if question.batch == "largest" and any(e.step is not None for e in estimates):
        effective_batch = question.recipe.effective_batch
        if effective_batch is not None:
            return (
                "Batch size: the largest micro-batch that fits and divides the effective batch of "
                f"{effective_batch} examples."
            )
        return "Batch size: the largest that fits. --batch-size fastest also tries smaller ones."
    return None


def varying_text(estimates: Sequence[Estimated], question: Question) -> str | None:
    """Memory that varying lengths fragment; None where it is not more than at a constant length."""
    best = estimates[0]
    row, interval = best.estimate, best.estimate.varying_reserved_gib
    if interval is None or best.varying is None:
        layout, is_drawn = best.question.parallel, best.question.draws_lengths
        is_by_engine = layout is not None and layout.zero_stage is not None
        if not (is_by_engine and is_drawn and drawn_lengths(question.workload, row.seq_len)):
            return None
        return (
            "Memory is that of the longest rows: what batches of varying length fragment under "
            "DeepSpeed is not simulated."
        )
    lines = []
    if interval.high > WORTH_SAYING * row.reserved_gib:
        lines.append(
            f"Batches of varying length fragment memory: in {RUNS} simulated parts of an epoch a "
            f"micro-batch of {row.batch_size} would reserve {interval.low:.1f} to "
            f"{interval.high:.1f} GiB of unlimited memory ({row.gpu}), at a constant length "
            f"{row.reserved_gib:.1f} GiB.{_within_limit(row, interval)}"
        )
    lines += [
        f"{e.estimate.gpu}: a micro-batch of {e.estimate.max_batch_size} fits at a constant "
        f"length; the largest that survives an epoch is {e.estimate.surviving_batch_size}."
        for e in estimates
        if (e.estimate.surviving_batch_size or 0) < e.estimate.max_batch_size
    ]
    survives = row.surviving_batch_size or 0
    remedies = length_remedies(
        question.workload, best.varying, best.gpu, survives, question.batch_limit
    )
    if remedies:
        changes = ", ".join(map(_change_text, remedies))
        others = " Other GPUs were not tried." if len(estimates) > 1 else ""
        lines.append(
            f"{row.gpu}: the largest that survives rises from {survives} to {changes}.{others}"
        )
    return " ".join(lines) or None


def _within_limit(row: Estimate, unlimited: Interval) -> str:
    """End of the runs within the GPU's memory; empty where they need no more than that."""
    if unlimited.high <= row.usable_gib:
        return ""
    ending = f"fewer than {RUNS - MOST_FAILED} of these survive"
    if row.outcome is Outcome.FITS:
        ending = (
            f"at least {RUNS - MOST_FAILED} of these survive, because the allocator frees its "
            "cache where that is full; the time that this takes is left out"
        )
    return f" Within its {row.usable_gib:.1f} GiB {ending}."


def _change_text(remedy: LengthRemedy) -> str:
    tokens = f" (for {remedy.more_tokens:.0%} more tokens)" if remedy.more_tokens > 0 else ""
    return f"{remedy.batch_size} with {remedy.change}{tokens}"


def padding_text(estimates: Sequence[Estimated], question: Question) -> str | None:
    """Share of the tokens that is padding, and options that reduce it; None where it is small."""
    data = question.workload.lengths
    if data is None or question.workload.padding in PACKED:
        return None
    if data.kind == "pairs" and data.sequences is None:
        return None  # the lengths of the shorter sequences are unknown
    mean = data.mean_sequence(question.workload.cutoff)
    fitting = [e.estimate for e in estimates if e.step is not None]
    chosen = [row.batch_size for row in fitting]
    largest = [row.max_batch_size for row in fitting]
    if not fitting or _padding(question, max(largest), mean) <= MUCH_PADDING:
        return None
    text = f"Padding is {_paddings(question, chosen, mean)} of the tokens"
    where = ""
    if chosen != largest:
        at_largest = _paddings(question, largest, mean)
        text += f", and {at_largest} at the largest batch sizes that fit"
        where = " there"
    return f"{text}. {'; '.join(_remedies(question, largest, mean, where))}."


def _remedies(question: Question, sizes: Sequence[int], mean: float, where: str) -> Iterator[str]:
    if question.workload.padding != "grouped":
        grouped = question.workload.model_copy(update={"padding": "grouped"})
        shares = _paddings(question, sizes, mean, grouped)
        yield f"--group-by-length (batches of similar lengths) leaves {shares}{where}"
    if question.workload.lengths is not None and question.workload.lengths.is_preference:
        return  # not packed
    yield "--packing with --seq-len (tokens per row) leaves none"


def _paddings(
    question: Question, sizes: Sequence[int], mean: float, workload: Job | None = None
) -> str:
    """Shares of padding at the smallest and the largest batch size, with these sizes."""
    ends = sorted({min(sizes), max(sizes)})
    shares = {size: f"{_padding(question, size, mean, workload):.0%}" for size in ends}
    if len(set(shares.values())) == 1:
        return shares[ends[0]]
    return " to ".join(f"{share} (batch {size})" for size, share in shares.items())


def _padding(
    question: Question, batch_size: int, mean: float, workload: Job | None = None
) -> float:
    """Share of the tokens that is padding, which grows with the batch size."""
    job = workload or question.workload
    return max(0.0, 1 - mean / padded_tokens(job, batch_size, question.seq_len))
