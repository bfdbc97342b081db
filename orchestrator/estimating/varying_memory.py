"""Memory of a job on examples of varying length, as an epoch of it meets them."""

from gpu_catalog.gpu import Gpu
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import drawn_lengths
from trials.simulation.simulated_cell import GIB, SimulatedCell, like
from trials.simulation.varying_lengths import SHORTEST, VaryingLengths, shorter_traces

HIGH = 0.95
WORTH_SAYING = 0.95  # share of the reserved memory below which an option is worth a note


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
