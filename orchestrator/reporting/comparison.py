"""Two runs side by side: what is faster, what fits, which GPU is the cheapest. Pure.

Cells are alike when they are of the same GPU, model, weights, recipe, sparsity and length; one may
have been simulated and the other measured, which is said.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fitting.families.cell_step_time import CellStepTime, timed_steps, visit_spread
from orchestrator.markdown_table import table
from orchestrator.ranking.ranked_offer import comparable
from orchestrator.reporting.page.run_tables import Named, PageTable, chart_names
from orchestrator.reporting.sections.recommendation import (
    Recommendation,
    job_title,
    offer_text,
    price_text,
    recommendations,
)
from orchestrator.run_folder.run_results import RunResults
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, largest_batch

SPEEDS = "Examples per second"
SAME = 0.0005  # less is told as +0.0 %
ANOTHER_HOUR = (
    "Intervals are of how the steps of one run scatter. A machine that was busier, or hotter, in "
    "one of the two shows as a difference: measure both again before you believe one."
)


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """The throughput of one cell at the largest batch size that both runs timed.

    Attributes:
        cell: as the first run has it.
        batch_size: examples per step.
        before, after: examples per second.
        bases: of the two.
        ratio: after over before.
        low, high: its 90 % interval; absent of two simulations, which share their error.
    """

    cell: Cell
    batch_size: int
    before: float
    after: float
    bases: tuple[Basis, Basis]
    ratio: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Whether they can be told apart."""
        if self.low is None or self.high is None:
            if abs(self.ratio - 1) < SAME:
                return "the same, both simulated"
            return f"{'faster' if self.ratio > 1 else 'slower'}, both simulated"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "not told apart"

    @property
    def change(self) -> str:
        """By how much, with the interval where there is one."""
        told = _more(self.ratio)
        if self.low is None or self.high is None:
            return told
        return f"{told} ({_more(self.low)} to {_more(self.high)})"


@dataclass(frozen=True, slots=True)
class LargestChange:
    """The largest batch of one cell in both runs.

    Attributes:
        cell: as the first run has it.
        before, after: examples.
        bases: of the two.
    """

    cell: Cell
    before: int
    after: int
    bases: tuple[Basis, Basis]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        names: of the two.
        differing: fields of the specification, or versions of packages, that differ: what, in the
            first, in the second.
        speeds: of cells that both have.
        largest: of cells whose largest batch both know.
        choices: of the jobs that both have an answer to.
        alone: cells that only the first has, and only the second.
    """

    names: tuple[str, str]
    differing: list[tuple[str, str, str]]
    speeds: list[SpeedChange]
    largest: list[LargestChange]
    choices: list[tuple[Recommendation, Recommendation]]
    alone: tuple[list[Cell], list[Cell]]


def compare(before: RunResults, after: RunResults, names: tuple[str, str]) -> Comparison:
    """What differs between two runs.

    Args:
        before: the first.
        after: the second.
        names: what to call them.
    """
    theirs = {_alike(cell): cell for cell in after.cells}
    mine = {_alike(cell) for cell in before.cells}
    pairs = [(cell, theirs[of]) for cell in before.cells if (of := _alike(cell)) in theirs]
    told = {comparable(answer.best.cell): answer for answer in recommendations(after.ranking)}
    return Comparison(
        names=names,
        differing=[*_specifications(before, after), *_versions(before, after)],
        speeds=list(_speeds(before, after, pairs)),
        largest=[
            LargestChange(
                cell, known[0], then[0], (_basis(before.seen(cell)), _basis(after.seen(other)))
            )
            for cell, other in pairs
            if (known := largest_batch(before.seen(cell))) is not None
            and (then := largest_batch(after.seen(other))) is not None
        ],
        choices=[
            (answer, told[of])
            for answer in recommendations(before.ranking)
            if (of := comparable(answer.best.cell)) in told
        ],
        alone=(
            [cell for cell in before.cells if _alike(cell) not in theirs],
            [cell for cell in after.cells if _alike(cell) not in mine],
        ),
    )


def _basis(seen: Sequence[Observation]) -> Basis:
    """That of a cell: no cell has two."""
    return seen[0].basis


def _alike(cell: Cell) -> tuple[object, ...]:
    return (cell.gpu, cell.capped_on, *comparable(cell))


def _specifications(before: RunResults, after: RunResults) -> Iterator[tuple[str, str, str]]:
    """Fields of the specification that differ; cells are told one by one, catalogs by prices."""
    for name in ("seed", "max_batch_size", "boundary_repeats", "timing", "workload"):
        one, other = getattr(before.spec, name), getattr(after.spec, name)
        if one == other:
            continue
        if name in ("timing", "workload"):
            for field in type(one).model_fields:
                pair = getattr(one, field), getattr(other, field)
                if pair[0] != pair[1]:
                    yield f"{name}.{field}", _brief(pair[0]), _brief(pair[1])
        else:
            yield name, _brief(one), _brief(other)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _versions(before: RunResults, after: RunResults) -> Iterator[tuple[str, str, str]]:
    one, other = _packages(before), _packages(after)
    for name in sorted({*one, *other}):
        pair = one.get(name, set()), other.get(name, set())
        if pair[0] != pair[1]:
            first, second = (", ".join(sorted(versions)) or "none" for versions in pair)
            yield name, first, second


def _packages(results: RunResults) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for o in results.observed:
        if o.environment is not None:
            found.setdefault("device", set()).add(o.environment.device_name)
            for package, version in o.environment.versions:
                found.setdefault(package, set()).add(version)
    return found


def _speeds(
    before: RunResults, after: RunResults, pairs: Sequence[tuple[Cell, Cell]]
) -> Iterator[SpeedChange]:
    for cell, other in pairs:
        first, second = _latest(before, cell), _latest(after, other)
        if first is None or second is None:
            continue
        (basis, mine), (basis_then, theirs) = first, second
        shared = mine.keys() & theirs.keys()
        if shared:
            size = max(shared)
            speeds = (size / mine[size].seconds, size / theirs[size].seconds)
            yield _change(cell, size, speeds, (basis, basis_then), (mine[size], theirs[size]))


def _change(
    cell: Cell,
    batch_size: int,
    speeds: tuple[float, float],
    bases: tuple[Basis, Basis],
    steps: tuple[CellStepTime, CellStepTime],
) -> SpeedChange:
    """The doubts of the two have nothing in common; two simulations of one GPU have all of it."""
    ratio = speeds[1] / speeds[0]
    ends: tuple[float | None, float | None] = (None, None)
    if set(bases) != {Basis.SIMULATED}:
        least, most = zip(*(np.log(step.doubt.factors) for step in steps), strict=True)
        # The second is slower than told, or the first faster; and the other way round.
        low, high = math.hypot(most[1], least[0]), math.hypot(least[1], most[0])
        ends = (ratio * math.exp(-low), ratio * math.exp(high))
    return SpeedChange(
        cell=cell,
        batch_size=batch_size,
        before=speeds[0],
        after=speeds[1],
        bases=bases,
        ratio=ratio,
        low=ends[0],
        high=ends[1],
    )


def _latest(results: RunResults, cell: Cell) -> tuple[Basis, dict[int, CellStepTime]] | None:
    """The timed steps of the stack that a cell ran with last."""
    found = timed_steps(results.seen(cell), visit_spread(results.observed))
    ran = [
        (o.environment.stack, o.basis)
        for o in sorted(results.seen(cell), key=lambda o: o.started_at)
        if o.environment is not None and (o.environment.stack, o.basis) in found
    ]
    return (ran[-1][1], found[ran[-1]]) if ran else None


def comparison_markdown(found: Comparison) -> str:
    """The comparison to read."""
    before, after = found.names
    parts = [f"# {before} and {after}"]
    if found.differing:
        parts += ["## What differs", table(("what", before, after), found.differing)]
    if found.choices:
        chosen = [
            (
                job_title(a.best.cell),
                a.best.cell.recipe.key,
                *(_choice(each) for each in (a, b)),
                _usd_change(a, b),
            )
            for a, b in found.choices
        ]
        parts += ["## The cheapest", table(("job", "recipe", before, after, "cost"), chosen)]
    if found.speeds:
        rows = [
            (
                each.cell.gpu,
                job_title(each.cell),
                each.cell.recipe.key,
                each.batch_size,
                f"{each.before:.3g} {each.bases[0]}",
                f"{each.after:.3g} {each.bases[1]}",
                each.change,
                each.verdict,
            )
            for each in found.speeds
        ]
        headers = ("GPU", "job", "recipe", "batch", before, after, "change", "")
        parts += [f"## {SPEEDS}", table(headers, rows)]
        if any(each.low is not None for each in found.speeds):
            parts.append(ANOTHER_HOUR)
    changed = [
        (
            each.cell.key.replace("(simulated)", ""),  # which of the two was, the numbers say
            f"{each.before} {each.bases[0]}",
            f"{each.after} {each.bases[1]}",
            f"{each.after - each.before:+d}",
        )
        for each in found.largest
        if each.after != each.before
    ]
    if found.largest:
        same = _same(found.largest)
        parts += ["## Largest batch", same]
        parts += [table(("cell", before, after, "change"), changed)] if changed else []
    for name, cells in zip(found.names, found.alone, strict=True):
        if cells:
            parts.append(f"## Only in {name}\n\n" + "\n".join(f"- {cell.key}" for cell in cells))
    return "\n\n".join(parts)


def _same(largest: Sequence[LargestChange]) -> str:
    """In how many cells nothing has changed, and what told it."""
    same = [each for each in largest if each.after == each.before]
    bases = Counter(" and ".join(dict.fromkeys(map(str, each.bases))) for each in same)
    by = ", ".join(f"{count} {basis}" for basis, count in bases.items())
    return f"The same in {len(same)} of {len(largest)} cells{f' ({by})' if by else ''}."


def changes_table(found: Comparison) -> PageTable:
    """How much faster each cell is, for a page."""
    columns = (
        *(
            "name",
            "gpu",
            "job",
            "recipe",
            "batch",
            "before",
            "after",
            "basis_before",
            "basis_after",
        ),
        *("ratio", "low", "high", "verdict"),
    )
    cells = [each.cell for each in found.speeds]
    names = chart_names([Named(c.gpu, c.model, c.recipe.key, job_title(c)) for c in cells])
    rows = [
        (
            *(name, each.cell.gpu, job_title(each.cell), each.cell.recipe.key, each.batch_size),
            *(each.before, each.after, *(basis.value for basis in each.bases)),
            *(each.ratio, each.low, each.high, each.verdict),
        )
        for name, each in zip(names, found.speeds, strict=True)
    ]
    return PageTable(columns, rows)


def _choice(answer: Recommendation) -> str:
    row = answer.best
    return f"{row.cell.gpu}, {offer_text(row)}: {price_text(row)} ({row.basis})"


def _usd_change(before: Recommendation, after: Recommendation) -> str:
    return _more(after.best.usd / before.best.usd)


def _more(ratio: float) -> str:
    """How much more than one, in percent; nothing has no sign of its own."""
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"
