"""Notes on data: how examples were read, and the error of approximate token counts."""

from collections.abc import Iterator

from orchestrator.datasets.lengths import DataLengths
from orchestrator.estimating.question import Question


def data_notes(question: Question) -> Iterator[str]:
    """Lines on the data of an estimate, or on what an estimate without data leaves out."""
    data = question.workload.lengths
    if data is None:
        if not question.recipe.packing:
            yield (
                "Every example is taken to have the same length. Where lengths vary, padded "
                "batches fragment memory, and a smaller micro-batch may survive an epoch: "
                "--dataset or --length-histogram replays them."
            )
        return
    if data.rendering is not None:
        yield f"Data: {data.source} ({data.rendering})."
    text = approximate_text(data)
    if text is not None:
        yield text


def approximate_text(data: DataLengths) -> str | None:
    """Line on approximate counts; None where a tokenizer counted."""
    if data.error is None:
        return None
    return (
        f"Lengths are approximate, by {data.tokenizer}: up to {data.error:.0%} off on texts of "
        "five kinds. Intervals are wider by that. --tokenizer FOLDER counts exactly."
    )
