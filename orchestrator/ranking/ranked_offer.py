"""Records of a ranking, and its CSV. Pure."""

import csv
import io
import itertools
from collections.abc import Iterator
from datetime import date
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fitting.families.cell_step_time import StepTimeOrigin
from fitting.laws.forms import Form
from gpu_catalog.record import Record
from gpu_catalog.safe_text import spreadsheet_cell
from orchestrator.pricing.catalog_file import stands_in
from orchestrator.pricing.host_memory import TooLittleHostMemory
from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints
from orchestrator.ranking.epochs_needed import LearnedEpochs
from orchestrator.spec.job import Job
from trials.records.cell import Cell
from trials.records.observation import Basis

if TYPE_CHECKING:
    import pandas as pd


class RankedOffer(Record):
    """The job of one cell on one offer. Intervals have a level of 90 %.

    Attributes:
        rank: 1 is the cheapest for this model, recipe, sparsity and sequence length, or the fastest
            if that is the objective.
        probability_cheapest: probability that no other offer is cheaper; 0 for an offer that
            another one of the same GPU and market undercuts by more than prices move.
        tied: whether the data do not separate it from the cheapest.
        pareto: whether no other offer is both faster and cheaper.
        cell: cell that runs the job.
        stack: fingerprint of the software it was measured with.
        provider, instance, region, market, gpus_per_instance, usd_per_hour: offer, with the price
            of the whole instance, which must be rented, or of as many as the cell has nodes.
        price_as_of: day that the price is of; None where its source does not give one.
        price_recorded: day that the price was added to the catalog.
        host_memory_gib: memory of the instance's host; None where it is unknown.
        host_gib: memory that the training keeps on the host of each node; None for none, or where
            it is unknown.
        batch_size: examples per step, on each GPU.
        batch: origin of the batch size: requested, the largest, or the fastest timed one.
        largest_batch: largest batch that fits, and survives the lengths of the job's data where
            these were drawn; None while the search for it is not complete.
        limited_by: outcome of the next larger batch size, or the limit that was reached.
        examples_per_second: throughput at ``batch_size``, in packed rows where examples are packed.
        epochs: number of epochs.
        tokens_per_example: tokens per example, padding included; the cell's length where the job
            has no lengths, or ``as_if_full``.
        as_if_full: whether every example is priced at the cell's length, an upper bound, because no
            law predicts the steps of shorter ones.
        hours, hours_low, hours_high: hours from renting to the end: start-up, steps, checkpoints,
            and the expected interruptions of spot instances.
        usd, usd_low, usd_high: dollars for these hours; the interval includes the change of the
            price since it was recorded.
        own_error_share: share of the variance of the hours' logarithm that no other GPU's hours
            have; simulated times share the rest.
        startup_minutes: minutes of it from renting to the first step; None in earlier rankings.
        checkpoint_seconds: seconds to write a checkpoint; None in earlier rankings.
        checkpoint_minutes: minutes of work between two checkpoints.
        basis: measured or simulated; a capped GPU has no price.
        source: origin of the step time.
        law: law that predicted the step time, or scaled it to the job's lengths.
        length_error: relative error of that law at held-out lengths, where it scaled the time.
        extrapolated: whether the law was evaluated outside the range it was fitted on.
    """

    rank: int
    probability_cheapest: float
    tied: bool
    pareto: bool
    cell: Cell
    stack: str
    provider: str
    instance: str
    region: str
    market: str
    gpus_per_instance: int
    usd_per_hour: float
    price_as_of: date | None
    price_recorded: date
    host_memory_gib: float | None = None
    host_gib: float | None = None
    batch_size: int
    batch: Literal["asked", "largest", "fastest"]
    largest_batch: int | None
    limited_by: str | None
    examples_per_second: float
    epochs: int
    tokens_per_example: float
    as_if_full: bool = False
    hours: float
    hours_low: float
    hours_high: float
    usd: float
    usd_low: float
    usd_high: float
    own_error_share: float = 1.0
    startup_minutes: float | None = None
    checkpoint_seconds: float | None = None
    checkpoint_minutes: float
    basis: Basis
    source: StepTimeOrigin
    law: Form | None
    length_error: float | None = None
    extrapolated: bool

    @property
    def instances(self) -> int:
        """Number of instances that are rented."""
        return self.cell.nodes

    @property
    def price_date(self) -> date:
        """Date of the price, or of the record if none is known."""
        return self.price_as_of or self.price_recorded

    @property
    def examples_per_step(self) -> int:
        """Examples, or packed rows, per optimizer step of all GPUs."""
        micro_batches = self.cell.rank_recipe.micro_batches(self.batch_size)
        return self.batch_size * micro_batches * self.cell.data_parallel_ranks

    @property
    def elsewhere(self) -> bool:
        """Whether it is taken to be as fast as the machine that ran the sweep."""
        return stands_in(self.cell.gpu, self.provider)


class Excluded(Record):
    """A cell that is not ranked.

    Attributes:
        cell: the cell.
        reason: reason, in one line.
        missed: best hours and dollars of its offers, where the deadline or budget is the reason.
    """

    cell: Cell
    reason: str
    missed: MissedConstraints | None = None


class LeftOutInstances(Record):
    """Instances that a ranked cell is not priced on, for their hosts have too little memory."""

    cell: Cell
    instances: tuple[TooLittleHostMemory, ...]


class Ranking(Record):
    """Every cell of a sweep, priced on every offer of its GPU. The best first in each job.

    Attributes:
        workload: the job. With epochs from training curves, it has the largest number of any cell.
        priced_on: date of the prices, which drift from their recorded values; None for the recorded
            values.
        constraints: limits that offers must meet.
        learned: training curves that the epochs come from; empty if the number was given.
        offers: ranked offers.
        excluded: cells without a ranked offer, with reasons.
        too_little_host_memory: instances that ranked cells are not priced on.
    """

    schema_version: Literal[3] = 3
    workload: Job
    priced_on: date | None = None
    learned: tuple[LearnedEpochs, ...] = ()
    constraints: Constraints = Constraints()
    offers: tuple[RankedOffer, ...]
    excluded: tuple[Excluded, ...]
    too_little_host_memory: Annotated[
        tuple[LeftOutInstances, ...], Field(exclude_if=lambda cells: not cells)
    ] = ()

    def to_frame(self) -> "pd.DataFrame":
        """A row per offer, with the columns of ranking.csv, the cheapest first."""
        import pandas as pd  # noqa: PLC0415 - the commands do without it

        return pd.read_csv(io.StringIO(ranking_csv(self)))

    def _repr_html_(self) -> str:
        """The frame as an HTML table, for notebooks."""
        return str(self.to_frame().to_html(index=False))


def comparable(cell: Cell) -> tuple[object, ...]:
    """Parts that two cells must share for the cheaper one to be the better choice."""
    return (cell.model, cell.weights, cell.recipe, cell.active_experts, cell.seq_len)


def ranking_csv(ranking: Ranking) -> str:
    """The ranking as CSV: a row per offer, with a column for each part of the cell."""
    fields = [name for name in RankedOffer.model_fields if name not in {"cell", "epochs"}]
    parts = ["gpu", "model", "weights", "recipe", "sparsity", "active_experts", "seq_len"]
    parts.append("layout")
    # Most of a row's text is that of other rows, of the same offer or the same job.
    shared = cache(_csv_cells)
    stack, host, usd, rest = map(fields.index, ("stack", "host_gib", "usd", "own_error_share"))
    own, of_offer, of_job, prices, others = (
        itemgetter(*fields[start:end])
        for start, end in itertools.pairwise((0, stack, host, usd, rest, None))
    )
    texts: dict[Cell, str] = {}
    lines = [_csv_cells((*parts, *fields, "instances", "elsewhere", "examples", "epochs"))]
    for row in ranking.offers:
        cell, values = row.cell, vars(row)
        text = texts.get(cell)
        if text is None:
            layout = None if cell.parallel is None else cell.parallel.key
            names = {"recipe": cell.recipe.key, "sparsity": cell.sparsity, "layout": layout}
            of_cell = vars(cell) | names
            text = texts[cell] = _csv_cells(tuple(of_cell[name] for name in parts))
        end = row.instances, row.elsewhere, ranking.workload.examples, row.epochs
        segments = (
            *(text, ",".join(map(str, own(values))), shared(of_offer(values))),
            *(shared(of_job(values)), ",".join(map(str, prices(values)))),
            shared((*others(values), *end)),
        )
        lines.append(",".join(segments))
    return "\n".join((*lines, ""))


def _csv_cells(values: tuple[object, ...]) -> str:
    """Neighbouring cells of a row; text is safe for spreadsheets."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(map(spreadsheet_cell, values))
    return buffer.getvalue()


def ranking_json(ranking: Ranking) -> Iterator[bytes]:
    """The ranking as JSON, offer by offer: a long one takes twice its size to be made at once."""
    others = ranking.model_copy(update={"offers": ()}).model_dump_json(indent=1).encode()
    before, key, after = others.partition(b'\n "offers": [')  # a key of the ranking itself
    yield before + key
    cells: dict[Cell, bytes] = {}  # most of the text, and the same for many offers
    for place, offer in enumerate(ranking.offers):
        if offer.cell not in cells:
            cells[offer.cell] = b'\n   "cell": ' + _json(offer.cell, b"\n   ") + b","
        # The fields before are numbers.
        first, stack, others = _json(offer, b"\n  ", without="cell").partition(b'\n   "stack": ')
        yield b"".join((b"," * bool(place), b"\n  ", first, cells[offer.cell], stack, others))
    yield (b"\n " if ranking.offers else b"") + after + b"\n"


def _json(record: Record, line_end: bytes, without: str = "") -> bytes:
    """JSON of a record, without a field, with these ends of its lines."""
    dump = record.__pydantic_serializer__.to_json
    return dump(record, indent=1, exclude={without}).replace(b"\n", line_end)
