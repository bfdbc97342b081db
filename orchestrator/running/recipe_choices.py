"""Recipes that a specification leaves open, chosen by simulation as in an estimate."""

import datetime as dt
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.estimate_job import Simulation, estimates_on
from orchestrator.estimating.estimate_request import EstimateRequest, question_on
from orchestrator.estimating.longest_sequence import lengths_among
from orchestrator.estimating.question import Question
from orchestrator.pricing.offer_options import OfferOptions
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.reporting.sections.alternative_recipes import chosen_recipe
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.job import Job
from orchestrator.spec.job_options import JobOptions, OverheadOptions
from orchestrator.spec.job_tokens import longest_example
from orchestrator.spec.recipe_options import AUTO, ChosenRecipe, OpenCell, RecipeOptions
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.spec.trainer_defaults import RecipeDefaults
from trials.records.compatibility import has_bf16, incompatibility, with_defaults
from trials.simulation.length_traces import LengthTraces
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces

logger = logging.getLogger(__name__)


class RecipeChoiceError(UserError):
    """No recipe can be chosen for a cell; one line with the reason."""


def with_chosen_recipes(
    spec: SweepSpec,
    folder: RunFolder,
    catalog: Catalog,
    constants: EfficiencyConstants,
    today: dt.date,
) -> SweepSpec:
    """Choose the recipes that a specification leaves open, or take those of its run.

    Raises:
        RecipeChoiceError: no recipe of a cell can be simulated.
        TraceError: the model cannot be traced under a recipe.
    """
    if spec.open_cells():
        spec = spec.with_chosen(folder.chosen_recipes())
    cells = spec.open_cells()
    if not cells:
        return spec
    logger.info("%s: choosing recipes of %d cells by simulation", folder.path, len(cells))
    traces = Traces(report=logger.info)
    chosen: list[ChosenRecipe] = []
    for lengths in _alike(cells):
        shared = LengthTraces(traces, lengths_among(list(lengths)))
        simulation = Simulation(catalog, constants, shared)
        for of_length in lengths.values():
            chosen += _chosen(spec, of_length, simulation, today)
    return spec.with_chosen(chosen)


def _alike(cells: Sequence[OpenCell]) -> list[dict[int, list[OpenCell]]]:
    """Cells by length, for each model with the same stated fields."""
    groups: defaultdict[str, dict[int, list[OpenCell]]] = defaultdict(dict)
    for cell in cells:
        key = repr((cell.model, cell.stated, cell.active_experts))
        groups[key].setdefault(cell.seq_len, []).append(cell)
    return list(groups.values())


def _chosen(
    spec: SweepSpec, cells: Sequence[OpenCell], simulation: Simulation, today: dt.date
) -> Iterator[ChosenRecipe]:
    """Choose on each GPU of cells that differ in nothing else."""
    first = cells[0]
    request = _request(spec, first)
    job = _job_at(spec.workload, first)
    catalog, model = simulation.catalog, spec.model(first.model)
    where = f"{model.name} at {first.seq_len} tokens, recipe auto"
    try:
        question = question_on(request, model, job, catalog, today)
        gpus = [catalog.gpu(cell.gpu) for cell in cells]
        estimated, reasons = estimates_on(gpus, request, question, simulation)
    except UserError as error:
        raise RecipeChoiceError(f"{where}: {error}") from None
    rows = {row.gpu.key: row for row in estimated}
    for cell, gpu in zip(cells, gpus, strict=True):
        choice = chosen_recipe(cell, rows[gpu.key]) if gpu.key in rows else None
        choice = choice or _impossible(cell, question, gpu)
        if choice is None:
            raise RecipeChoiceError("\n".join(f"{where}: {reason}" for reason in reasons))
        yield choice


def _request(spec: SweepSpec, cell: OpenCell) -> EstimateRequest:
    """The request of an estimate that chooses the same."""
    words = {name: "none" if value is None else value for name, value in cell.stated.items()}
    defaults: RecipeDefaults | None = "plain" if spec.recipe_defaults == "plain" else None
    return EstimateRequest(
        model=cell.model,
        active_experts=cell.active_experts,
        seq_len=cell.seq_len,
        batch_size=spec.workload.batch_size,
        recipe=RecipeOptions(recipe=AUTO, defaults=defaults, **words),
        job=JobOptions(),
        overheads=OverheadOptions(),
        offers=OfferOptions(),
        prices=PriceOptions(),
    )


def _job_at(job: Job, cell: OpenCell) -> Job:
    """The job, on full examples where its own are longer than those of the cell."""
    longest = longest_example(job)
    if longest is None or longest <= cell.seq_len or cell.stated.get("packing"):
        return job
    return job.model_copy(update={"lengths": None, "padding": "longest"})


def _impossible(cell: OpenCell, question: Question, gpu: Gpu) -> ChosenRecipe | None:
    """The default recipe on a GPU that cannot run it, so that the plan skips the cell."""
    stated = question.recipe if has_bf16(gpu) else question.fp16_recipe
    recipe = with_defaults(stated, question.model, gpu)
    reason = incompatibility(recipe, question.model, gpu)
    if reason is None:
        return None
    return ChosenRecipe(cell=cell, recipe=recipe, reason=reason, runners_up=())
