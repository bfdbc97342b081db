"""Two runs side by side: what is faster, what fits, which GPU is the cheapest. Pure.

Cells are alike when they are of the same GPU, model, weights, recipe, sparsity and length; one may
have been simulated and the other measured, which is said.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.answers import Answer, answers, offer_text, price, subject
from orchestrator.page_tables import PageTable
from orchestrator.ranking import comparable
from orchestrator.run_results import RunResults
from orchestrator.step_seconds import StepTime, timed_steps, visit_spread
from orchestrator.tables import table
from trials.observation import Basis, largest_batch
from trials.workload import Cell

SPEEDS = "Queries per second"


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """The throughput of one cell at the largest batch size that both runs timed.

    Attributes:
        cell: as the first run has it.
        batch_size: queries per step.
        before, after: queries per second.
        bases: of the two.
        ratio, low, high: after over before, with a 90 % interval; of two simulations, which share
            their error, without.
    """

    cell: Cell
    batch_size: int
    before: float
    after: float
    bases: tuple[Basis, Basis]
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether they can be told apart."""
        if self.low > 1:
            return "faster"
        if self.high < 1:
            return "slower"
        return "the same" if self.low == self.high else "not told apart"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        names: of the two.
        differing: fields of the specification, or versions of packages, that differ: what, in the
            first, in the second.
        speeds: of cells that both have.
        largest: cell, largest batch before and after, of those where both are known.
        choices: of the jobs that both have an answer to.
        alone: cells that only the first has, and only the second.
    """

    names: tuple[str, str]
    differing: list[tuple[str, str, str]]
    speeds: list[SpeedChange]
    largest: list[tuple[Cell, int, int]]
    choices: list[tuple[Answer, Answer]]
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
    told = {comparable(answer.best.cell): answer for answer in answers(after.ranking)}
    return Comparison(
        names=names,
        differing=[*_specifications(before, after), *_versions(before, after)],
        speeds=list(_speeds(before, after, pairs)),
        largest=[
            (cell, known[0], then[0])
            for cell, other in pairs
            if (known := largest_batch(before.seen(cell))) is not None
            and (then := largest_batch(after.seen(other))) is not None
        ],
        choices=[
            (answer, told[of])
            for answer in answers(before.ranking)
            if (of := comparable(answer.best.cell)) in told
        ],
        alone=(
            [cell for cell in before.cells if _alike(cell) not in theirs],
            [cell for cell in after.cells if _alike(cell) not in mine],
        ),
    )


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
    steps: tuple[StepTime, StepTime],
) -> SpeedChange:
    """The doubts of the two have nothing in common; two simulations of one GPU have all of it."""
    ratio, low, high = speeds[1] / speeds[0], 0.0, 0.0
    if set(bases) != {Basis.SIMULATED}:
        least, most = zip(*(np.log(step.doubt.factors) for step in steps), strict=True)
        # The second is slower than told, or the first faster; and the other way round.
        low, high = math.hypot(most[1], least[0]), math.hypot(least[1], most[0])
    return SpeedChange(
        cell=cell,
        batch_size=batch_size,
        before=speeds[0],
        after=speeds[1],
        bases=bases,
        ratio=ratio,
        low=ratio * math.exp(-low),
        high=ratio * math.exp(high),
    )


def _latest(results: RunResults, cell: Cell) -> tuple[Basis, dict[int, StepTime]] | None:
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
            (subject(a.best.cell), *(_choice(each) for each in (a, b)), _usd_change(a, b))
            for a, b in found.choices
        ]
        parts += ["## The cheapest", table(("job", before, after, "cost"), chosen)]
    if found.speeds:
        rows = [
            (
                each.cell.gpu,
                subject(each.cell),
                each.cell.recipe.key,
                each.batch_size,
                f"{each.before:.3g} {each.bases[0]}",
                f"{each.after:.3g} {each.bases[1]}",
                f"{each.ratio - 1:+.1%} ({each.low - 1:+.1%} to {each.high - 1:+.1%})",
                each.verdict,
            )
            for each in found.speeds
        ]
        headers = ("GPU", "job", "recipe", "batch", before, after, "change", "")
        parts += [f"## {SPEEDS}", table(headers, rows)]
    changed = [(cell.key, b, a, f"{a - b:+d}") for cell, b, a in found.largest if a != b]
    if found.largest:
        same = f"The same in {len(found.largest) - len(changed)} of {len(found.largest)} cells."
        parts += ["## Largest batch", same]
        parts += [table(("cell", before, after, "change"), changed)] if changed else []
    for name, cells in zip(found.names, found.alone, strict=True):
        if cells:
            parts.append(f"## Only in {name}\n\n" + "\n".join(f"- {cell.key}" for cell in cells))
    return "\n\n".join(parts)


def changes_table(found: Comparison) -> PageTable:
    """How much faster each cell is, for a page."""
    columns = (
        *("gpu", "job", "recipe", "batch", "before", "after", "basis_before", "basis_after"),
        *("ratio", "low", "high", "verdict"),
    )
    rows = [
        (
            *(each.cell.gpu, subject(each.cell), each.cell.recipe.key, each.batch_size),
            *(each.before, each.after, *(basis.value for basis in each.bases)),
            *(each.ratio, each.low, each.high, each.verdict),
        )
        for each in found.speeds
    ]
    return PageTable(columns, rows)


def _choice(answer: Answer) -> str:
    row = answer.best
    return f"{row.cell.gpu}, {offer_text(row)}: {price(row)} ({row.basis})"


def _usd_change(before: Answer, after: Answer) -> str:
    return f"{after.best.usd / before.best.usd - 1:+.1%}"
