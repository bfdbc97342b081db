"""Notes on numbers of GPUs: those that an estimate chose, and more speed than GPUs."""

from collections.abc import Iterator, Sequence

from gpu_catalog.number_text import dollars, short
from orchestrator.estimating.choosing.boxes import COUNTS, numbers_tried
from orchestrator.estimating.estimate_records import Box, Estimated
from trials.recipes.parallel import SHARDED_BY_TORCH

NOTICEABLE = 1.01
"""Speed over the number of GPUs, relative to one GPU, from which a reader would ask why."""


def box_notes(estimates: Sequence[Estimated]) -> Iterator[str]:
    """The rule of the choice, and the other numbers of the recommended GPU."""
    if not any(row.estimate.boxes or row.estimate.gpus > 1 for row in estimates):
        return
    best = estimates[0]
    if any(row.estimate.boxes for row in estimates):
        tried = numbers_tried(estimates, best.question)
        counts = ",".join(map(str, tried))
        left_out = [str(count) for count in COUNTS if count not in tried]
        why = f" ({' and '.join(left_out)} cannot share the effective batch)" * bool(left_out)
        yield (
            f"Of each GPU the best number of {counts} is shown, of those that an instance has"
            f"{why}: copies of the model (ddp) where one GPU suffices, else shards (fsdp2). "
            f"--gpus {counts} shows all."
        )
    if best.estimate.boxes:
        listed = "; ".join(map(_box_text, best.estimate.boxes))
        yield f"Other numbers of {best.gpu.key}: {listed}."


def speedup_note(estimates: Sequence[Estimated]) -> Iterator[str]:
    """Numbers of GPUs that multiply the speed of one by more than their number, and the reason."""
    alone = {
        row.gpu.key: row.estimate.examples_per_second for row in estimates if row.estimate.gpus == 1
    }
    faster = []
    for row in estimates:
        one, all_of_them = alone.get(row.gpu.key), row.estimate.examples_per_second
        if (
            one
            and all_of_them
            and row.cell.recipe.autocast
            and row.estimate.strategy in SHARDED_BY_TORCH
        ):
            times = all_of_them / one
            if times > NOTICEABLE * row.estimate.gpus:
                faster.append(f"{row.estimate.gpu}, {times:.1f} times as fast")
    if faster:
        yield (
            f"More speed than GPUs, beside one GPU: {'; '.join(dict.fromkeys(faster))}. Under "
            "FSDP2, norms and inputs of layers are in 16 bits, which autocast on one GPU keeps in "
            "fp32, and each GPU casts only its shard of the weights in fp32; shards leave room for "
            "larger micro-batches, too."
        )


def _box_text(box: Box) -> str:
    number = f"{box.gpus} ({box.strategy})" if box.strategy else str(box.gpus)
    if box.hours is None:
        return f"{number}, of unknown time"
    cost = "without a price" if box.usd is None else f"for ${dollars(box.usd)}"
    return f"{number} in {short(box.hours)} h {cost}"
