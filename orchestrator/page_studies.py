"""Profiles and curves of learning, as tables that a page draws. Pure."""

from orchestrator.answers import subject
from orchestrator.page_tables import PageTable
from orchestrator.profile_tables import profile_groups
from orchestrator.run_results import RunResults

PARTS = ("stages", "layers", "inside")


def profiles_table(results: RunResults) -> PageTable:
    """A row for each part of each bar: a stage, a layer, a kernel inside the experts."""
    rows = [
        (
            group.gpu,
            group.model,
            group.recipe,
            of,
            bar.label,
            bar.batch_size,
            part.name,
            part.seconds,
            part.share,
            part.flop_share,
        )
        for group in profile_groups(results.profiled)
        for of in PARTS
        for bar in getattr(group, of)
        for part in bar.parts
    ]
    columns = ("gpu", "model", "recipe", "of", "bar", "batch", "part", "seconds", "share", "flops")
    return PageTable(columns, rows)


def loads_table(results: RunResults) -> PageTable:
    """A row for each expert, before and after some training: its tokens of a query."""
    rows = [
        (group.gpu, group.model, load.label, number, when, tokens)
        for group in profile_groups(results.profiled)
        for load in group.loads
        for when, told in (("before", load.before), ("after", load.after))
        for number, tokens in enumerate(told)
    ]
    return PageTable(("gpu", "model", "bar", "expert", "when", "tokens"), rows)


def learning_table(results: RunResults) -> PageTable:
    """A row for each epoch of each curve, 0 before any training."""
    rows = [
        (
            subject(curve.cell),
            curve.cell.gpu,
            curve.cell.recipe.key,
            curve.data.source,
            epoch.epoch,
            epoch.train_loss,
            epoch.tested.loss,
            epoch.tested.accuracy,
        )
        for curve in results.learnt
        for epoch in curve.epochs
    ]
    columns = ("curve", "gpu", "recipe", "data", "epoch", "train_loss", "loss", "accuracy")
    return PageTable(columns, rows)
