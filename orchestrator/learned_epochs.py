"""How often a job's queries are to be seen, by what was learnt: ``--epochs auto``. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from gpu_catalog.record import Record
from orchestrator.learn_tables import experts_text
from orchestrator.learned import Best, Curve, Score, best
from trials.recipe import Recipe
from trials.workload import Cell, Weights

# Where and how fast a model learns decides nothing of how many epochs it takes.
OF_SPEED = {
    "gradient_checkpointing": False,
    "attention": None,
    "experts": None,
    "mamba": None,
    "offload_optimizer": False,
}


class EpochsError(ValueError):
    """No epochs are known to have been learnt; a line for each reason."""


class LearnedEpochs(Record):
    """After how many epochs a model stops improving, and what says so.

    Attributes:
        model, recipe, active_experts: what learnt; the recipe's key.
        weights: which it began with.
        epochs: the best one.
        by: the score that said so.
        data: the data set.
        held_out_queries: it was tested with.
        batch_size, learning_rate: it was trained with.
    """

    model: str
    recipe: str
    active_experts: int | None
    weights: Weights
    epochs: int
    by: Score
    data: str
    held_out_queries: int
    batch_size: int
    learning_rate: float


Found = Mapping[Cell, LearnedEpochs | str]
"""Of each cell the epochs, or why they are not known."""


def learned_epochs(cells: Iterable[Cell], curves: Sequence[Curve], where: str) -> Found:
    """The epochs of each cell's model, recipe and sparsity.

    Learning does not depend on the GPU, nor on what only makes steps fast or small. Curves of
    pretrained weights count before those of random ones, the latest before earlier ones.

    Args:
        cells: those that are ranked.
        curves: what was learnt.
        where: the file or folder it is kept in.

    Raises:
        EpochsError: none of it speaks of any cell.
    """
    found = {cell: _of(cell, curves) for cell in cells}
    if not any(isinstance(each, LearnedEpochs) for each in found.values()):
        if not curves:
            raise EpochsError(
                f"--epochs auto: {where} has nothing that 'learn' found: run 'learn DATA --model "
                "NAME --out DIR', then give --learned DIR, or give a number"
            )
        reasons = dict.fromkeys(str(each) for each in found.values())
        raise EpochsError("\n".join(f"--epochs auto: {where}: {reason}" for reason in reasons))
    return found


def _of(cell: Cell, curves: Sequence[Curve]) -> LearnedEpochs | str:
    mine = [curve for curve in curves if _same_learning(curve.cell, cell)]
    if not mine:
        return (
            f"nothing was learnt by {cell.model}, {cell.recipe.method}, {experts_text(cell)}: run "
            "'learn' with its recipe, or give a number of epochs"
        )
    # Of equals the first is taken: the latest.
    curve = max(reversed(mine), key=lambda each: each.cell.weights == "pretrained")
    told = best(curve)
    problem = _problem(curve, told)
    if problem is not None:
        return f"{cell.model}, {experts_text(cell)}, on {curve.data.source}: {problem}"
    return LearnedEpochs(
        model=cell.model,
        recipe=curve.cell.recipe.key,
        active_experts=cell.active_experts,
        weights=curve.cell.weights,
        epochs=told.epoch,
        by=told.by,
        data=curve.data.source,
        held_out_queries=curve.data.held_out_queries,
        batch_size=curve.training.batch_size,
        learning_rate=curve.training.learning_rate,
    )


def _problem(curve: Curve, told: Best) -> str | None:
    """Why a curve tells no number of epochs; None when it does."""
    if told.is_told:
        return None
    epochs = curve.epochs[-1].epoch
    if not told.has_stopped:
        longer = 2 * max(epochs, curve.training.patience)
        return f"may be improving still at epoch {epochs}: learn on, with --epochs {longer}"
    return f"none of {epochs} epochs was better than the untrained model: give a number"


def _same_learning(one: Cell, other: Cell) -> bool:
    return (
        one.model == other.model
        and one.active_experts == other.active_experts
        and _learning(one.recipe) == _learning(other.recipe)
    )


def _learning(recipe: Recipe) -> Recipe:
    """What of a recipe decides how it learns."""
    paged = {"optimizer": "adamw_8bit"} if recipe.optimizer == "paged_adamw_8bit" else {}
    return recipe.model_copy(update=OF_SPEED | paged)


def epochs_text(learned: Sequence[LearnedEpochs]) -> str:
    """Where the epochs of a ranking come from, a line for each."""
    lines = []
    for each in learned:
        experts = "" if each.active_experts is None else f", {each.active_experts} experts"
        lines.append(
            f"{each.model}{experts}, {each.recipe}: {each.epochs} epochs, after which "
            f"{each.held_out_queries:,} held-out queries of {each.data} got no better by "
            f"{each.by} (learnt from {each.weights} weights in batches of {each.batch_size}; other "
            "batches may take more or fewer)."
        )
    return "\n".join(lines)
