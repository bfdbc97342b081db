"""Memory of a job on examples of varying length, as an epoch of it meets them."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import drawn_from, drawn_lengths, longest_tokens, padded_tokens
from trials.drawn_lengths import DrawnLengths, sizes_to_try
from trials.simulation.simulated_cell import SimulatedCell, like
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.varying_lengths import SHORTEST, VaryingLengths, shorter_traces

WORTH_SAYING = 1.05  # growth of the micro-batch above which a change is worth a note
MULTIPLES = (64, 512)  # to pad to: that of tensor cores' tiles, and one that leaves few lengths


def traced_lengths(workload: Job, seq_len: int) -> tuple[int, ...]:
    """Lengths whose traces determine those of all batches; the full one where none varies."""
    lengths = (seq_len, seq_len // 2, seq_len // 4)
    varies = drawn_lengths(workload, seq_len) is not None
    return lengths if varies and lengths[-1] >= SHORTEST else lengths[:1]


def varying_lengths(workload: Job, cell: SimulatedCell) -> VaryingLengths | None:
    """Runs of a cell on drawn lengths; None where all batches are of one length."""
    drawn = drawn_lengths(workload, cell.request.cell.seq_len)
    if drawn is None or not shorter_traces(cell.request.cell):
        return None
    return VaryingLengths(cell, drawn.batches)


@dataclass(frozen=True, slots=True)
class LengthRemedy:
    """Change under which a larger micro-batch survives varying lengths.

    Attributes:
        change: option of the command line, or a description where there is none.
        batch_size: largest micro-batch that survives with it, among those tried.
        more_tokens: share of tokens that it adds to those of the larger micro-batch.
    """

    change: str
    batch_size: int
    more_tokens: float = 0.0


def length_remedies(
    workload: Job, varying: VaryingLengths, gpu: Gpu, survives: int, batch_limit: int
) -> list[LengthRemedy]:
    """Changes that raise the micro-batch that survives by more than 5 %, the best first.

    Args:
        workload: the job.
        varying: runs of the cell as it is.
        gpu: GPU that they run on.
        survives: largest micro-batch that survives on it; 0 where none does.
        batch_limit: largest batch size to try.

    Raises:
        TraceError, StructureError: as in ``VaryingLengths``.
    """
    raising = []
    for change, runs, padded in _changed(workload, varying):
        larger = _larger(runs, gpu, survives, batch_limit)
        if larger is not None:
            seq_len = varying.cell.request.cell.seq_len
            before, after = (padded_tokens(job, larger, seq_len) for job in (workload, padded))
            raising.append(LengthRemedy(change, larger, max(after / before - 1, 0.0)))
    return sorted(raising, key=lambda remedy: (-remedy.batch_size, remedy.more_tokens))


def _larger(runs: VaryingLengths, gpu: Gpu, survives: int, batch_limit: int) -> int | None:
    """Largest micro-batch that survives if it is worth saying; None else, after a single try."""
    cell = runs.cell
    limit = usable_bytes(gpu, cell.recipe)
    sizes = sizes_to_try(cell.recipe, cell.largest_batch(gpu, limit, batch_limit))
    larger = [size for size in sizes if size > WORTH_SAYING * survives]
    if not larger or not runs.survives(larger[0], gpu, limit):
        return None
    return runs.largest(gpu, limit, larger)


def _changed(workload: Job, varying: VaryingLengths) -> Iterator[tuple[str, VaryingLengths, Job]]:
    """Runs under each change, with its name and the job as it pads."""
    cell, drawn = varying.cell, _drawn(workload, varying.cell)
    if not cell.expandable_segments:
        expandable = like(cell, expandable_segments=True)
        yield "--expandable-segments", VaryingLengths(expandable, drawn.batches), workload
    if workload.padding == "longest":
        grouped = workload.model_copy(update={"padding": "grouped"})
        runs = VaryingLengths(cell, _drawn(grouped, cell).batches)
        yield "--group-by-length", runs, grouped
        yield "the longest batch first", VaryingLengths(cell, drawn.longest_first), workload
    for multiple in MULTIPLES:
        if multiple % workload.pad_to_multiple == 0 and multiple > workload.pad_to_multiple:
            padded = workload.model_copy(update={"pad_to_multiple": multiple})
            runs = VaryingLengths(cell, _drawn(padded, cell).batches)
            yield f"--pad-to-multiple {multiple}", runs, padded


def _drawn(workload: Job, cell: SimulatedCell) -> DrawnLengths:
    """Lengths of a job that vary before they are padded further."""
    drawn = drawn_from(workload, longest_tokens(workload, cell.request.cell.seq_len))
    assert drawn is not None  # runs of a cell exist only where its lengths vary
    return drawn
