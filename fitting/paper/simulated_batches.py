"""The paper's largest batches as simulated, under each of several assumptions about its runs.

``tests/benchmarks/paper_largest_batches.py`` makes the table, which takes some minutes.
"""

from dataclasses import dataclass
from itertools import groupby

from fitting.paper.published import table


@dataclass(frozen=True, slots=True)
class SimulatedBatches:
    """Largest batches of one model under one pair of assumptions, nothing fitted.

    Attributes:
        recipe: recipe of the steps, in words.
        survives: length that a batch has to survive, in words.
        published: (rows,) sizes of the paper.
        simulated: (rows,) sizes by the simulation, 0 where none fits.
    """

    model: str
    recipe: str
    survives: str
    published: tuple[int, ...]
    simulated: tuple[int, ...]

    @property
    def exact(self) -> int:
        """Number of sizes that agree."""
        return self._within(0)

    @property
    def within_one(self) -> int:
        """Number of sizes that are at most one off."""
        return self._within(1)

    def _within(self, most: int) -> int:
        pairs = zip(self.published, self.simulated, strict=True)
        return sum(abs(published - simulated) <= most for published, simulated in pairs)


def simulated_batches() -> list[SimulatedBatches]:
    """Every pair of assumptions of the committed table, in its order."""
    published = {
        (r["model"], r["dataset"], r["gpu"], r["sparsity"]): int(r["largest_batch"])
        for r in table("largest_batches.csv")
    }
    kept = []
    grouped = groupby(
        table("simulated_largest_batches.csv"),
        key=lambda r: (r["model"], r["recipe"], r["survives"]),
    )
    for (model, recipe, survives), group in grouped:
        rows = list(group)
        sizes = [published[model, r["dataset"], r["gpu"], r["sparsity"]] for r in rows]
        simulated = tuple(int(r["simulated"]) for r in rows)
        kept.append(SimulatedBatches(model, recipe, survives, tuple(sizes), simulated))
    return kept
