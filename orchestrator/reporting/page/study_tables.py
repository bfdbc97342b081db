"""Tables of profiles, training curves and prices behind the charts of a page. Pure."""

from collections.abc import Callable, Sequence
from pathlib import PurePath

from fitting.learning_curves import LearningCurve, experts_text
from orchestrator.reporting.page.run_tables import Named, PageTable, chart_names
from orchestrator.reporting.sections.profile_groups import ProfileGroup, profile_groups
from orchestrator.reporting.sections.recommendation import model_name
from orchestrator.run_folder.run_results import RunResults

CHARTS = ("stages", "layers", "inside")


def profiles_table(results: RunResults) -> PageTable:
    """A row for each part of each bar: a stage, a layer or a kernel."""
    groups = profile_groups(results.profiled)
    names = _bar_names(groups)
    rows = [
        (
            *(*_key(group), chart, names[*_key(group), bar.label], bar.label, bar.batch_size),
            *(part.name, part.seconds, part.share, part.flop_share),
        )
        for group in groups
        for chart in CHARTS
        for bar in getattr(group, chart)
        for part in bar.parts
    ]
    columns = (
        *("gpu", "model", "recipe", "chart", "name", "bar", "batch", "part", "seconds", "share"),
        "flops",
    )
    return PageTable(columns, rows)


def loads_table(results: RunResults) -> PageTable:
    """Tokens per example of each expert, before and after some training."""
    groups = profile_groups(results.profiled)
    names = _bar_names(groups)
    rows = [
        (*_key(group), names[*_key(group), load.label], load.label, number, when, tokens)
        for group in groups
        for load in group.loads
        for when, per_expert in (("before", load.before), ("after", load.after))
        for number, tokens in enumerate(per_expert)
    ]
    columns = ("gpu", "model", "recipe", "name", "bar", "expert", "when", "tokens")
    return PageTable(columns, rows)


def _key(group: ProfileGroup) -> tuple[str, str, str]:
    return group.gpu, group.model, group.recipe


def _bar_names(groups: Sequence[ProfileGroup]) -> dict[tuple[str, str, str, str], str]:
    """Name of each profile, by its GPU, model, recipe and label."""
    keys = [(*_key(group), bar.label) for group in groups for bar in group.stages]
    named = [Named(gpu, model, recipe, f"{model} · {bar}") for gpu, model, recipe, bar in keys]
    return dict(zip(keys, chart_names(named), strict=True))


def learning_table(results: RunResults) -> PageTable:
    """A row for each epoch of each curve; epoch 0 is the untrained model."""
    rows = [
        (
            *(curve.key, name, curve.cell.gpu, curve.cell.recipe.key, curve.data.source),
            *(curve.training.learning_rate, curve.training.batch_size, curve.training.seed),
            *(epoch.epoch, epoch.train_loss, epoch.tested.loss, epoch.tested.accuracy),
        )
        for curve, name in zip(results.learned, curve_names(results.learned), strict=True)
        for epoch in curve.epochs
    ]
    columns = (
        *("curve", "name", "gpu", "recipe", "data", "rate", "batch", "seed", "epoch"),
        *("train_loss", "loss", "accuracy"),
    )
    return PageTable(columns, rows)


# Settings that may differ between curves of one model, beside recipe and GPU.
SETTINGS: tuple[Callable[[LearningCurve], str], ...] = (
    lambda curve: PurePath(curve.data.source).name,
    lambda curve: f"learning rate {curve.training.learning_rate:g}",
    lambda curve: curve.training.schedule,
    lambda curve: f"warm-up of {curve.training.warmup_steps}",
    lambda curve: f"batch size {curve.training.batch_size}",
    lambda curve: f"cutoff {curve.training.cutoff}",
    lambda curve: f"seed {curve.training.seed}",
)


def curve_names(curves: Sequence[LearningCurve]) -> list[str]:
    """Names of curves: model, routing and the settings that differ between curves."""
    varying = [setting for setting in SETTINGS if len({setting(curve) for curve in curves}) > 1]
    return chart_names(
        [
            Named(
                curve.cell.gpu,
                curve.cell.model,
                curve.cell.recipe.key,
                ", ".join([_subject(curve), *(setting(curve) for setting in varying)]),
            )
            for curve in curves
        ]
    )


def _subject(curve: LearningCurve) -> str:
    cell = curve.cell
    model = model_name(cell)
    return model if cell.experts is None else f"{model}, {experts_text(cell)}"


def prices_table(results: RunResults) -> PageTable:
    """A row for each snapshot of the price of a GPU in a market; empty where there is only one."""
    rows = [
        (course.gpu, course.market, date.isoformat(), usd)
        for course in results.price_courses
        for date, usd in course.points
    ]
    several = len({date for _, _, date, _ in rows}) > 1
    return PageTable(("gpu", "market", "date", "usd"), rows if several else [])
