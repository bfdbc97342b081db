"""Comparison of two runs: throughput, largest batch sizes and recommendations. Pure.

Cells match when they have the same GPU, model, weights, recipe, sparsity and length. One may be
simulated and the other measured: every number shows its basis. Of the others, two whose recipes
differ in one field stand side by side too, with that field named.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fitting.families.cell_step_time import CellStepTime
from gpu_catalog.number_text import short
from orchestrator.markdown_table import table
from orchestrator.ranking.ranked_offer import RankedOffer, comparable
from orchestrator.reporting.notes.run_differences import run_differences
from orchestrator.reporting.page.run_tables import Named, PageTable, chart_names
from orchestrator.reporting.sections.recommendation import (
    Recommendation,
    job_title,
    offer_text,
    price_text,
    recommendations,
)
from orchestrator.run_folder.run_results import RunResults
from orchestrator.spec.recipe_options import FILLED_IN
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.observation import Basis, largest_batch

SPEEDS = "Examples per second"
MOST_ALONE = 10  # lines of cells that only one run has; more are counted
TOO_CLOSE = "too close to call"  # of two values whose difference may be none
SAME = 0.0005  # smaller changes are shown as +0.0 %
ANOTHER_HOUR = (
    "Intervals cover the scatter of steps within one run. A machine that was busier or hotter in "
    "one run also shows as a difference: measure both again before you rely on it."
)


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """The throughput of one cell at the largest batch size that both runs timed.

    Attributes:
        cell: as the first run has it.
        batch_size: examples per step.
        before, after: examples per second in the first and the second run.
        bases: basis of each of the two values.
        ratio: after / before.
        low, high: 90 % interval of the ratio; absent for two simulations, which share their error.
        other: recipe of the cell in the second run.
    """

    cell: Cell
    batch_size: int
    before: float
    after: float
    bases: tuple[Basis, Basis]
    ratio: float
    low: float | None
    high: float | None
    other: Recipe

    @property
    def recipe(self) -> str:
        """Key of the recipe, with the field in which the second run's differs."""
        return _recipe_text(self.cell.recipe, self.other)

    @property
    def verdict(self) -> str:
        """Whether the difference is larger than its interval."""
        if self.low is None or self.high is None:
            if abs(self.ratio - 1) < SAME:
                return "same, both simulated"
            return f"{'faster' if self.ratio > 1 else 'slower'}, both simulated"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else TOO_CLOSE

    @property
    def change(self) -> str:
        """Relative change in percent, with its interval where there is one."""
        change = _more(self.ratio)
        if self.low is None or self.high is None:
            return change
        return f"{change} ({_more(self.low)} to {_more(self.high)})"


@dataclass(frozen=True, slots=True)
class LargestChange:
    """Largest batch size of one cell in both runs.

    Attributes:
        cell: as the first run has it.
        before, after: examples in the largest batch of the first and the second run.
        bases: basis of each of the two values.
        other: recipe of the cell in the second run.
    """

    cell: Cell
    before: int
    after: int
    bases: tuple[Basis, Basis]
    other: Recipe


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two runs.

    Attributes:
        names: names of the two runs.
        differing: fields of the specification and versions of packages that differ: the name, its
            value in the first run, its value in the second.
        speeds: throughput of the cells that both runs timed at one batch size.
        largest: largest batch sizes of the cells where both runs have one.
        choices: recommendations for the jobs that both runs rank.
        unmatched: cells that only the first run has, and cells that only the second has.
    """

    names: tuple[str, str]
    differing: list[tuple[str, str, str]]
    speeds: list[SpeedChange]
    largest: list[LargestChange]
    choices: list[tuple[Recommendation, Recommendation]]
    unmatched: tuple[list[Cell], list[Cell]]

    @property
    def has_one_job(self) -> bool:
        """Whether both runs price the same examples and epochs."""
        return not any(name.startswith("workload.") for name, *_ in self.differing)


def compare(before: RunResults, after: RunResults, names: tuple[str, str]) -> Comparison:
    """Compare two runs."""
    first = {_identity(cell): cell for cell in before.cells}
    second = {_identity(cell): cell for cell in after.cells}
    pairs = [(cell, second[identity]) for identity, cell in first.items() if identity in second]
    alone = [cell for identity, cell in first.items() if identity not in second]
    alone_after = [cell for identity, cell in second.items() if identity not in first]
    pairs += _pairs_but_for_a_field(alone, alone_after)
    matched = {cell for pair in pairs for cell in pair}
    return Comparison(
        names=names,
        differing=run_differences(before, after),
        speeds=list(_speeds(before, after, pairs)),
        largest=list(_largest_changes(before, after, pairs)),
        choices=list(_choices(before, after, pairs)),
        unmatched=(
            [cell for cell in alone if cell not in matched],
            [cell for cell in alone_after if cell not in matched],
        ),
    )


def _pairs_but_for_a_field(
    before: Sequence[Cell], after: Sequence[Cell]
) -> Iterator[tuple[Cell, Cell]]:
    """Cells whose recipes differ in one field, where each has no other such partner."""
    partners = [
        (cell, other)
        for cell in before
        for other in after
        if _setting(cell) == _setting(other) and _field(cell.recipe, other.recipe)
    ]
    first, second = (Counter(pair[side] for pair in partners) for side in (0, 1))
    return (pair for pair in partners if first[pair[0]] == 1 == second[pair[1]])


def _setting(cell: Cell) -> tuple[object, ...]:
    routing = cell.active_experts, cell.seq_len
    return (cell.gpu, cell.capped_on, cell.model, cell.weights, *routing, cell.parallel)


def _field(before: Recipe, after: Recipe) -> list[str]:
    """The one field in which two recipes differ, as text; empty for none and for several.

    Fields that follow from it do not count: those that only one method has or fills in, and a
    ``lora_alpha`` that grows with the rank.
    """
    other = dict(after)
    changed = {name: (value, other[name]) for name, value in before if value != other[name]}
    if "method" in changed:
        follow = FILLED_IN.union(name for name, values in changed.items() if None in values)
    elif {"lora_rank", "lora_alpha"} <= changed.keys():
        (rank, rank_after), (alpha, alpha_after) = changed["lora_rank"], changed["lora_alpha"]
        follow = frozenset({"lora_alpha"} if alpha * rank_after == alpha_after * rank else ())
    else:
        follow = frozenset()
    if len(changed.keys() - follow) != 1:
        return []
    (name,) = changed.keys() - follow
    return [f"({name}: {changed[name][0]} → {changed[name][1]})"]


def _largest_changes(
    before: RunResults, after: RunResults, pairs: Sequence[tuple[Cell, Cell]]
) -> Iterator[LargestChange]:
    for cell, other in pairs:
        observations = before.observations_of(cell), after.observations_of(other)
        first, second = map(largest_batch, observations)
        if first is not None and second is not None:
            # All observations of a cell have one basis.
            bases = observations[0][0].basis, observations[1][0].basis
            yield LargestChange(cell, first[0], second[0], bases, other.recipe)


def _choices(
    before: RunResults, after: RunResults, pairs: Sequence[tuple[Cell, Cell]]
) -> Iterator[tuple[Recommendation, Recommendation]]:
    """Yield the recommendations of both runs for each job that both rank, or a paired one."""
    second = {comparable(r.best.cell): r for r in recommendations(after.ranking)}
    paired = {comparable(cell): comparable(other) for cell, other in pairs}
    for first in recommendations(before.ranking):
        job = comparable(first.best.cell)
        other = job if job in second else paired.get(job)
        if other in second:
            yield first, second[other]


def _identity(cell: Cell) -> tuple[object, ...]:
    return (cell.gpu, cell.capped_on, cell.parallel, *comparable(cell))


def _speeds(
    before: RunResults, after: RunResults, pairs: Sequence[tuple[Cell, Cell]]
) -> Iterator[SpeedChange]:
    for cell, other in pairs:
        first, second = _latest(before, cell), _latest(after, other)
        shared = first.keys() & second.keys()
        if shared:
            size = max(shared)
            yield _speed_change(cell, other.recipe, size, first[size], second[size])


def _speed_change(
    cell: Cell,
    other: Recipe,
    batch_size: int,
    before: tuple[Basis, CellStepTime],
    after: tuple[Basis, CellStepTime],
) -> SpeedChange:
    """Change of throughput, with the interval that independent errors of the two times give.

    Two simulations of one GPU share their whole error, so their ratio gets no interval.
    """
    steps = before[1], after[1]
    bases = before[0], after[0]
    ratio = steps[0].seconds / steps[1].seconds
    ends: tuple[float | None, float | None] = (None, None)
    if set(bases) != {Basis.SIMULATED}:
        least, most = zip(*(np.log(step.uncertainty.factors) for step in steps), strict=True)
        # The ratio falls if the second step takes longer or the first one less, and vice versa.
        low, high = math.hypot(most[1], least[0]), math.hypot(least[1], most[0])
        ends = (ratio * math.exp(-low), ratio * math.exp(high))
    before_rate, after_rate = (cell.examples_per_second(batch_size, step.seconds) for step in steps)
    return SpeedChange(cell, batch_size, before_rate, after_rate, bases, ratio, *ends, other)


def _latest(results: RunResults, cell: Cell) -> dict[int, tuple[Basis, CellStepTime]]:
    """Basis and step time, by batch size, of the stack that a cell was timed with last."""
    steps_by_stack = results.step_times.timed(cell)
    for o in sorted(results.observations_of(cell), key=lambda o: o.started_at, reverse=True):
        stack = None if o.environment is None else (o.environment.stack, o.basis)
        if stack in steps_by_stack:
            return {size: (o.basis, step) for size, step in steps_by_stack[stack].items()}
    return {}


def comparison_markdown(comparison: Comparison) -> str:
    """Render a comparison as Markdown."""
    before, after = comparison.names
    parts = [f"# {before} and {after}"]
    if comparison.differing:
        settings = table(("setting", before, after), comparison.differing)
        parts += ["## Differences", settings]
    if comparison.choices:
        rows = [_choice_row(*p, is_one_job=comparison.has_one_job) for p in comparison.choices]
        parts += [
            "## Cheapest offers",
            table(("job", "recipe", before, after, "cost", "verdict"), rows),
        ]
    if comparison.speeds:
        headers = ("GPU", "job", "recipe", "batch", before, after, "change", "verdict")
        parts += [f"## {SPEEDS}", table(headers, map(_speed_row, comparison.speeds))]
        if any(speed.low is not None for speed in comparison.speeds):
            parts.append(ANOTHER_HOUR)
    if comparison.largest:
        parts += ["## Largest batch size", _unchanged_text(comparison.largest)]
        changed = [c for c in comparison.largest if c.after != c.before]
        parts += (
            [table(("cell", before, after, "change"), map(_largest_row, changed))]
            if changed
            else []
        )
    for name, cells in zip(comparison.names, comparison.unmatched, strict=True):
        if cells:
            lines = [f"- {cell.key}" for cell in cells[:MOST_ALONE]]
            lines += [f"- and {len(cells) - MOST_ALONE} more"] * (len(cells) > MOST_ALONE)
            parts.append(f"## Only in {name}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _choice_row(
    before: Recommendation, after: Recommendation, *, is_one_job: bool
) -> tuple[object, ...]:
    cell, first, second = before.best.cell, before.best, after.best
    change, verdict = _more(second.usd / first.usd), _cost_verdict(first, second)
    if not is_one_job:
        change, verdict = "", "another job"
    choices = (_choice(before), _choice(after))
    recipe = _recipe_text(cell.recipe, second.cell.recipe)
    return (job_title(cell), recipe, *choices, change, verdict)


def _recipe_text(before: Recipe, after: Recipe) -> str:
    """Key of a recipe, with the field in which the second run's differs."""
    return " ".join([before.key, *_field(before, after)])


def _cost_verdict(before: RankedOffer, after: RankedOffer) -> str:
    """Whether the difference of two costs is larger than its 90 % interval; of errors apart."""
    ratio = math.log(after.usd / before.usd)
    if before.basis is after.basis is Basis.SIMULATED and before.cell.gpu == after.cell.gpu:
        # The two share their error.
        words = "same" if abs(ratio) < SAME else "more" if ratio > 0 else "less"
        return f"{words}, both simulated"
    rise = math.hypot(math.log(after.usd_high / after.usd), math.log(before.usd / before.usd_low))
    fall = math.hypot(math.log(after.usd / after.usd_low), math.log(before.usd_high / before.usd))
    if -rise <= ratio <= fall:
        return TOO_CLOSE
    return "more" if ratio > 0 else "less"


def _speed_row(speed: SpeedChange) -> tuple[object, ...]:
    cell, (first, second) = speed.cell, speed.bases
    rates = (f"{short(speed.before)} {first}", f"{short(speed.after)} {second}")
    settings = (cell.gpus, job_title(cell), speed.recipe, speed.batch_size)
    return (*settings, *rates, speed.change, speed.verdict)


def _largest_row(largest: LargestChange) -> tuple[object, ...]:
    return (
        " ".join(
            [
                largest.cell.key.replace("(simulated)", ""),  # the numbers show their basis
                *_field(largest.cell.recipe, largest.other),
            ]
        ),
        f"{largest.before} {largest.bases[0]}",
        f"{largest.after} {largest.bases[1]}",
        f"{largest.after - largest.before:+d}",
    )


def _unchanged_text(changes: Sequence[LargestChange]) -> str:
    """Number of cells whose largest batch size is the same in both runs, by basis."""
    unchanged = [change for change in changes if change.after == change.before]
    bases = Counter(" and ".join(dict.fromkeys(map(str, c.bases))) for c in unchanged)
    by_basis = ", ".join(f"{count} {basis}" for basis, count in bases.items())
    return (
        f"Unchanged in {len(unchanged)} of {len(changes)} cells"
        f"{f' ({by_basis})' if by_basis else ''}."
    )


def changes_table(comparison: Comparison) -> PageTable:
    """Changes of throughput as a table of the page, one row for each cell."""
    columns = (
        *("name", "gpu", "job", "recipe", "batch"),
        *("before", "after", "basis_before", "basis_after"),
        *("ratio", "low", "high", "verdict"),
    )
    cells = [speed.cell for speed in comparison.speeds]
    names = chart_names([Named(c.gpu, c.model, c.recipe.key, job_title(c)) for c in cells])
    rows = [
        (
            *(name, s.cell.gpus, job_title(s.cell), s.recipe, s.batch_size),
            *(s.before, s.after, *(basis.value for basis in s.bases)),
            *(s.ratio, s.low, s.high, s.verdict),
        )
        for name, s in zip(names, comparison.speeds, strict=True)
    ]
    return PageTable(columns, rows)


def _choice(recommendation: Recommendation) -> str:
    row = recommendation.best
    return f"{row.cell.gpus}, {offer_text(row, gpu=row.cell.gpus)}: {price_text(row)} ({row.basis})"


def _more(ratio: float) -> str:
    """Relative change in percent with its sign; never -0.0 %."""
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"
