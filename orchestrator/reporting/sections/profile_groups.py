"""Profiles grouped by cell: shares of a step by stage, layer and kernel."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.reporting.sections.memory_section import outcome_text
from orchestrator.reporting.sections.recommendation import model_name
from trials.records.cell import Cell
from trials.records.profile import (
    LAYERS,
    STAGES,
    ExpertLoad,
    Layer,
    Profile,
    Profiled,
    ProfileRow,
    load_imbalance,
    load_variance,
    tokens_per_example,
)

# The order of Fig. 6, then kernels that it lacks; others follow by name.
KERNELS = (
    "matmul gate", "matmul gate+up", "matmul up", "matmul down", "matmul adapter", "matmul",
    "dequantise", "router", "top-k", "element-wise", "gather/scatter", "copy", "host",
)  # fmt: skip
SMALLEST_SHARE = 0.0005  # rounds to 0.1 %


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar.

    Attributes:
        name: name of the stage, layer or kernel.
        seconds: time in an unprofiled step: the part's profiled share of its stage.
        share: part of the bar's seconds.
        flop_share: part of the bar's floating-point operations (matrix products and attention);
            None for a bar without any.
    """

    name: str
    seconds: float
    share: float
    flop_share: float | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """One profiled batch size.

    Attributes:
        label, cell, batch_size: the profile.
        seconds: time of all parts.
        flops: floating-point operations of matrix products and attention; 0 for stages.
        parts: parts in the order that all bars of a chart share.
    """

    label: str
    cell: Cell
    batch_size: int
    seconds: float
    flops: int
    parts: tuple[BarPart, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens routed to each expert, before and after some training.

    Attributes:
        label, cell, batch_size: the profile.
        training_steps: training steps between the two.
        before, after: (experts,) tokens per example, averaged over the layers.
        variance_before, variance_after: variances of these over the experts.
        imbalance_before, imbalance_after: the busiest expert's tokens over an equal share, the mean
            over the layers; 1 is balanced.
    """

    label: str
    cell: Cell
    batch_size: int
    training_steps: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    variance_before: float
    variance_after: float
    imbalance_before: float
    imbalance_after: float


@dataclass(frozen=True, slots=True)
class LengthRow:
    """A sequence length at its largest profiled batch size.

    Attributes:
        label: active experts, in words.
        seq_len, batch_size: tokens per example, examples per step.
        step_seconds: time of an unprofiled step.
        examples_per_second, tokens_per_second: throughput of unprofiled steps.
        experts_share: the experts' (or the MLPs') part of the forward and backward pass.
    """

    label: str
    seq_len: int
    batch_size: int
    step_seconds: float
    examples_per_second: float
    tokens_per_second: float
    experts_share: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """Overhead of profiling at one batch size, by the shortest step of each kind.

    Attributes:
        step_seconds: time of an unprofiled step.
        profiled_seconds: time of a step under the profiler.
        overhead: slowdown by the profiler, as a part of the unprofiled step.
        stages_over_step: time of a step with timed stages, without the profiler, over that of an
            unprofiled step; 1 if timing the stages costs nothing.
    """

    label: str
    step_seconds: float
    profiled_seconds: float
    overhead: float
    stages_over_step: float


@dataclass(frozen=True, slots=True)
class ProfileGroup:
    """A model under a recipe on a GPU.

    Attributes:
        machine: names of the devices, with their CPU threads.
        stages, layers, inside: bars of Fig. 4, 5 and 6.
        inside_of: layer that ``inside`` splits into kernels: experts, or mlp without experts.
        loads: bars of Fig. 11; empty without experts.
        lengths: effect of the length; empty if only one was profiled.
        overheads: one for each bar.
        failures: lines on profiles that failed, with the reason.
    """

    gpu: str
    model: str
    recipe: str
    machine: str
    stages: tuple[Bar, ...]
    layers: tuple[Bar, ...]
    inside: tuple[Bar, ...]
    inside_of: Layer
    loads: tuple[Load, ...]
    lengths: tuple[LengthRow, ...]
    overheads: tuple[Overhead, ...]
    failures: tuple[str, ...]


def profile_groups(profiled: Iterable[Profiled]) -> list[ProfileGroup]:
    """The profiles of a run, grouped by GPU, model and recipe, in the order profiled."""
    groups: defaultdict[tuple[str, str, str], list[Profiled]] = defaultdict(list)
    for attempt in profiled:
        cell = attempt.cell
        groups[cell.gpu, model_name(cell), cell.recipe.key].append(attempt)
    return [_group(*names, attempts) for names, attempts in groups.items()]


def _group(gpu: str, model: str, recipe: str, attempts: Sequence[Profiled]) -> ProfileGroup:
    ordered = sorted(attempts, key=_sort_key)
    profiles = [(p, p.profile) for p in ordered if p.profile is not None]
    last = {(p.cell, p.batch_size): p for p in ordered}
    inside_of: Layer = "mlp" if attempts[0].cell.experts is None else "experts"
    return ProfileGroup(
        gpu=gpu,
        model=model,
        recipe=recipe,
        machine=_machine(attempts),
        stages=tuple(_stage_bar(*profile) for profile in profiles),
        layers=_bars(profiles, _is_in_layer, lambda row: row.layer, LAYERS),
        inside=_bars(profiles, lambda row: row.layer == inside_of, lambda row: row.kernel, KERNELS),
        inside_of=inside_of,
        loads=tuple(_load(p, profile.load) for p, profile in profiles if profile.load is not None),
        lengths=tuple(_lengths(profiles, inside_of)),
        overheads=tuple(_overhead(*profile) for profile in profiles),
        failures=tuple(
            f"{_label(p)}: {outcome_text(p.outcome)}: {p.detail}"
            for p in last.values()
            if p.profile is None
        ),
    )


def _sort_key(attempt: Profiled) -> tuple[int, int, int, int]:
    cell = attempt.cell
    return (cell.active_experts or 0, cell.seq_len, attempt.batch_size, attempt.attempt)


def _label(attempt: Profiled) -> str:
    cell = attempt.cell
    return f"{_routing(cell)}{cell.seq_len} tokens, batch {attempt.batch_size}"


def _routing(cell: Cell) -> str:
    return "" if cell.experts is None else f"{cell.active_experts} of {cell.experts} experts, "


def _machine(attempts: Sequence[Profiled]) -> str:
    environments = [p.environment for p in attempts if p.environment is not None]
    return "; ".join(
        dict.fromkeys(f"{e.device_name}, CPU threads {e.threads}" for e in environments)
    )


def _stage_bar(attempt: Profiled, profile: Profile) -> Bar:
    seconds = {stage: profile.stage_seconds(stage) for stage in STAGES}
    seconds["backward"] -= seconds["recompute"]
    whole = sum(seconds.values())
    parts = tuple(BarPart(stage, value, value / whole) for stage, value in seconds.items())
    return Bar(_label(attempt), attempt.cell, attempt.batch_size, whole, 0, parts)


def _is_in_layer(row: ProfileRow) -> bool:
    return row.stage != "optimizer"


def _bars(
    profiles: Sequence[tuple[Profiled, Profile]],
    is_included: Callable[[ProfileRow], bool],
    name_of: Callable[[ProfileRow], str],
    order: Sequence[str],
) -> tuple[Bar, ...]:
    """A bar for each profile, all with the same parts: every part that any of them has.

    Args:
        profiles: one for each bar; one without included rows has no bar.
        is_included: whether a row belongs to the chart.
        name_of: name of a row's part.
        order: names of parts that come first.
    """
    rows_of = [[row for row in profile.rows if is_included(row)] for _, profile in profiles]
    present = {name_of(row) for rows in rows_of for row in rows}
    names = [*(name for name in order if name in present), *sorted(present - set(order))]
    return tuple(
        _bar(*profile, names, [(name_of(row), row) for row in rows])
        for profile, rows in zip(profiles, rows_of, strict=True)
        if rows
    )


def _bar(
    attempt: Profiled,
    profile: Profile,
    names: Sequence[str],
    rows: Sequence[tuple[str, ProfileRow]],
) -> Bar:
    seconds, flops = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for name, row in rows:
        seconds[name] += profile.unprofiled_seconds(row)
        flops[name] += row.flops
    whole, all_flops = sum(seconds.values()), sum(flops.values())
    parts = tuple(
        BarPart(
            name,
            seconds[name],
            seconds[name] / whole if whole else 0.0,
            flops[name] / all_flops if all_flops else None,
        )
        for name in names
    )
    return Bar(_label(attempt), attempt.cell, attempt.batch_size, whole, all_flops, parts)


def _load(attempt: Profiled, load: ExpertLoad) -> Load:
    return Load(
        label=_label(attempt),
        cell=attempt.cell,
        batch_size=attempt.batch_size,
        training_steps=load.training_steps,
        before=tuple(tokens_per_example(load.before, load.examples)),
        after=tuple(tokens_per_example(load.after, load.examples)),
        variance_before=load_variance(load.before, load.examples),
        variance_after=load_variance(load.after, load.examples),
        imbalance_before=load_imbalance(load.before),
        imbalance_after=load_imbalance(load.after),
    )


def _lengths(profiles: Sequence[tuple[Profiled, Profile]], inside_of: Layer) -> Iterable[LengthRow]:
    # Profiles are sorted by batch size, so the last one of a cell is its largest.
    largest = {attempt.cell: (attempt.batch_size, profile) for attempt, profile in profiles}
    if len({cell.seq_len for cell in largest}) < 2:
        return
    for cell, (batch_size, profile) in largest.items():
        passes = [row for row in profile.rows if _is_in_layer(row)]
        inside = [row for row in passes if row.layer == inside_of]
        seconds, inside_seconds = (
            sum(map(profile.unprofiled_seconds, rows)) for rows in (passes, inside)
        )
        step = profile.step_seconds
        yield LengthRow(
            label=_routing(cell).removesuffix(", "),
            seq_len=cell.seq_len,
            batch_size=batch_size,
            step_seconds=step,
            examples_per_second=batch_size / step,
            tokens_per_second=batch_size * cell.recipe.sequences * cell.seq_len / step,
            experts_share=inside_seconds / seconds,
        )


def _overhead(attempt: Profiled, profile: Profile) -> Overhead:
    stages = (profile.forward_seconds, profile.backward_seconds, profile.optimizer_seconds)
    plain = min(profile.plain_seconds)
    return Overhead(
        label=_label(attempt),
        step_seconds=plain,
        profiled_seconds=min(profile.profiled_seconds),
        overhead=profile.overhead,
        stages_over_step=min(map(sum, zip(*stages, strict=True))) / plain,
    )
