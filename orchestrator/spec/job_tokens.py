"""Tokens and steps of a job at a batch size.

In a job without lengths every example has the full sequence length.
"""

import math

from fitting.points.packed_rows import rows_per_example
from orchestrator.datasets.lengths import DataLengths
from orchestrator.request import OptionError
from orchestrator.spec.job import PACKED, Job
from trials.drawn_lengths import DrawnLengths
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe

SIMULATED_PADDED = (1, 2, 3, 4, 8, 16)  # batch sizes whose padded lengths are simulated
FULL = 0.99  # share of a packed row from which it counts as full
ALIKE = 0.97  # a length of at least this share of another is not simulated as well


def job_of(workload: Job, recipe: Recipe, seq_len: int, steps: int | None = None) -> Job:
    """Job in batches as a recipe has them, with the examples that its trainer makes of the data.

    Where the recipe packs, a batch has rows of ``seq_len`` tokens. A job without lengths then has
    as many equal examples in a row as the recipe states.

    Args:
        workload: the job.
        recipe: the recipe.
        seq_len: tokens of a packed row.
        steps: optimizer steps of an epoch, which decide on the number of examples; None for the
            job's own number.

    Raises:
        OptionError: there are steps, and the recipe leaves open how many examples each has.
    """
    workload = of_task(workload, recipe)
    if recipe.examples_per_row is not None:
        tokens = max(1, seq_len // recipe.examples_per_row)
        lengths = workload.lengths or DataLengths(
            source="assumed", histogram=((tokens, workload.examples),)
        )
        changes = {"padding": "best-fit", "cutoff": seq_len, "lengths": lengths}
        workload = workload.model_copy(update=changes)
    if steps is None:
        return workload
    if recipe.effective_batch is None:
        raise OptionError(
            f"--gradient-accumulation with max_steps {steps} of a configuration: give "
            "--effective-batch instead, the examples of a step on all GPUs"
        )
    examples = math.floor(steps * recipe.effective_batch / _rows_per_example(workload))
    return workload.model_copy(update={"examples": max(1, examples)})


def of_task(workload: Job, recipe: Recipe) -> Job:
    """Job with the examples that TRL's trainer of the task makes of pairs."""
    data = workload.lengths
    if data is None or data.kind != "pairs":
        return workload
    if recipe.task == "kto":
        update = {"lengths": data.unpaired(), "examples": 2 * workload.examples}
        return workload.model_copy(update=update)
    return workload.with_long_examples("dropped") if recipe.is_scored else workload


def padded_tokens(workload: Job, batch_size: int, seq_len: int) -> float:
    """Expected tokens of each row of a full batch, padding included.

    Random batches padded to their longest (``Lengths.padded``), batches of like lengths
    (``Lengths.grouped``), packed rows, which are full, or rows of whole examples, which are not
    padded: they have fewer tokens. A step has ``batch_size`` times as many.

    Args:
        workload: the job.
        batch_size: rows per step; a row is an example, or a packed one.
        seq_len: tokens of every example of a job without lengths.
    """
    data = workload.lengths
    if data is None:
        return float(seq_len)
    if workload.padding == "packed":
        return float(_row_length(workload))
    if workload.padding == "best-fit":
        row = _row_length(workload)
        mean = data.lengths.cut(row).mean / _rows_per_example(workload)
        return float(row) if mean >= FULL * row else mean
    lengths = data.lengths if workload.cutoff is None else data.lengths.cut(workload.cutoff)
    size = min(batch_size, workload.examples)
    if workload.padding == "grouped":
        return lengths.grouped(size, workload.examples, workload.pad_to_multiple)
    return lengths.padded(size, workload.pad_to_multiple)


def waited_tokens(
    workload: Job, batch_size: int, seq_len: int, layout: Parallel | None, micro_batches: int
) -> float:
    """Expected tokens of each row of the batch that the ranks of a step wait for, the longest.

    Each rank pads its own batch. Of n ranks that meet in every micro-batch the longest example of
    all n b decides, ``L(n b)`` instead of ``L(b)`` (``padded_tokens``). Ranks that meet once in k
    micro-batches differ by the mean of k lengths, whose standard deviation is smaller by
    ``sqrt(k)``: ``L(b) + (L(n b) - L(b)) / sqrt(k)``.

    Args:
        workload: the job.
        batch_size: rows per micro-batch of a rank, b.
        seq_len: as for ``padded_tokens``.
        layout: the ranks; None for one, which waits for none.
        micro_batches: micro-batches per optimizer step, k.
    """
    own = padded_tokens(workload, batch_size, seq_len)
    if layout is None or layout.data_parallel_ranks == 1:
        return own
    longest = padded_tokens(workload, batch_size * layout.data_parallel_ranks, seq_len)
    return own + (longest - own) / math.sqrt(micro_batches if layout.meets_once else 1)


def shorter_lengths(workload: Job, seq_len: int) -> tuple[int, ...]:
    """Tokens per example to simulate beside a full length, ascending; none without lengths.

    These are the padded lengths of batches of ``SIMULATED_PADDED``. The step time of a small batch
    grows in jumps, by a wave of tiles at a time, so it cannot be interpolated between two lengths.
    Half the shortest is added, since a cutoff may be applied to the run later.

    Args:
        workload: the job.
        seq_len: the full length.
    """
    longest = longest_example(workload)
    if longest is None or longest > seq_len:
        return ()
    padded = {round(padded_tokens(workload, size, seq_len)) for size in SIMULATED_PADDED}
    kept: list[int] = []
    for tokens in sorted({min(padded) // 2, *padded}, reverse=True):
        if 0 < tokens < ALIKE * (kept[-1] if kept else seq_len):
            kept.append(tokens)
    return tuple(sorted(kept))


def drawn_lengths(workload: Job, seq_len: int) -> DrawnLengths | None:
    """Lengths that batches of a job are drawn from; None where all batches are of one length.

    Args:
        workload: the job.
        seq_len: tokens that no row exceeds; a job with longer examples does not run there.
    """
    drawn = drawn_from(workload, seq_len)
    return drawn if drawn is not None and drawn.vary else None


def drawn_from(workload: Job, seq_len: int) -> DrawnLengths | None:
    """Lengths that batches of a job are drawn from, alike or not; None without lengths.

    Args:
        workload: the job.
        seq_len: as in ``drawn_lengths``.
    """
    data, longest = workload.lengths, longest_example(workload)
    if data is None or longest is None or longest > seq_len or workload.padding in PACKED:
        return None
    lengths = data.lengths.cut(longest)
    histogram = zip(lengths.tokens.tolist(), lengths.examples.tolist(), strict=True)
    return DrawnLengths(
        histogram=tuple((int(tokens), int(examples)) for tokens, examples in histogram),
        examples=workload.examples,
        grouped=workload.padding == "grouped",
        multiple=workload.pad_to_multiple,
        most_tokens=seq_len,
    )


def longest_tokens(workload: Job, seq_len: int) -> int:
    """Tokens of the longest row there is, padding included: what memory must hold.

    Args:
        workload: the job.
        seq_len: tokens of every example of a job without lengths.
    """
    longest = longest_example(workload)
    if longest is None:
        return seq_len
    if workload.padding in PACKED:
        return longest
    return -(-longest // workload.pad_to_multiple) * workload.pad_to_multiple


def longest_example(workload: Job) -> int | None:
    """Tokens of the longest example, or of a packed row, without padding; None without lengths."""
    data = workload.lengths
    if data is None:
        return None
    if workload.padding in PACKED:
        return _row_length(workload)
    return min(data.longest, workload.cutoff or data.longest)


def rows(workload: Job) -> int:
    """Rows of an epoch: its examples, or as many packed ones as they fill.

    With ``packed``, examples follow one another and are cut where a row is full; no token is lost.
    With ``best-fit``, a row holds whole examples, and examples longer than a row are truncated.
    """
    return math.ceil(round(_rows_per_example(workload) * workload.examples, 6))


def _rows_per_example(workload: Job) -> float:
    if workload.padding not in PACKED or workload.lengths is None:
        return 1.0
    row = _row_length(workload)
    if workload.padding == "best-fit":
        return rows_per_example(workload.lengths.histogram, row)
    return workload.lengths.lengths.mean / row


def steps(workload: Job, batch_size: int) -> int:
    """Optimizer steps of the job: ``ceil(rows / batch) * epochs``; a last batch may be smaller."""
    return -(-rows(workload) // batch_size) * workload.epochs


def _row_length(workload: Job) -> int:
    assert workload.cutoff is not None  # validated by Job
    return workload.cutoff
