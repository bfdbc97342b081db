"""Estimates as a user asks for them: options in, an estimate for each GPU out."""

import datetime as dt
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.estimating.choosing.layouts import (
    best_layouts,
    layouts,
    names_by_count,
    on_layout,
)
from orchestrator.estimating.choosing.recipe_choice import (
    best_recipes,
    for_comparison,
    jobs_on,
    recipes_to_try,
)
from orchestrator.estimating.choosing.remedies import with_remedies
from orchestrator.estimating.estimate import by_objective, estimates, simulations
from orchestrator.estimating.estimate_records import Estimated, Estimates
from orchestrator.estimating.estimate_request import (
    BATCH_LIMIT,
    EstimateRequest,
    checks_of,
    question_of,
    varied_question,
    with_electricity,
)
from orchestrator.estimating.longest_sequence import at_longest, lengths_among, lengths_up_to
from orchestrator.estimating.question import EstimatedJob, Question
from orchestrator.estimating.requested_gpus import requested_gpus
from orchestrator.estimating.varying_memory import traced_lengths
from trials.simulation.length_traces import LengthTraces, TraceSource
from trials.simulation.memory.streams import load_replay
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces
from trials.simulation.tracing_child import TracingChild

log = logging.getLogger(__name__)


def estimate_job(
    request: EstimateRequest, today: dt.date, ahead: list[TracingChild] | None = None
) -> Estimates:
    """Simulate a job on GPUs of the catalog, at prices that have moved until ``today``.

    ``ahead`` are child processes that have started already; see ``Traces``.

    Raises:
        UserError: options, data, model or prices are wrong, or the model cannot be traced.
    """
    traces = Traces(ahead=ahead, report=log.info, meanwhile=load_replay)
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
            count: requested_gpus(names, request.memory_gib, catalog)
            for count, names in names_by_count(request.gpu, request.gpus).items()
        }
        offered = with_electricity(request, catalog, today)
        constants = known_constants(request.constants)
        question = question_of(request, catalog, today)
    except UserError:
        checks_of(request).raise_errors()
        raise

    simulation = Simulation(offered, constants, traces)
    _prepare(requested, request, question, simulation)
    estimated: list[Estimated] = []
    reasons: list[str] = []
    for count, gpus in requested.items():
        rows, against = _estimates_of_count(gpus, count, request, question, simulation)
        estimated += rows
        reasons += against
    return Estimates(
        estimated=tuple(sorted(estimated, key=by_objective)),
        question=estimated[0].question if estimated else question,
        skipped=tuple(dict.fromkeys(reasons)),
        prices=prices.age(catalog, today),
    )


def _prepare(
    requested: Mapping[int, Sequence[Gpu]],
    request: EstimateRequest,
    question: Question,
    simulation: "Simulation",
) -> None:
    """Make the traces of all layouts at once: a process takes longer to start than to trace one."""
    on_layouts = [
        (on_layout(question, layout, BATCH_LIMIT), gpus)
        for count, gpus in requested.items()
        for layout in layouts(count, request.strategy)
    ]
    if len(on_layouts) > 1 and not question.finds_seq_len:
        jobs = [job for one, gpus in on_layouts for job in _jobs(gpus, request, one)[0]]
        lengths = traced_lengths(question.workload, question.seq_len)
        compared = [(for_comparison(job), gpu) for job, gpu in jobs]
        simulations(compared, simulation.at_lengths(lengths).traces)


def _jobs(
    gpus: Sequence[Gpu], request: EstimateRequest, question: Question
) -> tuple[list[EstimatedJob], list[str]]:
    """Jobs of each GPU by the recipes that the request leaves to choose.

    Returns:
        The jobs, and the reason against each GPU that can run none.
    """
    varied = partial(varied_question, request, question)
    groups = recipes_to_try(request.recipe, varied) if request.chooses else [[question]]
    return jobs_on(groups, gpus)


def _estimates_of_count(
    gpus: Sequence[Gpu],
    count: int,
    request: EstimateRequest,
    question: Question,
    simulation: "Simulation",
) -> tuple[list[Estimated], list[str]]:
    """Estimates of so many GPUs of each kind, by the best of the strategies asked for.

    Returns:
        The estimates, and the reason against each GPU that cannot be estimated.
    """
    rows: list[Estimated] = []
    reasons: list[str] = []
    for layout in layouts(count, request.strategy):
        on_gpus = on_layout(question, layout, BATCH_LIMIT)
        some, against = estimates_on(gpus, request, on_gpus, simulation)
        rows += some
        reasons += against
    keys = {row.gpu.key for row in rows}
    missing = [r for r in reasons if r.partition(":")[0].removeprefix(f"{count}x") not in keys]
    return best_layouts(rows), missing


@dataclass(frozen=True, slots=True)
class Simulation:
    """Prices, constants and traces that estimates are made with."""

    catalog: Catalog
    constants: EfficiencyConstants
    traces: TraceSource

    def at_lengths(self, lengths: Sequence[int]) -> Self:
        """The same with traces at a few lengths, which determine all others."""
        return replace(self, traces=LengthTraces(self.traces, lengths))

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
        The estimates, and the reason against each GPU that cannot be estimated.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    jobs, reasons = _jobs(gpus, request, question)
    estimated: list[Estimated] = []
    if jobs and question.finds_seq_len:
        simulation = simulation.at_lengths(lengths_up_to(question.seq_len))
        estimated = simulation.estimates(at_longest(jobs, simulation.traces))
    elif jobs:
        lengths = traced_lengths(question.workload, question.seq_len)
        estimated_jobs = simulation.at_lengths(lengths).estimates
        shorter_jobs = simulation.at_lengths(lengths_up_to(question.seq_len // 2)).estimates
        best = best_recipes(jobs, estimated_jobs)
        varied = partial(varied_question, request, question)
        estimated = with_remedies(best, varied, estimated_jobs, shorter_jobs)
    return estimated, reasons
