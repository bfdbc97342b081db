"""Memory of a job on examples of varying length, as an epoch of it meets them."""

from collections.abc import Sequence

from gpu_catalog.gpu import Gpu
from orchestrator.estimating.question import Question
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import drawn_tokens
from trials.simulation.simulated_cell import GIB, SimulatedCell, like
from trials.simulation.varying_lengths import MICRO_BATCHES, VaryingLengths

SHORTEST = 16  # tokens; a trace of fewer may take other kernels
STEP = 1.03  # precision of a largest batch among many
HIGH = 0.95
WORTH_SAYING = 0.95  # share of the reserved memory below which an option is worth a note


def traced_lengths(workload: Job, seq_len: int) -> tuple[int, ...]:
    """Lengths whose traces determine those of all batches; the full one where none varies."""
    lengths = (seq_len, seq_len // 2, seq_len // 4)
    varies = len(set(drawn_tokens(workload, 1, MICRO_BATCHES, 0))) > 1
    return lengths if varies and lengths[-1] >= SHORTEST else lengths[:1]


def varying_lengths(workload: Job, cell: SimulatedCell) -> VaryingLengths | None:
    """Runs of a cell on drawn lengths; None where all batches are of one length."""

    def drawn(batch_size: int, seed: int) -> Sequence[int]:
        return drawn_tokens(workload, batch_size, MICRO_BATCHES, seed)

    # Sizes are affine in the length, but for attention scores, which only eager attention and fp32
    # hold: they need a third length.
    holds_scores = cell.recipe.attention == "eager" or cell.recipe.compute_dtype == "fp32"
    lengths = (cell.request.cell.seq_len // 2, cell.request.cell.seq_len // 4)[: 1 + holds_scores]
    if lengths[-1] < SHORTEST or len(set(drawn(1, 0))) < 2:
        return None
    return VaryingLengths(cell, lengths, drawn)


def remedies(
    workload: Job, varying: VaryingLengths, gpu: Gpu, batch_size: int
) -> tuple[tuple[str, float], ...]:
    """Options that lower the reserved memory by more than 5 %, the best first.

    Returns:
        Each option with the GiB that 95 % of the runs stay within.
    """
    cell = varying.cell
    options: dict[str, VaryingLengths | None] = {}
    if not cell.expandable_segments:
        options["--expandable-segments"] = varying_lengths(
            workload, like(cell, expandable_segments=True)
        )
    if workload.padding == "longest":
        grouped = workload.model_copy(update={"padding": "grouped"})
        options["--group-by-length"] = varying_lengths(grouped, cell)
    before = varying.memory(batch_size, gpu).quantile(HIGH)
    after = {
        name: runs.memory(batch_size, gpu).quantile(HIGH)
        for name, runs in options.items()
        if runs is not None
    }
    kept = [(name, size / GIB) for name, size in after.items() if size < WORTH_SAYING * before]
    return tuple(sorted(kept, key=lambda option: option[1]))


def sizes_to_try(question: Question, largest: int) -> Sequence[int]:
    """Micro-batches up to the largest, ascending: all that the effective batch allows, or a few."""
    effective_batch = question.recipe.effective_batch
    if effective_batch is not None:
        return [n for n in range(1, largest + 1) if effective_batch % n == 0]
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(min(sizes[-1] - 1, int(sizes[-1] / STEP)))
    return sizes[::-1]
