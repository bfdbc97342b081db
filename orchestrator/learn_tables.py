"""What was learnt as plain rows, for tables and charts; and as tables for the terminal. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from gpu_catalog.record import Record
from orchestrator.learned import STOP_RULE, Curve, best, gain, standard_error
from orchestrator.tables import table
from trials.observation import Basis
from trials.workload import Cell, Weights


class CurveRow(Record):
    """One epoch of one curve.

    Attributes:
        curve: key of the curve: rows with the same one belong together.
        model, weights, recipe, gpu: what was fine-tuned, and where.
        experts, active_experts, sparsity: its routing; sparsity is 1.0 without experts.
        data: the data set.
        training_queries, held_out_queries: of it.
        learning_rate, schedule, batch_size, seed, cutoff: how it was trained.
        epoch: 0 before any training.
        train_loss: nats a token of the answers, as each step met them; absent of epoch 0.
        held_out_loss, held_out_loss_error: after the epoch, and its standard error over queries.
        accuracy, accuracy_error: part of the held-out answers that are right, alike.
        accuracy_kind: by choices, or exact.
        is_best: whether the curve stops improving here.
        basis: measured, always.
    """

    curve: str
    model: str
    weights: Weights
    recipe: str
    gpu: str
    experts: int | None
    active_experts: int | None
    sparsity: float
    data: str
    training_queries: int
    held_out_queries: int
    learning_rate: float
    schedule: str
    batch_size: int
    seed: int
    cutoff: int
    epoch: int
    train_loss: float | None
    held_out_loss: float
    held_out_loss_error: float | None
    accuracy: float
    accuracy_error: float
    accuracy_kind: Literal["choices", "exact"]
    is_best: bool
    basis: Basis = Basis.MEASURED


class BestRow(Record):
    """Where one curve stops improving.

    Attributes:
        curve: its key.
        model, recipe, active_experts, data: of what.
        epoch: the best one; 0 where none was better than the untrained model.
        by: the score that said so.
        has_stopped: false while the last epochs may still be improving.
        patience: epochs after the best one that none of may be better.
        epochs: how many were learnt.
        held_out_loss, accuracy: at the best one.
    """

    curve: str
    model: str
    recipe: str
    active_experts: int | None
    data: str
    epoch: int
    by: Literal["accuracy", "loss"]
    has_stopped: bool
    patience: int
    epochs: int
    held_out_loss: float
    accuracy: float


class SparseAgainstDense(Record):
    """Two curves that differ in how many experts are active, each at its best epoch.

    Attributes:
        sparse, dense: keys of the curves.
        model, recipe, data: of what.
        sparse_experts, dense_experts: active ones.
        accuracy_gain, accuracy_gain_low, accuracy_gain_high: accuracy of sparse less that of dense,
            with its 90 % interval, query by query.
        loss_gain, loss_gain_low, loss_gain_high: held-out loss of dense less that of sparse, alike.
        told_apart: whether the interval of the accuracy leaves zero out.
    """

    sparse: str
    dense: str
    model: str
    recipe: str
    data: str
    sparse_experts: int
    dense_experts: int
    accuracy_gain: float
    accuracy_gain_low: float
    accuracy_gain_high: float
    loss_gain: float
    loss_gain_low: float
    loss_gain_high: float
    told_apart: bool


def curve_rows(curves: Sequence[Curve]) -> list[CurveRow]:
    """A row for each epoch of each curve."""
    return [row for curve in curves for row in _rows(curve)]


def _rows(curve: Curve) -> list[CurveRow]:
    cell, data, training, found = curve.cell, curve.data, curve.training, best(curve)
    return [
        CurveRow(
            curve=curve.key,
            model=cell.model,
            weights=cell.weights,
            recipe=cell.recipe.key,
            gpu=cell.gpu,
            experts=cell.experts,
            active_experts=cell.active_experts,
            sparsity=cell.sparsity,
            data=data.source,
            training_queries=data.train_queries,
            held_out_queries=data.held_out_queries,
            learning_rate=training.learning_rate,
            schedule=training.schedule,
            batch_size=training.batch_size,
            seed=training.seed,
            cutoff=training.cutoff,
            epoch=each.epoch,
            train_loss=each.train_loss,
            held_out_loss=each.tested.loss,
            held_out_loss_error=_finite(standard_error(each.tested, "loss")),
            accuracy=each.tested.accuracy,
            accuracy_error=standard_error(each.tested, "accuracy"),
            accuracy_kind=data.accuracy,
            is_best=each.epoch == found.epoch,
        )
        for each in curve.epochs
    ]


def _finite(error: float) -> float | None:
    """An error that is known: one query tells none."""
    return error if error < float("inf") else None


def best_rows(curves: Sequence[Curve]) -> list[BestRow]:
    """Where each curve stops improving."""
    rows = []
    for curve in curves:
        found = best(curve)
        tested = curve.epochs[found.epoch].tested
        rows.append(
            BestRow(
                curve=curve.key,
                model=curve.cell.model,
                recipe=curve.cell.recipe.key,
                active_experts=curve.cell.active_experts,
                data=curve.data.source,
                epoch=found.epoch,
                by=found.by,
                has_stopped=found.has_stopped,
                patience=curve.training.patience,
                epochs=curve.epochs[-1].epoch,
                held_out_loss=tested.loss,
                accuracy=tested.accuracy,
            )
        )
    return rows


def sparse_against_dense(curves: Sequence[Curve]) -> list[SparseAgainstDense]:
    """Each sparse curve beside the one that has all experts active and all else alike."""
    rows = []
    for group in _alike(curves):
        whole = next((c for c in group if c.cell.active_experts == c.cell.experts), None)
        if whole is None or whole.cell.experts is None:
            continue
        trained = [c for c in group if len(c.epochs) > 1 and c is not whole]
        if len(whole.epochs) > 1:
            rows += [_against(curve, whole) for curve in trained]
    return rows


def _against(sparse: Curve, dense: Curve) -> SparseAgainstDense:
    assert sparse.cell.active_experts is not None
    assert dense.cell.active_experts is not None
    ours, theirs = (curve.epochs[best(curve).epoch].tested for curve in (sparse, dense))
    accuracy, loss = (gain(theirs, ours, by) for by in ("accuracy", "loss"))
    low, high = accuracy.interval
    return SparseAgainstDense(
        sparse=sparse.key,
        dense=dense.key,
        model=sparse.cell.model,
        recipe=sparse.cell.recipe.key,
        data=sparse.data.source,
        sparse_experts=sparse.cell.active_experts,
        dense_experts=dense.cell.active_experts,
        accuracy_gain=accuracy.mean,
        accuracy_gain_low=low,
        accuracy_gain_high=high,
        loss_gain=loss.mean,
        loss_gain_low=loss.interval[0],
        loss_gain_high=loss.interval[1],
        told_apart=low > 0 or high < 0,
    )


def _alike(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Curves that differ in nothing but how many experts are active."""
    groups: dict[object, list[Curve]] = defaultdict(list)
    for curve in curves:
        cell = curve.cell.model_copy(update={"active_experts": None})
        same = (cell, str(curve.training.identity), curve.data.fingerprint)
        groups[same].append(curve)
    return list(groups.values())


def learning_section(curves: Sequence[Curve]) -> str:
    """Curves in tables, where each stops, and how sparse does beside dense; empty without any."""
    if not curves:
        return ""
    parts = ["## Learning"]
    for group in _alike(curves):
        parts += [_title(group[0]), _curves_table(group)]
        parts.append("\n".join(_told(row) for row in best_rows(group)))
        parts += [_verdict(row) for row in sparse_against_dense(group)]
    return "\n\n".join([*parts, STOP_RULE])


def _title(curve: Curve) -> str:
    cell, data, training = curve.cell, curve.data, curve.training
    weights = "random weights" if cell.weights == "random" else "pretrained weights"
    return (
        f"**{cell.model}**, {weights}, {cell.recipe.key}, on {cell.gpu}: {data.source} "
        f"({data.made_by}), {data.train_queries:,} queries learnt from, "
        f"{data.held_out_queries:,} held out; batches of {training.batch_size}, learning rate "
        f"{training.learning_rate:g} {training.schedule}, seed {training.seed}"
    )


def _curves_table(group: Sequence[Curve]) -> str:
    """A row an epoch, and for each curve its losses and accuracy."""
    headers = ["epoch"]
    for curve in group:
        name = experts_text(curve.cell)
        headers += [f"{name}: train loss", "held-out loss", "accuracy"]
    by_epoch = [{row.epoch: row for row in _rows(curve)} for curve in group]
    lines = []
    for epoch in range(max(len(rows) for rows in by_epoch)):
        line: list[object] = [epoch]
        for rows in by_epoch:
            line += _cells(rows.get(epoch))
        lines.append(line)
    text = table(headers, lines)
    return f"{text}\n\n± one standard error over the held-out queries; * where it stops improving."


def _cells(row: CurveRow | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    star = " *" if row.is_best else ""
    train = "" if row.train_loss is None else f"{row.train_loss:.4g}"
    loss_error = "" if row.held_out_loss_error is None else f" ± {row.held_out_loss_error:.2g}"
    return [
        train,
        f"{row.held_out_loss:.4g}{loss_error}",
        f"{100 * row.accuracy:.1f} ± {100 * row.accuracy_error:.1f} %{star}",
    ]


def experts_text(cell: Cell) -> str:
    """How many experts are active, in words."""
    if cell.experts is None:
        return "no experts"
    kind = "dense" if cell.active_experts == cell.experts else "sparse"
    return f"{kind}, {cell.active_experts} of {cell.experts}"


def _told(row: BestRow) -> str:
    experts = "" if row.active_experts is None else f"{_counted(row.active_experts)}: "
    if row.epochs == 0:
        return f"- {experts}nothing was learnt yet."
    if row.epoch == 0 and row.has_stopped:
        return f"- {experts}no epoch was better than the untrained model."
    if not row.has_stopped:
        return (
            f"- {experts}may be improving still: of the {row.patience} epochs after the best one "
            f"so far, {row.epoch} (by {row.by}), {row.epochs - row.epoch} are known; "
            f"--epochs {2 * max(row.epochs, row.patience)} learns on."
        )
    return (
        f"- {experts}stops improving at epoch {row.epoch} (by {row.by}; none of the {row.patience} "
        f"after it was better): held-out loss {row.held_out_loss:.4g}, accuracy "
        f"{100 * row.accuracy:.1f} %."
    )


def _counted(experts: int) -> str:
    return "1 expert" if experts == 1 else f"{experts} experts"


def _verdict(row: SparseAgainstDense) -> str:
    gap = (
        f"{100 * row.accuracy_gain:+.1f} points of accuracy "
        f"({100 * row.accuracy_gain_low:+.1f} to {100 * row.accuracy_gain_high:+.1f}, 90 %)"
    )
    if row.told_apart:
        word = "better" if row.accuracy_gain > 0 else "worse"
        said = f"sparse learns {word} than dense"
    else:
        said = "sparse learns as well as dense, as far as these queries tell"
    return f"{_counted(row.sparse_experts)} against {row.dense_experts}: {said}: {gap}."
