"""Tables behind the page of a run: each number once, with the index of its cell. Pure.

A chart draws rows of a table and nothing else, so all of its values can be read in the table.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.node_pricing import offer_name
from orchestrator.pricing.catalog_file import stands_in
from orchestrator.ranking.ranked_offer import RankedOffer, comparable
from orchestrator.reporting.sections.law_section import LAW_NAMES
from orchestrator.reporting.sections.recommendation import (
    Recommendation,
    job_title,
    recommendations,
)
from orchestrator.run_folder.run_results import RunResults
from trials.records.cell import Cell
from trials.records.observation import Observation, largest_batch

DIGITS = 5  # significant digits of a number in the page
MOST_OFFERS = 100  # cheapest offers of one job in the page
MOST_OF_A_KIND = 2  # further offers of one GPU, provider and market


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of a page.

    Attributes:
        columns: unique names.
        rows: values in the order of the columns; None if absent.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def as_json(self) -> dict[str, Any]:
        """The table for a script, with rounded numbers."""
        return {"columns": self.columns, "rows": [[_short(v) for v in row] for row in self.rows]}


@dataclass(frozen=True, slots=True)
class PageJob:
    """Comparable cells: those of one model, weights, recipe, sparsity and length.

    Attributes:
        cell: any of the cells.
        recommendation: None if no cell has an offer.
    """

    cell: Cell
    recommendation: Recommendation | None

    @property
    def title(self) -> str:
        """Model, active experts and length, in words."""
        return job_title(self.cell)

    @property
    def gpus(self) -> int:
        """Number of GPUs with an offer."""
        return (
            len({row.cell.gpu for row in self.recommendation.rows})
            if self.recommendation is not None
            else 0
        )


@dataclass(frozen=True, slots=True)
class Named:
    """Parts of the name of a row or curve of a chart.

    Attributes:
        gpu, model, recipe: named only where they differ between rows.
        text: always part of the name.
    """

    gpu: str
    model: str
    recipe: str
    text: str


def chart_names(rows: Sequence[Named]) -> list[str]:
    """Unique names of rows.

    A name includes the GPU if the chart has several, and the short recipe if the model has several.
    """
    gpus = {row.gpu for row in rows}
    recipes: dict[str, set[str]] = {}
    for row in rows:
        recipes.setdefault(row.model, set()).add(row.recipe)
    short = {model: short_recipes(keys) for model, keys in recipes.items()}
    names: list[str] = []
    counts: Counter[str] = Counter()
    for row in rows:
        gpu = [row.gpu] if len(gpus) > 1 else []
        recipe = [short[row.model][row.recipe]] if len(recipes[row.model]) > 1 else []
        name = " · ".join([*gpu, row.text, *recipe])
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def short_recipes(keys: Collection[str]) -> dict[str, str]:
    """Short names of recipes by key: the method, and the parts that not all recipes share.

    Recipes keep their keys if two short names would be equal.
    """
    parts = {key: key.split("-") for key in keys}
    shared = set.intersection(*map(set, parts.values()))
    names = {
        key: "-".join([method, *(part for part in settings if part not in shared)])
        for key, (method, *settings) in parts.items()
    }
    return names if len(set(names.values())) == len(names) else {key: key for key in keys}


def page_jobs(results: RunResults) -> list[PageJob]:
    """Jobs of a run, in the order of its cells."""
    advice = {comparable(a.best.cell): a for a in recommendations(results.ranking)}
    first_cells: dict[tuple[object, ...], Cell] = {}
    for cell in results.cells:
        first_cells.setdefault(comparable(cell), cell)
    return [PageJob(cell, advice.get(key)) for key, cell in first_cells.items()]


def cells_table(results: RunResults, jobs: Sequence[PageJob]) -> PageTable:
    """Cells in the order of the run; other tables refer to a cell by its row."""
    columns = (
        *("job", "gpu", "ran_on", "model", "weights", "recipe", "experts", "active_experts"),
        *("sparsity", "seq_len", "simulated", "largest", "limited_by"),
    )
    job_of = {comparable(job.cell): place for place, job in enumerate(jobs)}
    rows = []
    for cell in results.cells:
        limit = largest_batch(results.observations_of(cell))
        largest, miss = (None, None) if limit is None else limit
        rows.append(
            (
                job_of[comparable(cell)],
                cell.gpu,
                cell.capped_on,
                cell.model,
                cell.weights,
                cell.recipe.key,
                cell.experts,
                cell.active_experts,
                cell.sparsity,
                cell.seq_len,
                cell.simulated,
                largest,
                None if miss is None else miss.outcome.value,
            )
        )
    return PageTable(columns, rows)


OFFER_COLUMNS = (
    *("cell", "rank", "odds", "tied", "pareto", "provider", "instance", "region", "market"),
    *("gpus", "usd_per_hour", "price_of", "batch", "examples_per_second", "tokens_per_example"),
    *("hours", "hours_low", "hours_high", "usd", "usd_low", "usd_high", "basis", "source"),
    *("extrapolated", "elsewhere", "stack"),
)


def offers_table(results: RunResults, jobs: Sequence[PageJob]) -> PageTable:
    """The ranking, reduced to ``shown_offers`` of each job."""
    rows = [
        _offer(row, results.place(row.cell))
        for job in jobs
        if job.recommendation is not None
        for row in shown_offers(job.recommendation.rows)
    ]
    return PageTable(OFFER_COLUMNS, rows)


def shown_offers(rows: Sequence[RankedOffer]) -> Iterator[RankedOffer]:
    """Offers of a job that the page lists: the cheapest, and the best of each kind.

    Args:
        rows: all offers, the cheapest first.
    """
    kinds: dict[tuple[str, str, str], int] = {}
    for row in rows:
        kind = (row.cell.gpu, row.provider, row.market)
        kinds[kind] = kinds.get(kind, 0) + 1
        if row.rank <= MOST_OFFERS or row.pareto or row.tied or kinds[kind] <= MOST_OF_A_KIND:
            yield row


def _offer(row: RankedOffer, place: int) -> tuple[Any, ...]:
    return (
        place,
        row.rank,
        row.probability_cheapest,
        row.tied,
        row.pareto,
        row.provider,
        row.instance,
        row.region,
        row.market,
        row.gpus_per_instance,
        row.usd_per_hour,
        str(row.price_as_of or row.price_recorded),
        row.batch_size,
        row.examples_per_second,
        row.tokens_per_example,
        row.hours,
        row.hours_low,
        row.hours_high,
        row.usd,
        row.usd_low,
        row.usd_high,
        row.basis.value,
        row.source if row.law is None else f"{row.source} ({LAW_NAMES[row.law]})",
        row.extrapolated,
        stands_in(row.cell.gpu, row.provider),
        row.stack,
    )


PROBE_COLUMNS = (
    *("cell", "purpose", "batch", "repeat", "attempt", "outcome", "basis", "step_seconds"),
    *("examples_per_second", "steps", "peak_gib", "limit_gib", "stack", "host", "started"),
    *("seconds", "detail"),
)
GIB = 2**30


def probes_table(results: RunResults) -> PageTable:
    """Every observation, with its machine and stack."""
    return PageTable(PROBE_COLUMNS, [_probe(o, results.place(o.cell)) for o in results.observed])


def _probe(o: Observation, place: int) -> tuple[Any, ...]:
    measured, where = o.measurement, o.environment
    steps = () if measured is None else measured.step_seconds
    seconds = statistics.median(steps) if steps else None
    return (
        place,
        o.purpose,
        o.batch_size,
        o.repeat,
        o.attempt,
        o.outcome.value,
        o.basis.value,
        seconds,
        None if seconds is None else o.batch_size / seconds,
        len(steps),
        None if measured is None else measured.memory.peak_allocated_bytes / GIB,
        o.memory_limit_bytes / GIB,
        None if where is None else where.stack,
        None if where is None else where.host,
        o.started_at,
        o.seconds,
        o.detail,
    )


def spending_table(results: RunResults) -> PageTable:
    """Time and cost of the sweep on each GPU."""
    columns = (
        "gpu",
        "probes",
        "probe_hours",
        "lost_hours",
        "nodes",
        "assumed_start_hours",
        "offer",
        "usd_per_hour",
        "usd",
    )
    rows = [
        (
            part.gpu,
            part.probes,
            part.probe_seconds / 3600,
            part.lost_seconds / 3600,
            part.nodes,
            part.startup_seconds / 3600,
            None if part.offer is None else offer_name(part.offer),
            None if part.offer is None else part.offer.usd_per_hour,
            part.usd,
        )
        for part in results.meter.spent
    ]
    return PageTable(columns, rows)


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
