"""Tables behind the page of a run: each number once, with the index of its cell. Pure.

A chart draws rows of a table and nothing else, so all of its values can be read in the table.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from orchestrator.planning.node_pricing import offer_name
from orchestrator.pricing.catalog_file import OWN
from orchestrator.ranking.ranked_offer import RankedOffer, comparable
from orchestrator.reporting.sections.law_section import LAW_NAMES
from orchestrator.reporting.sections.recipe_section import recipe_text
from orchestrator.reporting.sections.recommendation import (
    FEW_STEPS,
    Recommendation,
    batch_text,
    doubts,
    each_gpu_text,
    job_title,
    provider_text,
    recommendations,
    rows_word,
    steps_per_epoch,
)
from orchestrator.run_folder.run_results import RunResults
from orchestrator.spec.job import Job
from trials.records.cell import Cell
from trials.records.observation import Observation

# Significant digits of a number in the page, which rounds it again to the cents that its sentences
# have: so many that both roundings give what one would.
DIGITS = 9
MOST_OFFERS = 100  # cheapest offers of one job in the page
MOST_OF_A_KIND = 2  # further offers of one GPU, provider and market
GIB = 2**30
T = TypeVar("T")


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


def page_table(records: Iterable[T], *columns: str | Mapping[str, Callable[[T], Any]]) -> PageTable:
    """Make a table with a row for each record.

    Args:
        records: the records.
        columns: names of attributes, separated by spaces, and further columns by name.
    """
    values: dict[str, Callable[[T], Any]] = {}
    for part in columns:
        values |= (
            {name: attrgetter(name) for name in part.split()} if isinstance(part, str) else part
        )
    return PageTable(
        tuple(values), [tuple(value(record) for value in values.values()) for record in records]
    )


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
    def key(self) -> str:
        """Key of the cells without GPU and layout, which a link to this job holds."""
        layout = "" if self.cell.parallel is None else f"/{self.cell.parallel.key}"
        return self.cell.key.partition("/")[2].removesuffix(layout)

    @property
    def title(self) -> str:
        """Model, active experts and length, in words."""
        return job_title(self.cell)

    @property
    def recipe(self) -> str:
        """The recipe in words, and its key."""
        return f"{recipe_text(self.cell.recipe)} ({self.cell.recipe.key})"

    @property
    def gpus(self) -> int:
        """Number of GPUs with an offer."""
        return len({row.cell.gpus for row in self.offers})

    @property
    def offers(self) -> Sequence[RankedOffer]:
        """Offers, the cheapest first."""
        return () if self.recommendation is None else self.recommendation.rows

    @property
    def sentences(self) -> list[str]:
        """The recommendation in Markdown; empty without any."""
        return [] if self.recommendation is None else self.recommendation.sentences()

    @property
    def doubts(self) -> list[str]:
        """Reasons to doubt the recommendation."""
        return [] if self.recommendation is None else self.recommendation.doubts

    @property
    def unequal_steps(self) -> str:
        """As of ``Recommendation``."""
        return "" if self.recommendation is None else self.recommendation.unequal_steps

    @property
    def abridged(self) -> str:
        """Note on which of the offers the page shows; empty where it shows all."""
        shown = len(list(shown_offers(self.offers)))
        if shown == len(self.offers):
            return ""
        return (
            f"This page shows {shown:,} of {len(self.offers):,} offers: the {MOST_OFFERS} "
            "cheapest, those that may be as cheap as the cheapest, those that no offer beats in "
            f"both cost and time, and the {MOST_OF_A_KIND} cheapest of each GPU, provider and "
            "market. The run's ranking.csv has all offers."
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
    has_several_gpus = len({row.gpu for row in rows}) > 1
    recipes: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        recipes[row.model].add(row.recipe)
    short = {model: short_recipes(keys) for model, keys in recipes.items()}
    names: list[str] = []
    counts: Counter[str] = Counter()
    for row in rows:
        gpu = [row.gpu] if has_several_gpus else []
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
    job_of = {comparable(job.cell): place for place, job in enumerate(jobs)}
    return page_table(
        results.cells,
        {
            "job": lambda cell: job_of[comparable(cell)],
            "gpu": lambda cell: cell.gpus,
            "ran_on": lambda cell: cell.capped_on,
        },
        "model weights",
        {
            "recipe": lambda cell: cell.recipe.key,
            "recipe_words": lambda cell: recipe_text(cell.recipe),
        },
        "experts active_experts sparsity seq_len simulated ranks",
        {"row": lambda cell: cell.recipe.row, "rows": rows_word},
    )


def offers_table(results: RunResults, jobs: Sequence[PageJob]) -> PageTable:
    """The ranking, reduced to ``shown_offers`` of each job."""
    job = results.ranking.workload
    return page_table(
        [row for alike in jobs for row in shown_offers(alike.offers)],
        {
            "cell": lambda row: results.place(row.cell),
            "gpu": lambda row: row.cell.gpu,
            "layout": lambda row: _maybe(row.cell.parallel, lambda layout: layout.key),
        },
        "rank epochs",
        {"odds": lambda row: row.probability_cheapest},
        "tied pareto provider instance region market instances gpus_per_instance usd_per_hour",
        {
            "where": provider_text,
            "price_as_of": lambda row: _maybe(row.price_as_of, str),
            "price_recorded": lambda row: str(row.price_recorded),
        },
        "batch_size largest_batch",
        {
            "batches": batch_text,
            "each": each_gpu_text,
            "owned": lambda row: row.provider == OWN,
            "few_steps": lambda row: _few_steps(job, row),
            "doubts": lambda row: doubts(job, row) or None,
        },
        "examples_per_second tokens_per_example as_if_full",
        {"left_out": lambda row: row.cell.recipe.left_out is not None},
        "hours hours_low hours_high usd usd_low usd_high",
        "own_error_share",
        {"basis": lambda row: row.basis.value, "source": _step_time_source},
        "extrapolated elsewhere stack",
    )


def _few_steps(job: Job, row: RankedOffer) -> int | None:
    per_epoch = steps_per_epoch(job, row)
    return per_epoch if per_epoch < FEW_STEPS else None


def _step_time_source(row: RankedOffer) -> str:
    return row.source if row.law is None else f"{row.source} ({LAW_NAMES[row.law]})"


def shown_offers(rows: Sequence[RankedOffer]) -> Iterator[RankedOffer]:
    """Offers of a job that the page lists: the cheapest, and the best of each kind.

    Args:
        rows: all offers, the cheapest first.
    """
    kinds: dict[tuple[str, str, str], int] = {}
    for row in rows:
        kind = (row.cell.gpus, row.provider, row.market)
        kinds[kind] = kinds.get(kind, 0) + 1
        if row.rank <= MOST_OFFERS or row.pareto or row.tied or kinds[kind] <= MOST_OF_A_KIND:
            yield row


def probes_table(results: RunResults) -> PageTable:
    """Every observation, with its machine and stack."""
    return page_table(
        results.observed,
        {"cell": lambda o: results.place(o.cell)},
        "purpose",
        {"batch": lambda o: o.batch_size},
        "repeat attempt",
        {
            "outcome": lambda o: o.outcome.value,
            "basis": lambda o: o.basis.value,
            "step_seconds": _step_seconds,
            "examples_per_second": lambda o: _maybe(
                _step_seconds(o), lambda t: o.examples_per_step / t
            ),
            "steps": lambda o: len(_steps(o)),
            "peak_gib": lambda o: _maybe(o.memory, lambda m: m.peak_allocated_bytes / GIB),
            "limit_gib": lambda o: o.memory_limit_bytes / GIB,
            "stack": lambda o: _maybe(o.environment, lambda environment: environment.stack),
            "host": lambda o: _maybe(o.environment, lambda environment: environment.host),
            "started": lambda o: o.started_at,
        },
        "seconds detail",
    )


def _steps(o: Observation) -> Sequence[float]:
    return () if o.measurement is None else o.measurement.step_seconds


def _step_seconds(o: Observation) -> float | None:
    return statistics.median(_steps(o)) if _steps(o) else None


def spending_table(results: RunResults) -> PageTable:
    """Time and cost of the sweep on each GPU."""
    return page_table(
        results.meter.spent,
        "gpu probes",
        {
            "probe_hours": lambda part: part.probe_seconds / 3600,
            "lost_hours": lambda part: part.lost_seconds / 3600,
        },
        "nodes",
        {
            "assumed_start_hours": lambda part: part.startup_seconds / 3600,
            "offer": lambda part: _maybe(part.offer, offer_name),
            "usd_per_hour": lambda part: _maybe(part.offer, lambda offer: offer.usd_per_hour),
            "price_of": lambda part: _maybe(part.offer, lambda offer: str(offer.date)),
        },
        "usd",
    )


def _maybe(value: T | None, derive: Callable[[T], Any]) -> Any:
    """Derive a value from another; None if that is absent."""
    return None if value is None else derive(value)


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
