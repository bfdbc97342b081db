"""Notes on data: how examples were read, and the error of approximate token counts."""

from collections.abc import Iterator

from orchestrator.datasets.lengths import DataLengths
from orchestrator.estimating.estimate_records import Estimate, Estimated
from orchestrator.estimating.question import Question
from trials.recipes.parallel import ZERO_STRATEGIES


def data_notes(best: Estimated, question: Question) -> Iterator[str]:
    """Lines on the data of an estimate, or on what an estimate without data leaves out."""
    data = question.workload.lengths
    if data is None:
        if not question.recipe.packing:
            yield _without_lengths(best.estimate)
        return
    if data.rendering is not None:
        yield f"Data: {data.source} ({data.rendering})."
    text = approximate_text(data)
    if text is not None:
        yield text


def _without_lengths(row: Estimate) -> str:
    """Line on lengths that are not known, with what they may do to the memory."""
    same = "Every example is taken to have the same length."
    assumed = row.assumed_lengths
    if row.strategy in ZERO_STRATEGIES:
        return f"{same} Where lengths vary, padded batches fragment memory, which is left out."
    if assumed is None:
        return (
            f"{same} Where lengths vary, padded batches fragment memory, and a smaller micro-batch "
            "may survive an epoch: --dataset or --length-histogram replays them."
        )
    low, high = assumed.reserved_gib.low, assumed.reserved_gib.high
    return (
        f"{same} If lengths varied as those of {assumed.data}, up to {row.seq_len}, a micro-batch "
        f"of {row.batch_size} would reserve {low:.1f} to {high:.1f} GiB of unlimited memory "
        f"({row.gpu} has {row.usable_gib:.1f}), and the largest to survive an epoch would be "
        f"{assumed.surviving_batch_size} of {row.max_batch_size}: --dataset or --length-histogram "
        "replays your own."
    )


def approximate_text(data: DataLengths) -> str | None:
    """Line on approximate counts; None where a tokenizer counted."""
    if data.error is None:
        return None
    return (
        f"Lengths are approximate, by {data.tokenizer}: up to {data.error:.0%} off on texts of "
        "five kinds. Intervals are wider by that. --tokenizer FOLDER counts exactly."
    )
