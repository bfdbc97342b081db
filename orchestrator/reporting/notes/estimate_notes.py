"""Notes below an estimate: what may change the decision first, then what is assumed. Pure."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence

from gpu_catalog.number_text import short
from orchestrator.estimating.estimate_records import FROZEN_IN_FP32, Estimate, Estimated
from orchestrator.estimating.estimate_request import EFFECTIVE_BATCH, nearest_multiple
from orchestrator.estimating.memory_error import SEVERAL_GPUS, published_errors
from orchestrator.estimating.question import Question
from orchestrator.markdown_table import span
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.ranking.priced_job import job_hours
from orchestrator.reporting.estimate_recommendation import (
    batch_text,
    is_sure,
    length_text,
    missed_text,
    padding_text,
    varying_text,
)
from orchestrator.reporting.notes.box_notes import box_notes, speedup_note
from orchestrator.reporting.notes.data_notes import data_notes
from orchestrator.reporting.notes.gap_notes import gap_notes
from orchestrator.reporting.notes.host_notes import host_notes
from orchestrator.reporting.sections.alternative_recipes import remedies_text, runners_up_text
from orchestrator.reporting.sections.recommendation import MOSTLY
from orchestrator.spec.job_tokens import rows as rows_of
from trials.records.observation import Outcome
from trials.simulation.clock.time_error import time_errors
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB

EXCEEDS = " !"  # marks an interval that exceeds the deadline or the budget
LEAST_ROWS = 2  # of each length in a brief answer
MOST_LISTED = 3  # GPUs in a list of a brief answer
SEEN_TOTALS = (0.98, 1.07)
"""Least and most of the total memory that CUDA reports, relative to the marketed size."""
# Both have their runs in docs/explanation/evidence.md, "Several GPUs".
TWO_RUNS = " Memory of two published runs of other recipes on several GPUs was within 1 %."
SEVERAL_STEPS = (
    "The interval of step times on several GPUs is that of one GPU. Published steps took longer "
    "than predicted: FSDP2's were predicted 14 and 18 % too short on 8 and 128 H100 and 4 % on 64 "
    "A100 (median), one of DeepSpeed's stage 3 on 8 H100 39 %."
)


def all_notes(
    names: Sequence[str],
    groups: Sequence[Sequence[Estimated]],
    of_group: Callable[[Sequence[Estimated], Question], Iterator[str]] | None = None,
) -> list[str]:
    """Notes of all groups once; those that differ follow the name of their group."""
    make = of_group or _notes
    notes = [list(make(rows, rows[0].question)) for rows in groups]
    shared = [note for note in notes[0] if all(note in others for others in notes)]
    own = [
        f"{name}{note}"
        for name, group in zip(names, notes, strict=True)
        for note in group
        if note not in shared
    ]
    return [*own, *shared]


def brief_notes(
    names: Sequence[str], groups: Sequence[Sequence[Estimated]], most: int
) -> list[str]:
    """Notes that may change the decision, short, and a line on what is left out."""
    shown = all_notes(names, groups, _decisive_notes)
    gpus = {row.estimate.gpu for rows in groups for row in rows}
    first = first_rows(groups, most)
    left_out = [row for rows in groups for row in rows if row not in first]
    parts = []
    if left_out:
        why = ", ".join(_without_dollars(left_out))
        parts.append(f"{len(left_out)} rows{f' ({why})' if why else ''}")
    more = len(all_notes(names, groups)) - len(shown)
    parts += [f"{more} notes on approximations and assumptions"] * (more > 0)
    last = [f"Not shown: {' and '.join(parts)}; --wide shows them."] if parts else []
    return [*(shortened(note, gpus) for note in shown), *last]


def _without_dollars(rows: Sequence[Estimated]) -> list[str]:
    """Numbers of rows without dollars, by the reason."""
    fitting = [row for row in rows if row.estimate.outcome is Outcome.FITS]
    missed = [row for row in fitting if row.missed is not None]
    unpriced = [row for row in fitting if row.estimate.price is None and row.missed is None]
    numbers = {
        "do not fit": len(rows) - len(fitting),
        "exceed the deadline or budget": len(missed),
        "fit and have no price": len(unpriced),
    }
    return [f"{number} {reason}" for reason, number in numbers.items() if number]


def first_rows(groups: Sequence[Sequence[Estimated]], most: int) -> list[Estimated]:
    """Rows that a screen has room for: as many of each group, the best first."""
    of_each = max(most // len(groups), LEAST_ROWS)
    return [row for rows in groups for row in rows[:of_each]]


def shortened(note: str, gpus: Collection[str], most: int = MOST_LISTED) -> str:
    """A note whose lists of GPUs end with the number of the others.

    Each entry of a list may have more to say in parentheses.
    """
    name = "(?:" + "|".join(map(re.escape, sorted(gpus, key=len, reverse=True))) + ")"
    entry = rf"{name}(?: \([^()]*\))?"
    pattern = rf"{entry}(?:, {entry}){{{most + 1},}}"

    def cut(listed: re.Match[str]) -> str:
        entries = re.findall(entry, listed[0])
        return f"{', '.join(entries[:most])} and {len(entries) - most} more"

    return re.sub(pattern, cut, note)


def _notes(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    """Lines below the table: what may change the decision, then recipes and assumptions."""
    yield from _decisive_notes(estimates, question)
    yield from _background_notes(estimates, question)


def _decisive_notes(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    """Recipe, data, what would fit, batch sizes, warnings of errors, and what is missing."""
    rows = [e.estimate for e in estimates]
    yield f"{question.recipe_text}."
    yield from _frozen_weights(estimates[0])
    yield from data_notes(estimates[0], question)
    yield from box_notes(estimates)
    yield from speedup_note(estimates)
    yield from remedies_text(estimates)
    yield from runners_up_text(estimates)
    texts = (length_text, batch_text, varying_text, padding_text)
    yield from filter(None, (text(estimates, question) for text in texts))
    yield from _batch_legend(rows, question.recipe.effective_batch)
    if question.has_square_mask:
        subject, parts = "Packing", "tokens"
        if not question.recipe.packing:
            subject, parts = "The vision tower", "image patches"
        yield (
            f"{subject} without FlashAttention-2 needs a mask of all pairs of a batch's {parts}, "
            "and computes all of their scores: memory and time grow with the square of the batch. "
            "--attention flash_attention_2 needs neither."
        )
    fitting = [row for row in rows if row.outcome is Outcome.FITS]
    if fitting:
        yield _steps_text(fitting, question)
        yield from _overhead_note(fitting[0], question)
    if any(row.price and not is_sure(row.price, question.constraints) for row in rows):
        yield (
            f"{EXCEEDS.strip()} the 90 % interval exceeds the deadline or the budget. Offers are "
            "excluded by their expected hours and dollars."
        )
    yield from missed_text(estimates, question.constraints)
    yield from _error_notes(estimates, question.constraints)
    yield from _caveats(rows[:1])
    yield from host_notes(rows)
    yield from gap_notes(estimates, question)


def _overhead_note(row: Estimate, question: Question) -> Iterator[str]:
    """Hours of the steps themselves, where start-up and checkpoints take most of the job's."""
    if row.hours is None or row.step_seconds is None:
        return
    hours = job_hours(question.workload, row.effective_batch, row.step_seconds)
    if hours < MOSTLY * row.hours:
        yield (
            f"On {row.gpu}, steps take {short(hours)} of the {short(row.hours)} h. The rest is "
            "start-up (--startup-minutes), checkpoints (--checkpoint-seconds) and interruptions."
        )


def _frozen_weights(best: Estimated) -> Iterator[str]:
    """Frozen weights that are held in twice the bytes that the products need."""
    if best.freezes_in_fp32:
        choosing = "--recipe auto " if best.estimate.options is not None else ""
        yield f"{FROZEN_IN_FP32}: {choosing}--precision bf16-mixed halves them."


def _caveats(rows: Sequence[Estimate], said: Sequence[Estimate] = ()) -> Iterator[str]:
    """Caveats of the catalog on the offers of rows, but for those on the offers of others."""
    names: dict[str, list[str]] = {}
    for note, name in dict.fromkeys(_noted(rows)):
        if (note, name) not in _noted(said):
            names.setdefault(note, []).append(name)
    for note, listed in names.items():
        yield f"{', '.join(listed)}: {note}."


def _noted(rows: Sequence[Estimate]) -> Iterator[tuple[str, str]]:
    """Note and name of each rented offer that has a note; own cards have one of their own."""
    for row in rows:
        if row.price is not None and row.price.note is not None and not row.is_own:
            yield row.price.note, f"{row.price.provider} {row.price.instance}"


def _batch_legend(rows: Sequence[Estimate], effective_batch: int | None) -> Iterator[str]:
    """Meaning of the table's batches, by the first that fits."""
    fitting = [row for row in rows if row.outcome is Outcome.FITS]
    for row in fitting[:1]:
        yield (
            f"Batches (micro-batch x accumulation): {row.batch_size} x {row.micro_batches} on "
            f"{row.gpu}{_largest_text(row, effective_batch)}."
        )
    if not all(row.holds_limit == fitting[0].holds_limit for row in fitting):
        most = "the largest micro-batch that was tried fits"
        if effective_batch is not None:
            most = f"the whole effective batch of {effective_batch} fits at once"
        yield f"Batches without 'of' in the table: {most}."


def _largest_text(row: Estimate, effective_batch: int | None) -> str:
    within, most = row.max_batch_size_interval, row.max_batch_size
    error = f" ({within.low:g} to {within.high:g} by the 90 % interval)"
    error = "" if row.holds_limit else error
    if row.lasting_batch_size < most:
        return f"; the largest micro-batch that survives an epoch is {row.lasting_batch_size}"
    if row.lasting_batch_size < row.batch_limit:
        return f"; the largest micro-batch that fits is {most}{error}"
    if effective_batch is None:
        return f"; {most} fits{error}, and larger micro-batches were not tried"
    fits = "" if row.batch_size == most else f"; up to {most} x 1 would fit"
    return f"{fits}{error}, the whole effective batch of {effective_batch}"


def _background_notes(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    """Recipes, caveats of offers, approximations, sources of intervals, assumptions on memory."""
    rows = [e.estimate for e in estimates]
    yield from _recipe_notes(rows, question)
    yield from _caveats(rows[1:], said=rows[:1])
    yield from _approximations(rows)
    yield from _memory_notes(rows)
    yield from _time_notes(rows)
    yield f"CUDA's context is assumed to take {CONTEXT_BYTES / GIB:.1f} GiB of the GPU's memory."
    assumed = sorted({e.gpu.key for e in estimates if e.gpu.usable_memory_bytes is None})
    if assumed:
        least, most = SEEN_TOTALS
        yield (
            "Usable memory is the marketed size in 10^9 bytes, not measured: "
            f"{', '.join(assumed)}. On the catalog's other GPUs CUDA reports {1 - least:.0%} less "
            f"to {most - 1:.0%} more."
        )
    for row in rows:
        if row.routed_peak_gib is not None:
            median, upper = row.routed_peak_gib
            yield (
                f"{row.gpu}: over random expert routings, the peak is {median:.1f} GiB in the "
                f"median and {upper:.1f} GiB at the 95th percentile."
            )


def _steps_text(estimates: Sequence[Estimate], question: Question) -> str:
    """Optimizer steps of an epoch, which decide whether a batch trains well."""
    sizes = {row.batch_size * row.micro_batches * row.data_parallel_ranks for row in estimates}
    steps = sorted(math.ceil(max(rows_of(question.workload) / size, 1)) for size in sizes)
    unit = "packed rows" if question.recipe.packing else "examples"
    if len(steps) == 1:
        (size,) = sizes
        assumed = _assumed_batch_text(size, question) if question.assumes_batch else ""
        unit = unit if size > 1 else unit.removesuffix("s")
        plural = "s" * (steps[0] > 1)
        return f"An epoch has {steps[0]:,} optimizer step{plural} of {size} {unit}{assumed}."
    return (
        f"An epoch has {steps[0]:,} to {steps[-1]:,} optimizer steps of {max(sizes)} to "
        f"{min(sizes)} {unit}: with --effective-batch all GPUs train alike."
    )


def _assumed_batch_text(size: int, question: Question) -> str:
    """Clause on an assumed effective batch, with the reason where it is not the usual one."""
    why, given = "", question.batch
    if isinstance(given, int) and size == nearest_multiple(given):
        why = f": the multiple of --batch-size {given} nearest to {EFFECTIVE_BATCH}"
    elif size != EFFECTIVE_BATCH:
        why = f": {EFFECTIVE_BATCH}, rounded up for the GPUs to share"
    return f", which is assumed{why * (size != EFFECTIVE_BATCH)} (--effective-batch)"


def _recipe_notes(rows: Sequence[Estimate], question: Question) -> Iterator[str]:
    """A line for each recipe that the default comes to: GPUs without bf16 have another."""
    on: dict[str, list[str]] = {}
    for row in rows:
        on.setdefault(row.recipe, []).append(row.gpu)
    for recipe, gpus in on.items():
        where = f" on {', '.join(dict.fromkeys(gpus))}" if len(on) > 1 else ""
        yield f"{rows[0].model}, {recipe}{where}, {_lengths(rows, question)}."


def _error_notes(estimates: Sequence[Estimated], wanted: Constraints) -> Iterator[str]:
    """Warnings of how far times and memory may be off."""
    rows = [e.estimate for e in estimates]
    yield f"Constants of the step times: {rows[0].constants}."
    fitting = [row for row in rows if row.outcome is Outcome.FITS]
    missing = dict.fromkeys(name for row in fitting or rows for name in row.not_compared)
    if missing:
        yield (
            f"Memory was compared with no measured run that has: {', '.join(missing)}. "
            f"The interval may be too narrow for it.{TWO_RUNS * (SEVERAL_GPUS in missing)}"
        )
    if any(row.gpus > 1 and row.step_seconds is not None for row in rows):
        yield SEVERAL_STEPS
    priced = [row for row in rows if row.price is not None]
    if len(priced) > 1:
        alike = "all rows"
        if len({row.time_error for row in priced}) > 1:
            alike = "rows with equally wide intervals"
        shown = "fastest" if wanted.objective == "time" else "cheapest"
        offers = f"Each row shows the GPU's {shown} offer."
        yield (
            f"Step times of {alike} are mostly off in the same direction: their order is safer "
            f"than their hours. {offers}"
        )


def _memory_notes(rows: Sequence[Estimate]) -> Iterator[str]:
    """Interval of the memory by published runs.

    docs/explanation/evidence.md has the runs.
    """
    errors = published_errors()
    for error in dict.fromkeys(row.memory_error for row in rows):
        yield (
            f"Memory of {error.method}: the 90 % interval is {1 - error.low:.0%} below to "
            f"{error.high - 1:.0%} above the prediction, by {error.runs} measured runs of "
            f"{error.sources} sources ({error.pooled}). Such intervals held {errors.covered:.0%} "
            f"of {errors.runs} runs whose source was left out."
        )


def _time_notes(rows: Sequence[Estimate]) -> Iterator[str]:
    """Intervals of the step times by measured steps.

    docs/explanation/evidence.md has the steps.
    """
    for error in dict.fromkeys(row.time_error for row in rows if row.time_error is not None):
        alike = [row for row in rows if row.time_error == error]
        which = "GPU-bound step times on GPUs whose matrix products were measured"
        if error != time_errors().of_gpu:
            which = "Step times that may be host-bound, or are unlike any measured step"
        yield (
            f"{which}: the 90 % interval is {1 - error.low:.0%} below to "
            f"{error.high - 1:.0%} above the prediction, by {error.steps} measured steps of "
            f"{error.sources} sources, all on one GPU. Such intervals held "
            f"{error.covered:.0%} of these steps with their source left out"
            f"{_on_gpus(alike, rows)}."
        )


def _on_gpus(some: Sequence[Estimate], rows: Sequence[Estimate]) -> str:
    """GPUs of some rows in parentheses; empty where they are all rows."""
    gpus = ", ".join(sorted({row.gpu for row in some}))
    return "" if len(some) == len(rows) else f" ({gpus})"


def _approximations(rows: Sequence[Estimate]) -> Iterator[str]:
    """Differences between the traced stack and the one that would run, with their GPUs."""
    approximations = dict.fromkeys(text for row in rows for text in row.approximations)
    for text in approximations:
        alike = [row for row in rows if text in row.approximations]
        yield f"Approximate: {text}{_on_gpus(alike, rows)}."
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
    waits = not question.recipe.packing and any(row.data_parallel_ranks > 1 for row in rows)
    waited = "; several GPUs wait for the longest of their batches, which has more" * waits
    return f"memory at {longest} tokens per {unit}, times at {padded[0]:.0f}{most}{padding}{waited}"
