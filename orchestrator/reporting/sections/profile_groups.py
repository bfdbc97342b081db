"""Profiles grouped by cell: shares of a step by stage, layer and kernel."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trials.records.cell import Cell
from trials.records.profile import (
    LAYERS,
    STAGES,
    Layer,
    Profile,
    Profiled,
    ProfileRow,
    load_imbalance,
    load_variance,
    tokens_per_example,
)

# The order of Fig. 6, and then what it has not; others follow by their names.
KERNELS = (
    "matmul gate", "matmul gate+up", "matmul up", "matmul down", "matmul adapter", "matmul",
    "dequantise", "router", "top-k", "element-wise", "gather/scatter", "copy", "host",
)  # fmt: skip
SMALLEST_SHARE = 0.0005  # shown as 0.1 %


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar.

    Attributes:
        name: of the stage, layer or kernel.
        seconds: in a step that is not profiled: its profiled share of its stage.
        share: of the bar's seconds.
        flop_share: of the bar's floating-point operations, those of products and attention; absent
            for a bar without any.
    """

    name: str
    seconds: float
    share: float
    flop_share: float | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """One profiled batch size.

    Attributes:
        label, cell, batch_size: which.
        seconds: of all parts.
        flops: floating-point operations of products and attention; 0 for stages.
        parts: in an order that all bars of a chart share.
    """

    label: str
    cell: Cell
    batch_size: int
    seconds: float
    flops: int
    parts: tuple[BarPart, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of each expert, before and after some training.

    Attributes:
        label, cell, batch_size: whose.
        training_steps: between the two.
        before, after: (experts,) tokens an example, the mean over the layers.
        variance_before, variance_after: theirs over the experts.
        imbalance_before, imbalance_after: the busiest expert's tokens over an equal share, the mean
            over the layers: 1 is balanced.
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
    """A length at the largest batch that was profiled of it.

    Attributes:
        label: sparsity.
        seq_len, batch_size: tokens an example, examples a step.
        step_seconds: of a plain step.
        examples_per_second, tokens_per_second: of plain steps.
        experts_share: of the forward and backward pass, the experts' or the MLPs'.
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
    """What profiling one batch size added to its steps, by the shortest of each kind.

    Attributes:
        label: of its bars.
        step_seconds: of a plain step.
        profiled_seconds: of one under the profiler.
        overhead: how much longer that is, as a part of the plain one.
        stages_over_step: one whose stages were timed, without the profiler, over the plain one: 1
            where timing them takes nothing.
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
        gpu, model, recipe: which.
        machine: what ran it.
        stages, layers, inside: bars of Fig. 4, 5 and 6.
        inside_of: whose kernels ``inside`` has: experts, or mlp of a model without.
        loads: bars of Fig. 11; none without experts.
        lengths: sensitivity to the length; none where one was profiled alone.
        overheads: one for each bar.
        failures: what could not be profiled and why, a line each.
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


@dataclass(frozen=True, slots=True)
class _Of:
    """A profile with its names."""

    label: str
    cell: Cell
    batch_size: int
    profile: Profile


def profile_groups(profiled: Iterable[Profiled]) -> list[ProfileGroup]:
    """A run's profiles, in the order of their models."""
    groups: defaultdict[tuple[str, str, str], list[Profiled]] = defaultdict(list)
    for each in profiled:
        weights = "" if each.cell.weights == "random" else f", {each.cell.weights}"
        groups[each.cell.gpu, each.cell.model + weights, each.cell.recipe.key].append(each)
    return [_group(*names, of) for names, of in groups.items()]


def _group(gpu: str, model: str, recipe: str, tries: Sequence[Profiled]) -> ProfileGroup:
    ordered = sorted(tries, key=_place)
    found = [
        _Of(_label(p.cell, p.batch_size), p.cell, p.batch_size, p.profile)
        for p in ordered
        if p.profile is not None
    ]
    last = {(p.cell, p.batch_size): p for p in ordered}
    inside_of: Layer = "mlp" if tries[0].cell.experts is None else "experts"
    return ProfileGroup(
        gpu=gpu,
        model=model,
        recipe=recipe,
        machine=_machine(tries),
        stages=tuple(map(_stage_bar, found)),
        layers=_bars(found, _is_of_layers, lambda row: row.layer, LAYERS),
        inside=_bars(found, lambda row: row.layer == inside_of, lambda row: row.kernel, KERNELS),
        inside_of=inside_of,
        loads=tuple(load for of in found for load in _load(of)),
        lengths=tuple(_lengths(found, inside_of)),
        overheads=tuple(map(_overhead, found)),
        failures=tuple(
            f"{_label(p.cell, p.batch_size)}: {p.outcome}: {p.detail}"
            for p in last.values()
            if p.profile is None
        ),
    )


def _place(each: Profiled) -> tuple[int, int, int, int]:
    cell = each.cell
    return (cell.active_experts or 0, cell.seq_len, each.batch_size, each.attempt)


def _label(cell: Cell, batch_size: int) -> str:
    return f"{_routing(cell)}{cell.seq_len} tokens, batch {batch_size}"


def _routing(cell: Cell) -> str:
    return "" if cell.experts is None else f"{cell.active_experts} of {cell.experts} experts, "


def _machine(tries: Sequence[Profiled]) -> str:
    where = [p.environment for p in tries if p.environment is not None]
    return "; ".join(dict.fromkeys(f"{e.device_name}, CPU threads {e.threads}" for e in where))


def _stage_bar(of: _Of) -> Bar:
    profile = of.profile
    seconds = {stage: profile.stage_seconds(stage) for stage in STAGES}
    seconds["backward"] -= seconds["recompute"]
    whole = sum(seconds.values())
    parts = tuple(BarPart(stage, value, value / whole) for stage, value in seconds.items())
    return Bar(of.label, of.cell, of.batch_size, whole, 0, parts)


def _is_of_layers(row: ProfileRow) -> bool:
    return row.stage != "optimizer"


def _bars(
    found: Sequence[_Of],
    is_meant: Callable[[ProfileRow], bool],
    name_of: Callable[[ProfileRow], str],
    order: Sequence[str],
) -> tuple[Bar, ...]:
    """A bar for each profile; all have the same parts, those that any of them has."""
    rows = [[row for row in of.profile.rows if is_meant(row)] for of in found]
    there = {name_of(row) for of in rows for row in of}
    names = [*(name for name in order if name in there), *sorted(there - set(order))]
    return tuple(
        _bar(of, names, [(name_of(row), row) for row in own])
        for of, own in zip(found, rows, strict=True)
        if own
    )


def _bar(of: _Of, names: Sequence[str], rows: Sequence[tuple[str, ProfileRow]]) -> Bar:
    seconds, flops = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for name, row in rows:
        seconds[name] += of.profile.unprofiled_seconds(row)
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
    return Bar(of.label, of.cell, of.batch_size, whole, all_flops, parts)


def _load(of: _Of) -> Iterable[Load]:
    load = of.profile.load
    if load is None:
        return
    yield Load(
        label=of.label,
        cell=of.cell,
        batch_size=of.batch_size,
        training_steps=load.training_steps,
        before=tuple(tokens_per_example(load.before, load.examples)),
        after=tuple(tokens_per_example(load.after, load.examples)),
        variance_before=load_variance(load.before, load.examples),
        variance_after=load_variance(load.after, load.examples),
        imbalance_before=load_imbalance(load.before),
        imbalance_after=load_imbalance(load.after),
    )


def _lengths(found: Sequence[_Of], inside_of: Layer) -> Iterable[LengthRow]:
    largest: dict[Cell, _Of] = {}
    for of in found:  # in the order of their batch sizes
        largest[of.cell] = of
    if len({cell.seq_len for cell in largest}) < 2:
        return
    for of in largest.values():
        passes = [row for row in of.profile.rows if _is_of_layers(row)]
        seconds = sum(map(of.profile.unprofiled_seconds, passes))
        inside = [row for row in passes if row.layer == inside_of]
        step = of.profile.step_seconds
        yield LengthRow(
            label=_routing(of.cell).removesuffix(", "),
            seq_len=of.cell.seq_len,
            batch_size=of.batch_size,
            step_seconds=step,
            examples_per_second=of.batch_size / step,
            tokens_per_second=of.batch_size * of.cell.seq_len / step,
            experts_share=sum(map(of.profile.unprofiled_seconds, inside)) / seconds,
        )


def _overhead(of: _Of) -> Overhead:
    profile = of.profile
    stages = zip(
        profile.forward_seconds, profile.backward_seconds, profile.optimizer_seconds, strict=True
    )
    return Overhead(
        label=of.label,
        step_seconds=min(profile.plain_seconds),
        profiled_seconds=min(profile.profiled_seconds),
        overhead=profile.overhead,
        stages_over_step=min(map(sum, stages)) / min(profile.plain_seconds),
    )
