"""Memory of a job without lengths, should its examples vary as those of a known data set do."""

from dataclasses import replace

from fitting.laws.fit_result import Interval
from fitting.paper.published import MATH, dataset_lengths
from orchestrator.estimating.estimate_records import AssumedLengths, Estimated, Estimates
from trials.drawn_lengths import DrawnLengths, sizes_to_try
from trials.records.observation import Outcome
from trials.simulation.length_traces import LengthTraces
from trials.simulation.recording import StructureError
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.trace_cache import TraceError
from trials.simulation.varying_lengths import VaryingLengths, shorter_traces

MULTIPLE = 8  # to which batches are padded, as TRL's collator may


def with_assumed_lengths(estimates: Estimates) -> Estimates:
    """Estimates whose best has runs on assumed lengths, where a job without lengths is padded."""
    if len({one.estimate.seq_len for one in estimates.estimated}) != 1:
        return estimates
    best, *others = estimates.estimated
    assumed = assumed_lengths(best)
    if assumed is None:
        return estimates
    estimate = best.estimate.model_copy(update={"assumed_lengths": assumed})
    return replace(estimates, estimated=(replace(best, estimate=estimate), *others))


def assumed_lengths(best: Estimated) -> AssumedLengths | None:
    """Replay runs on assumed lengths; None where no padded batch fits, or lengths are known."""
    question, row, recipe = best.question, best.estimate, best.cell.recipe
    is_padded = question.workload.lengths is None and not recipe.packing and recipe.task == "sft"
    is_alone = question.parallel is None and not question.finds_seq_len
    is_alone = is_alone and question.image_tokens is None
    if row.outcome is not Outcome.FITS or not (is_padded and is_alone):
        return None
    cell = best.cell
    shorter = shorter_traces(cell.request.cell)
    if not shorter:
        return None
    traces = LengthTraces(cell.traces, (row.seq_len, *shorter))
    varying = VaryingLengths(
        SimulatedCell(
            cell.request.cell,
            cell.request.model,
            traces,
            cell.request.routing,
            expandable_segments=cell.expandable_segments,
        ),
        drawn(row.seq_len, question.workload.examples).batches,
    )
    limit, sizes = usable_bytes(best.gpu, recipe), sizes_to_try(recipe, row.max_batch_size)
    try:
        traces.prepare(varying.requests())
        survives = varying.largest(best.gpu, limit, sizes)
        memory = varying.memory(row.batch_size, best.gpu)
    except (TraceError, StructureError):  # the answer for one length stands without it
        return None
    low, high = (memory.quantile(part) / GIB for part in (0.05, 0.95))
    return AssumedLengths(
        data=MATH, surviving_batch_size=survives, reserved_gib=Interval(low=low, high=high)
    )


def drawn(seq_len: int, examples: int) -> DrawnLengths:
    """Lengths of a data set, scaled so that its longest example has ``seq_len`` tokens."""
    lengths = dataset_lengths()[MATH]
    scale = seq_len / float(lengths.tokens.max())
    counts: dict[int, int] = {}
    for tokens, number in zip(lengths.tokens.tolist(), lengths.examples.tolist(), strict=True):
        scaled = max(1, round(tokens * scale))
        counts[scaled] = counts.get(scaled, 0) + int(number)
    return DrawnLengths(
        histogram=tuple(sorted(counts.items())),
        examples=examples,
        grouped=False,
        multiple=MULTIPLE,
        most_tokens=seq_len,
    )
