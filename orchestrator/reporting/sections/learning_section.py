"""Section of training curves: loss and accuracy by epoch, as Markdown and as JSON."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fitting.learning_curves import (
    STOP_RULE,
    Gain,
    LearningCurve,
    best,
    experts_text,
    gain,
    standard_error,
)
from gpu_catalog.number_text import short
from orchestrator.markdown_table import table
from trials.records.learning import LearnedEpoch
from trials.records.observation import Basis

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class SparseAgainstDense:
    """Two curves that differ in active experts alone, compared at the best epoch of each.

    Attributes:
        sparse, dense: the curves.
        accuracy: accuracy of sparse minus that of dense.
        loss: loss of dense minus that of sparse.
    """

    sparse: LearningCurve
    dense: LearningCurve
    accuracy: Gain
    loss: Gain

    @property
    def is_significant(self) -> bool:
        """Whether the 90 % interval of the accuracy excludes zero."""
        low, high = self.accuracy.interval
        return low > 0 or high < 0


def learning_json(curves: Sequence[LearningCurve]) -> str:
    """JSON of epochs, best epochs and comparisons of curves; losses in nats per token."""
    return json.dumps(
        {
            "curves": [_epoch_row(curve, epoch) for curve in curves for epoch in curve.epochs],
            "stops": [_stop_row(curve) for curve in curves],
            "sparse_against_dense": [_pair_row(pair) for pair in sparse_against_dense(curves)],
            "rule": STOP_RULE,
        }
    )


def _facts(curve: LearningCurve) -> Row:
    recipe, data = curve.cell.recipe.key, curve.data.source
    return {"model": curve.cell.model, "recipe": recipe, "data": data}


def _epoch_row(curve: LearningCurve, epoch: LearnedEpoch) -> Row:
    cell, training = curve.cell, {"learning_rate", "schedule", "batch_size", "seed", "cutoff"}
    routing = {"weights", "gpu", "experts", "active_experts"}
    loss_error = standard_error(epoch.tested, "loss")
    return {
        "curve": curve.key,
        **_facts(curve),
        **cell.model_dump(mode="json", include=routing),
        "sparsity": cell.sparsity,
        "training_examples": curve.data.train_examples,
        "held_out_examples": curve.data.held_out_examples,
        **curve.training.model_dump(mode="json", include=training),
        "epoch": epoch.epoch,
        "train_loss": epoch.train_loss,
        "held_out_loss": epoch.tested.loss,
        "held_out_loss_error": loss_error if math.isfinite(loss_error) else None,
        "accuracy": epoch.tested.accuracy,
        "accuracy_error": standard_error(epoch.tested, "accuracy"),
        "accuracy_kind": curve.data.accuracy,
        "is_best": epoch.epoch == best(curve).epoch,
        "basis": Basis.MEASURED.value,
    }


def _stop_row(curve: LearningCurve) -> Row:
    return {
        "curve": curve.key,
        **_facts(curve),
        "active_experts": curve.cell.active_experts,
        **dataclasses.asdict(best(curve)),
        "patience": curve.training.patience,
        "epochs": curve.epochs[-1].epoch,
        "held_out_loss": curve.best_scores.loss,
        "accuracy": curve.best_scores.accuracy,
    }


def _pair_row(pair: SparseAgainstDense) -> Row:
    sparse, dense = pair.sparse, pair.dense
    row: Row = {"sparse": sparse.key, "dense": dense.key, **_facts(sparse)}
    row["sparse_experts"] = sparse.cell.active_experts
    row["dense_experts"] = dense.cell.active_experts
    for name, improvement in (("accuracy", pair.accuracy), ("loss", pair.loss)):
        row[f"{name}_gain"] = improvement.mean
        row[f"{name}_gain_low"], row[f"{name}_gain_high"] = improvement.interval
    return row | {"significant": pair.is_significant}


def sparse_against_dense(curves: Sequence[LearningCurve]) -> list[SparseAgainstDense]:
    """Pairs of a trained sparse curve and the dense one that differs in nothing else."""
    pairs = []
    for group in _alike([curve for curve in curves if len(curve.epochs) > 1]):
        dense = next((c for c in group if c.cell.active_experts == c.cell.experts), None)
        if dense is None:
            continue
        for sparse in group:
            if sparse is not dense:
                scores = (dense.best_scores, sparse.best_scores)
                accuracy, loss = gain(*scores, "accuracy"), gain(*scores, "loss")
                pairs.append(SparseAgainstDense(sparse, dense, accuracy, loss))
    return pairs


def _alike(curves: Sequence[LearningCurve]) -> list[list[LearningCurve]]:
    """Curves grouped by everything but the number of active experts."""
    groups: dict[object, list[LearningCurve]] = defaultdict(list)
    for curve in curves:
        cell = curve.cell.model_copy(update={"active_experts": None})
        groups[cell, str(curve.training.identity), curve.data.fingerprint].append(curve)
    return list(groups.values())


def learning_section(curves: Sequence[LearningCurve]) -> str:
    """Markdown of curves, their best epochs, and sparse against dense; empty without any."""
    if not curves:
        return ""
    parts = ["## Learning"]
    for group in _alike(curves):
        parts += [_title(group[0]), _curves_table(group)]
        parts.append("\n".join(_stop_text(curve) for curve in group))
        parts += [_verdict(pair) for pair in sparse_against_dense(group)]
    return "\n\n".join([*parts, STOP_RULE])


def _title(curve: LearningCurve) -> str:
    cell, data, training = curve.cell, curve.data, curve.training
    return (
        f"**{cell.model}**, {cell.weights} weights, {cell.recipe.key}, on {cell.gpu}: "
        f"{data.source} ({data.rendering}), {data.train_examples:,} training examples, "
        f"{data.held_out_examples:,} held out; batches of {training.batch_size}, learning rate "
        f"{training.learning_rate:g} {training.schedule}, seed {training.seed}"
    )


def _curves_table(group: Sequence[LearningCurve]) -> str:
    """A row per epoch, with losses and accuracy of each curve."""
    titles = [f"{experts_text(curve.cell)}: train loss" for curve in group]
    headers = ["epoch", *(h for title in titles for h in (title, "held-out loss", "accuracy"))]
    lines = [
        [number, *(text for curve in group for text in _cells(curve, number))]
        for number in range(max(len(curve.epochs) for curve in group))
    ]
    text = table(headers, lines)
    return f"{text}\n\n± one standard error over the held-out examples; * the best epoch."


def _cells(curve: LearningCurve, number: int) -> list[str]:
    """Train loss, held-out loss and accuracy of one epoch."""
    if number >= len(curve.epochs):
        return ["", "", ""]
    epoch = curve.epochs[number]
    error = standard_error(epoch.tested, "loss")
    accuracy_error = standard_error(epoch.tested, "accuracy")
    return [
        "" if epoch.train_loss is None else short(epoch.train_loss, 4),
        short(epoch.tested.loss, 4) + (f" ± {short(error, 2)}" if math.isfinite(error) else ""),
        f"{100 * epoch.tested.accuracy:.1f} ± {100 * accuracy_error:.1f} %"
        + (" *" if number == best(curve).epoch else ""),
    ]


def _stop_text(curve: LearningCurve) -> str:
    """A line on the epoch at which a curve stops improving."""
    stop, scores = best(curve), curve.best_scores
    last, patience = curve.epochs[-1].epoch, curve.training.patience
    active = curve.cell.active_experts
    start = "- " if active is None else f"- {_counted(active)}: "
    if last == 0:
        return f"{start}no epoch has been trained yet."
    if not stop.has_stopped:
        return (
            f"{start}may still improve: the best epoch is {stop.epoch} (by {stop.by}), and only "
            f"{last - stop.epoch} of the next {patience} have been trained. Continue with "
            f"--epochs {2 * max(last, patience)}."
        )
    if stop.epoch == 0:
        return f"{start}no epoch was better than the untrained model."
    return (
        f"{start}stops improving at epoch {stop.epoch} (by {stop.by}; none of the next {patience} "
        f"was better): held-out loss {short(scores.loss, 4)}, accuracy "
        f"{100 * scores.accuracy:.1f} %."
    )


def _counted(experts: int | None) -> str:
    return "1 expert" if experts == 1 else f"{experts} experts"


def _verdict(pair: SparseAgainstDense) -> str:
    low, high = pair.accuracy.interval
    gap = (
        f"{100 * pair.accuracy.mean:+.1f} points of accuracy "
        f"({100 * low:+.1f} to {100 * high:+.1f}, 90 %)"
    )
    verdict = "sparse and dense do not differ significantly on these examples"
    if pair.is_significant:
        word = "better" if pair.accuracy.mean > 0 else "worse"
        verdict = f"sparse training is {word} than dense"
    sparse, dense = pair.sparse.cell.active_experts, pair.dense.cell.active_experts
    return f"{_counted(sparse)} against {dense}: {verdict}: {gap}."
