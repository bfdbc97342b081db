"""Notes on numbers of GPUs that an estimate chose."""

from collections.abc import Iterator, Sequence

from gpu_catalog.number_text import dollars, short
from orchestrator.estimating.choosing.boxes import COUNTS, numbers_tried
from orchestrator.estimating.estimate_records import Box, Estimated


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


def _box_text(box: Box) -> str:
    number = f"{box.gpus} ({box.strategy})" if box.strategy else str(box.gpus)
    if box.hours is None:
        return f"{number}, of unknown time"
    cost = "without a price" if box.usd is None else f"for ${dollars(box.usd)}"
    return f"{number} in {short(box.hours)} h {cost}"
