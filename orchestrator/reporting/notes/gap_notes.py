"""Notes on gaps of an estimate: no time, no price, no larger batch, experts in 16 bits."""

from collections.abc import Iterator, Sequence

from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.question import Question
from trials.recipes.recipe import Recipe
from trials.records.observation import Outcome


def gap_notes(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    """GPUs without a price, a time or an upper limit of the batch size; too long examples."""
    rows = [e.estimate for e in estimates]
    yield from _own_cards(estimates, question)
    yield from _fused_experts(estimates[0].cell.recipe)
    endless = sorted(row.gpu for row in rows if row.max_batch_size >= row.batch_limit)
    if endless and question.recipe.effective_batch is None:
        yield f"Batch sizes above {rows[0].batch_limit} were not tried: {', '.join(endless)}."
    priceless = [e.estimate for e in estimates if e.estimate.no_price and not e.missed]
    for reason in dict.fromkeys(row.no_price for row in priceless):
        gpus = sorted(row.gpu for row in priceless if row.no_price == reason)
        yield f"No price for {', '.join(gpus)}: {reason}."
    timeless = sorted(
        row.gpu for row in rows if row.outcome is Outcome.FITS and row.step_seconds is None
    )
    if timeless:
        yield (
            f"No time for {', '.join(timeless)}: the catalog lacks its compute rate or "
            "bandwidth. Add bf16_dense_tflops and memory_bandwidth_gb_per_second in a file, and "
            "give the file with --catalog."
        )
    positions = estimates[0].cell.request.model.positions
    if positions is not None and rows[0].seq_len > positions:
        yield f"{rows[0].model} supports examples of at most {positions:,} tokens."


def _fused_experts(recipe: Recipe) -> Iterator[str]:
    if recipe.method == "qlora" and recipe.experts == "grouped" and not recipe.quantised_experts:
        yield (
            "Experts are not quantised: transformers 5 fuses them, and bitsandbytes quantises "
            "linear layers alone."
        )


def _own_cards(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    for gpu in dict.fromkeys(row.gpu for row in estimates):
        if gpu.key in question.own_cards and gpu.tdp_watts is not None:
            yield (
                f"Your {gpu.key}: no rent; electricity of the card alone, at its board power of "
                f"{gpu.tdp_watts:g} W. The rest of the machine comes on top."
            )
