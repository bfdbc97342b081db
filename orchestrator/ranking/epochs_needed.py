"""Number of epochs of a job by training curves: ``--epochs auto``. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from fitting.learning_curves import LearningCurve, Score, best, experts_text
from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from trials.recipes.fields import Optimizer
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell, Weights

# Parts of a recipe that decide speed and memory, but not the number of epochs.
SPEED_ONLY = {
    "gradient_checkpointing": False,
    "activation_offloading": False,
    "attention": None,
    "experts": None,
    "mamba": None,
    "offload_optimizer": False,
    "gradient_accumulation": 1,
    "liger_kernels": False,
    "compile": None,
    "loss": "full-logits",
}
# Optimizers that compute what another one does.
SAME_UPDATE: dict[Optimizer, Optimizer] = {
    "adamw_foreach": "adamw",
    "adamw_loop": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
}


class EpochsError(UserError):
    """No training curve gives a number of epochs; a line for each reason."""


class LearnedEpochs(Record):
    """Number of epochs after which a model stops improving, with its source.

    Attributes:
        model, active_experts: what was trained.
        recipe: key of the recipe.
        by: score that decided.
        batch_size, learning_rate: training arguments.
    """

    model: str
    recipe: str
    active_experts: int | None
    weights: Weights
    epochs: int
    by: Score
    data: str
    held_out_examples: int
    batch_size: int
    learning_rate: float


EpochsByCell = Mapping[Cell, LearnedEpochs | str]
"""Number of epochs of each cell, or why it is unknown."""


def learned_epochs(
    cells: Iterable[Cell], curves: Sequence[LearningCurve], where: str
) -> EpochsByCell:
    """Look up the number of epochs of each cell by model, recipe and sparsity.

    The GPU and whatever else decides speed alone do not matter. Curves of pretrained weights go
    before those of random ones, later ones before earlier ones.

    Raises:
        EpochsError: there is no number for any cell.
    """
    by_cell = {cell: _of(cell, curves) for cell in cells}
    if any(isinstance(epochs, LearnedEpochs) for epochs in by_cell.values()):
        return by_cell
    if not curves:
        raise EpochsError(
            f"--epochs auto: {where} has nothing that 'learn' found: run 'learn DATA --model "
            "NAME --out DIR', then give --learned DIR, or give a number"
        )
    reasons = dict.fromkeys(str(reason) for reason in by_cell.values())
    raise EpochsError("\n".join(f"--epochs auto: {where}: {reason}" for reason in reasons))


def _of(cell: Cell, curves: Sequence[LearningCurve]) -> LearnedEpochs | str:
    key = _learning_key(cell)
    matching = [curve for curve in curves if _learning_key(curve.cell) == key]
    if not matching:
        return (
            f"nothing was learned by {cell.model}, {cell.recipe.method}, {experts_text(cell)}: run "
            "'learn' with its recipe, or give a number of epochs"
        )
    # Of equals max takes the first, here the latest.
    curve = max(reversed(matching), key=lambda curve: curve.cell.weights == "pretrained")
    result, last = best(curve), curve.epochs[-1].epoch
    where = f"{cell.model}, {experts_text(cell)}, on {curve.data.source}"
    if not result.has_stopped:
        longer = 2 * max(last, curve.training.patience)
        return f"{where}: may be improving still at epoch {last}: continue with --epochs {longer}"
    if result.epoch == 0:
        return f"{where}: none of {last} epochs was better than the untrained model: give a number"
    return LearnedEpochs(
        model=cell.model,
        recipe=curve.cell.recipe.key,
        active_experts=cell.active_experts,
        weights=curve.cell.weights,
        epochs=result.epoch,
        by=result.by,
        data=curve.data.source,
        held_out_examples=curve.data.held_out_examples,
        batch_size=curve.training.batch_size,
        learning_rate=curve.training.learning_rate,
    )


def _learning_key(cell: Cell) -> tuple[str, int | None, Recipe]:
    """Everything of a cell that decides its number of epochs."""
    optimizer = cell.recipe.optimizer
    same = {"optimizer": SAME_UPDATE.get(optimizer, optimizer)}
    return cell.model, cell.active_experts, cell.recipe.model_copy(update=SPEED_ONLY | same)
