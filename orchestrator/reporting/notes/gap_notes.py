"""Notes on gaps of an estimate: no time, no price, no larger batch, experts in 16 bits, losses."""

from collections.abc import Iterator, Sequence

from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.question import Question
from orchestrator.spec.trainer_defaults import TRL_VERSION
from trials.records.compatibility import LOGITS_FAMILIES
from trials.records.observation import Outcome
from trials.simulation.simulated_cell import SimulatedCell


def gap_notes(estimates: Sequence[Estimated], question: Question) -> Iterator[str]:
    """GPUs without a price, a time or an upper limit of the batch size; too long examples."""
    rows = [e.estimate for e in estimates]
    yield from _own_cards(estimates)
    yield from _fused_experts(estimates[0].cell)
    yield from _own_loss(estimates[0].cell)
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


def _fused_experts(cell: SimulatedCell) -> Iterator[str]:
    recipe, facts = cell.recipe, cell.request.cell
    if recipe.experts == "all-tokens":
        yield (
            f"Every expert multiplies all tokens, as in transformers' class: a step takes the time "
            f"and the activations of {facts.experts} experts for each token, of which "
            f"{facts.active_experts} counts."
        )
    if recipe.method == "qlora" and recipe.has_fused_experts and not recipe.quantised_experts:
        yield (
            "Experts are not quantised: transformers 5 fuses them, and bitsandbytes quantises "
            "linear layers alone."
        )


def _own_loss(cell: SimulatedCell) -> Iterator[str]:
    if cell.request.model.family in LOGITS_FAMILIES and cell.recipe.loss == "full-logits":
        yield (
            "The loss is that of transformers' Trainer, from the logits of all tokens: TRL "
            f"{TRL_VERSION}'s SFTTrainer fails on this class, which returns no hidden states."
        )


def _own_cards(estimates: Sequence[Estimated]) -> Iterator[str]:
    for gpu in dict.fromkeys(row.gpu for row in estimates if row.question.is_own):
        yield (
            f"Your {gpu.key}: no rent; electricity of the card alone, at its board power of "
            f"{gpu.tdp_watts:g} W. The rest of the machine comes on top."
        )
