"""Estimates as a user asks for them: options in, an estimate for each GPU out."""

import datetime as dt
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.calibration_file import constants_on
from orchestrator.estimating.choosing.boxes import BoxSearch
from orchestrator.estimating.choosing.layouts import (
    best_layouts,
    names_by_count,
    on_changed_layout,
    on_layout,
    placed_layouts,
)
from orchestrator.estimating.choosing.recipe_choice import (
    best_recipes,
    fits,
    jobs_on,
    recipes_to_try,
    sparing_recipes,
)
from orchestrator.estimating.choosing.remedies import (
    ALL_CHANGES,
    ON_GPU,
    SETTINGS,
    Alteration,
    is_fragmented,
    largest_misfits,
    with_remedies,
)
from orchestrator.estimating.estimate import by_objective, estimates
from orchestrator.estimating.estimate_records import Estimated, Estimates
from orchestrator.estimating.estimate_request import (
    BATCH_LIMIT,
    EstimateRequest,
    checks_of,
    question_of,
    varied_question,
)
from orchestrator.estimating.longest_sequence import at_longest, lengths_among, lengths_up_to
from orchestrator.estimating.question import EstimatedJob, EstimateError, Question
from orchestrator.estimating.requested_gpus import (
    ByOwner,
    by_owner,
    left_out_of_all,
    with_electricity,
)
from orchestrator.estimating.varying_memory import traced_lengths
from trials.simulation.length_traces import LengthTraces, RankTraces, TraceSource
from trials.simulation.memory.streams import load_replay
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import TraceError, Traces

log = logging.getLogger(__name__)


def estimate_job(request: EstimateRequest, today: dt.date) -> Estimates:
    """Simulate a job on GPUs of the catalog, at prices that have moved until ``today``.

    Raises:
        UserError: options, data, model or prices are wrong, or the model cannot be traced.
    """
    traces = RankTraces(Traces(report=log.info, meanwhile=load_replay))
    if not isinstance(request.seq_len, tuple):
        return _estimates(request, today, traces)
    shared = LengthTraces(traces, lengths_among(request.seq_len))
    parts = [
        _estimates(replace(request, seq_len=tokens), today, shared)
        for tokens in sorted(request.seq_len)
    ]
    return replace(
        parts[0],
        estimated=tuple(row for part in parts for row in part),
        skipped=tuple(dict.fromkeys(line for part in parts for line in part.skipped)),
    )


def _estimates(request: EstimateRequest, today: dt.date, traces: TraceSource) -> Estimates:
    """Estimates for one length, or for the longest that fits each GPU."""
    try:
        prices = request.prices.in_use()
        catalog = prices.over(prices.catalog)
        requested = {
            count: by_owner(names, request.memory_gib, catalog)
            for count, names in names_by_count(request.gpu, request.counts).items()
        }
        offered = with_electricity(
            request.names, request.memory_gib, request.usd_per_kwh, catalog, today
        )
        constants = constants_on(request.constants, request.host_speed)
        question = question_of(request, catalog, today)
    except UserError:
        checks_of(request).raise_errors()
        raise

    simulation = Simulation(offered, constants, traces)
    if request.chooses_number:
        estimated, reasons = best_boxes(requested[1][False], request, question, simulation)
    else:
        estimated, reasons = _of_counts(requested, request, question, simulation)
    return Estimates(
        estimated=tuple(sorted(estimated, key=by_objective)),
        question=estimated[0].question if estimated else question,
        skipped=tuple(dict.fromkeys([*reasons, *left_out_of_all(request.names, catalog)])),
        prices=prices.age(catalog, today),
    )


OnGpus = tuple[Question, Sequence[Gpu]]


def best_boxes(
    gpus: Sequence[Gpu], request: EstimateRequest, question: Question, simulation: "Simulation"
) -> tuple[list[Estimated], list[str]]:
    """Estimate the best number of each GPU: one, or as many as an instance has.

    Changes that make the job fit are looked for where no number fits; those that take a trace of
    all layers only where none of any GPU does.

    Returns:
        The estimates, and the reason against each GPU that cannot be estimated.
    """
    (on_one,) = request.layouts(1)
    alone = on_layout(question, on_one, BATCH_LIMIT)
    rows, against = best_on([(alone, gpus)], request, simulation)
    reasons = list(against.values())
    search = BoxSearch(
        strategy=request.strategy,
        layouts=request.layouts,
        catalog=simulation.catalog,
        estimated_jobs=simulation.of(question).estimates,
        best_on=lambda on_layouts: best_on(on_layouts, request, simulation)[0],
    )
    try:
        rows = search.best(rows, question)
    except TraceError as error:  # an answer for one GPU of each is better than none
        reasons = [*reasons, f"several GPUs: {error}"]
    alterations = ON_GPU if any(map(fits, rows)) else ALL_CHANGES
    return remedied(rows, request, simulation, alterations), reasons


def _of_counts(
    requested: Mapping[int, ByOwner],
    request: EstimateRequest,
    question: Question,
    simulation: "Simulation",
) -> tuple[list[Estimated], list[str]]:
    """Estimate each number of each GPU that was asked for, by the best of its strategies.

    GPUs that the user owns are estimated apart from rented ones of the same kind, unless the job
    has no time on them: then both rows are the same.

    Returns:
        The estimates, and the reason against each GPU that cannot be estimated.
    """
    on_layouts: list[OnGpus] = []
    refused: list[str] = []
    for count, groups in requested.items():
        for is_own, gpus in groups.items():
            by_kind = replace(question, is_own=is_own)
            try:
                on_layouts += _on_layouts(count, gpus, request, by_kind, simulation)
            except EstimateError as error:
                refused.append(str(error))
    if refused and not on_layouts:
        raise EstimateError("\n".join(dict.fromkeys(refused)))
    estimated, against = best_on(on_layouts, request, simulation)
    # What does not fit is equal by the objective, and so stays in this order.
    rows = best_layouts(sorted(estimated, key=lambda row: row.estimate.gpus))
    answered = {(row.estimate.gpus, row.gpu.key) for row in rows}
    missing = [reason for key, reason in against.items() if key not in answered]
    own = [row for row in rows if row.question.is_own]
    timeless = {row.estimate.gpu for row in own if row.step is None}
    rented = [row for row in rows if not row.question.is_own]
    same = {row.estimate.gpu for row in rented} & timeless
    missing += [
        f"{gpu}, rented: not priced, because the job has no step time on it" for gpu in sorted(same)
    ]
    rented = [row for row in rented if row.estimate.gpu not in same]
    remedied_rows = [_remedied_counts(some, request, simulation) for some in (own, rented)]
    return list(chain.from_iterable(remedied_rows)), [*refused, *missing]


def _on_layouts(
    count: int,
    gpus: Sequence[Gpu],
    request: EstimateRequest,
    question: Question,
    simulation: "Simulation",
) -> list[OnGpus]:
    """The question on each layout of so many GPUs; raises EstimateError where they have none."""
    return [
        (on_layout(question, placed, BATCH_LIMIT), some)
        for layout in request.layouts(count)
        for placed, some in placed_layouts(layout, gpus, simulation.catalog, question.allows)
    ]


def _remedied_counts(
    rows: Sequence[Estimated], request: EstimateRequest, simulation: "Simulation"
) -> list[Estimated]:
    """Estimates of several numbers of GPUs with changes that make the job fit.

    They are looked for on the largest number of each GPU of which none fits. On others, it is
    settings alone, where the job is fragmented.
    """
    helped = {row.placement: row for row in rows}
    largest = largest_misfits(rows)
    sought = {row.placement for row in largest}
    others = [row for row in rows if row.placement not in sought and is_fragmented(row)]
    for misfits, alterations in ((largest, ALL_CHANGES), (others, SETTINGS)):
        for row in remedied(misfits, request, simulation, alterations):
            helped[row.placement] = row
    return list(helped.values())


@dataclass(frozen=True, slots=True)
class Simulation:
    """Prices, constants and traces that estimates are made with."""

    catalog: Catalog
    constants: EfficiencyConstants
    traces: TraceSource

    def at_lengths(self, lengths: Sequence[int]) -> Self:
        """The same with traces at a few lengths, which determine all others."""
        return replace(self, traces=LengthTraces(self.traces, lengths))

    def of(self, question: Question) -> Self:
        """The same with traces at the lengths that a question's data need."""
        return self.at_lengths(traced_lengths(question.workload, question.seq_len))

    def estimates(self, jobs: Sequence[EstimatedJob]) -> list[Estimated]:
        """Estimate each job on its GPU, in their order.

        Raises:
            TraceError: the model cannot be traced under a recipe.
        """
        return estimates(jobs, self.catalog, self.constants, self.traces)


def estimates_on(
    gpus: Sequence[Gpu], request: EstimateRequest, question: Question, simulation: Simulation
) -> tuple[list[Estimated], list[str]]:
    """Estimate on each GPU, by the recipes that the request leaves to choose.

    Returns:
        The estimates, with a change that fits where none does; and the reason against each GPU
        that cannot be estimated.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    rows, against = best_on([(question, gpus)], request, simulation)
    return remedied(rows, request, simulation), list(against.values())


def best_on(
    on_layouts: Sequence[OnGpus], request: EstimateRequest, simulation: Simulation
) -> tuple[list[Estimated], dict[tuple[int, str], str]]:
    """Estimate the best recipe on each GPU under each layout, whether or not it fits.

    The layouts' traces are made together: a process takes longer to start than to trace one.

    Returns:
        The estimates, and the reason against each number of a GPU that cannot be estimated, by
        that number and the GPU's key.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    jobs: list[EstimatedJob] = []
    sparing: list[EstimatedJob] = []
    against: dict[tuple[int, str], str] = {}
    for question, gpus in on_layouts:
        varied = partial(varied_question, request, question)
        groups = recipes_to_try(request.recipe, varied) if request.chooses else [[question]]
        some, reasons = jobs_on(groups, gpus)
        jobs += some
        against |= {(question.ranks, key): reason for key, reason in reasons.items()}
        if request.chooses:
            able = {gpu.key: gpu for _, gpu in some}
            sparing += jobs_on(sparing_recipes(request.recipe, varied), list(able.values()))[0]
    if not jobs:
        return [], against
    first, _ = jobs[0]
    if first.finds_seq_len:
        simulation = simulation.at_lengths(lengths_up_to(first.seq_len))
        return simulation.estimates(at_longest(jobs, simulation.traces)), against
    return best_recipes(jobs, simulation.of(first).estimates, sparing), against


def remedied(
    rows: Sequence[Estimated],
    request: EstimateRequest,
    simulation: Simulation,
    alterations: Sequence[Alteration] = ALL_CHANGES,
) -> list[Estimated]:
    """Estimates with the cheapest change that fits where the batch does not.

    Args:
        rows: estimates.
        request: the request.
        simulation: prices, constants and traces.
        alterations: kinds of changes to try.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    if not rows or rows[0].question.finds_seq_len:
        return list(rows)
    question = rows[0].question
    estimated_jobs = simulation.of(question).estimates
    shorter_jobs = simulation.at_lengths(lengths_up_to(question.seq_len // 2)).estimates

    def varied(question: Question, changes: Mapping[str, Any]) -> Question | None:
        if "offload" in changes and request.offload == "none":
            return None
        placed = on_changed_layout(question, changes, request.strategy, BATCH_LIMIT)
        return None if placed is None else varied_question(request, placed, changes)

    return with_remedies(
        rows,
        varied,
        estimated_jobs,
        shorter_jobs,
        alterations=alterations,
        trainer=request.recipe.trainer,
    )
