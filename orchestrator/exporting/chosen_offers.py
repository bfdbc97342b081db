"""Training of an estimate or of a ranking, and the offers to start it on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_catalog.suggestions import did_you_mean
from orchestrator.estimating.estimate_records import Estimated, Estimates, Price
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.exporting.task_file import FORMATS, Target
from orchestrator.exporting.training import ChosenOffer, ExportError, TrainingJob
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.pricing.rental_cost import rental
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking, comparable
from orchestrator.spec.job import PACKED
from orchestrator.spec.job_tokens import job_of, steps
from orchestrator.spec.sweep_spec import SweepSpec
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.compatibility import with_defaults
from trials.records.observation import Basis, Outcome

OWN_FIELDS = {"gpu", "instances", "rdma", "is_electricity", "hours_high"}
OF_PLACEMENT = {field.name for field in dataclasses.fields(ChosenOffer)} - OWN_FIELDS
"""Fields of a placement that prices and ranked offers share."""


def estimated_training(estimates: Estimates, request: EstimateRequest) -> TrainingJob:
    """Training of the best estimate, and the offers of all GPUs that its micro-batch fits.

    Raises:
        ExportError: no estimate has a price, several lengths were given, or no task file starts the
            best layout.
    """
    if isinstance(request.seq_len, tuple):
        raise ExportError("--export is of one job: give --seq-len one length, or max")
    priced = [row for row in estimates if row.prices]
    if not priced:
        place = "in the table above" if len(estimates) else "above"
        raise ExportError(f"--export: no offer has a price for this job: the reason is {place}")
    best = priced[0]
    question, size = best.question, best.estimate.batch_size
    _check_layout(question.parallel)
    recipe = _recipe(best)
    alike = [
        row
        for row in priced
        if _recipe(row) == recipe
        and _layout(row.question.parallel) == _layout(question.parallel)
        and row.estimate.seq_len == question.seq_len
        and _largest(row) >= size
    ]
    pairs = [(row, price) for row in alike for price in row.prices]
    options, wanted = request.job, question.constraints

    def preference(pair: tuple[Estimated, Price]) -> tuple[float, float]:
        return wanted.preference(pair[1].hours, pair[1].usd)

    fields = options.fields().get("text_fields", ())
    return TrainingJob(
        model=question.model,
        recipe=recipe,
        active_experts=best.estimate.active_experts,
        seq_len=question.seq_len,
        examples=question.workload.examples,
        epochs=question.workload.epochs,
        micro_batch=size,
        groups_by_length=question.workload.padding == "grouped",
        steps=steps(
            question.workload,
            size * question.rank_recipe.micro_batches(size) * question.data_parallel_ranks,
        ),
        placements=tuple(_placement(row, price) for row, price in sorted(pairs, key=preference)),
        basis=Basis.SIMULATED,
        dataset=options.dataset,
        subset=options.subset,
        split=options.split,
        text_field=fields[0] if len(fields) == 1 else None,
        expandable_segments=request.expandable_segments,
        gpus=question.ranks,
        strategy=best.estimate.strategy,
        nodes=question.nodes,
        replicas=best.estimate.replicas,
        **_of_layout(question.parallel),
        host_gib=best.estimate.host_gib,
    )


def refused_choice(estimates: Estimates, target: Target) -> str | None:
    """Reason why a task file cannot name the recommended offer; None where it can, or none is."""
    best = next((row for row in estimates if row.prices), None)
    if best is None:
        return None
    return FORMATS[target].refuses(_placement(best, best.prices[0]))


def _layout(parallel: Parallel | None) -> Parallel | None:
    """Layout on any network: batch and command are the same."""
    return None if parallel is None else parallel.on_network(None)


def _largest(row: Estimated) -> int:
    estimate = row.estimate
    return estimate.lasting_batch_size if estimate.outcome is Outcome.FITS else 0


def _recipe(row: Estimated) -> Recipe:
    return row.question.cell(row.gpu).recipe


def _placement(row: Estimated, price: Price) -> ChosenOffer:
    overheads = row.estimate.overheads.on_nodes(price.instances)
    rented = rental(np.array([price.hours]), overheads, spot=price.market == "spot")
    return ChosenOffer(
        gpu=row.gpu.key,
        checkpoint_minutes=rented.checkpoint_minutes,
        instances=price.instances,
        rdma=bool(row.estimate.rdma),
        is_electricity=row.question.is_own,
        hours_high=price.hours_interval.high,
        **price.model_dump(include=OF_PLACEMENT),
    )


def ranked_training(  # noqa: PLR0913 - options by name
    ranking: Ranking,
    spec: SweepSpec,
    model: str | None = None,
    cell: str | None = None,
    *,
    among: OfferFilter = OfferFilter(),  # noqa: B008 - frozen
    prefers_own: bool | None = None,
) -> TrainingJob:
    """Training of the best offer of a run's ranking.

    Args:
        ranking: the ranking.
        spec: specification of the run.
        model: name of the model; None for the only one.
        cell: key of the cell, whose GPU comes first; None for the best one of the only training.
        among: filter of the offers.
        prefers_own: whether offers of the user's own come before rented ones, or after them; None
            for those of the ranking's order.

    Raises:
        ExportError: the ranking has no such offer, or offers of several trainings.
    """
    best = best_ranked(ranking, model, cell, among=among, prefers_own=prefers_own)
    parallel = best.cell.parallel
    _check_layout(parallel)
    catalog, facts = spec.merged_catalog(), spec.model(best.cell.model)
    recipe = with_defaults(best.cell.recipe, facts, catalog.gpu(best.cell.gpu))
    alike = [
        row
        for row in filter(among.allows, ranking.offers)
        if comparable(row.cell) == comparable(best.cell)
        and _layout(row.cell.parallel) == _layout(parallel)
        and row.rank >= best.rank
    ]
    size = best.batch_size
    if ranking.workload.padding in PACKED and not recipe.packing:
        raise ExportError(
            f"padding {ranking.workload.padding}: its rows are not those of TRL: use a recipe with "
            "packing: true"
        )
    job = job_of(ranking.workload, recipe, best.cell.seq_len)
    job = job.model_copy(update={"epochs": best.epochs})
    gpus = 1 if parallel is None else parallel.gpus
    return TrainingJob(
        model=facts,
        recipe=recipe,
        active_experts=best.cell.active_experts,
        seq_len=best.cell.seq_len,
        examples=ranking.workload.examples,
        epochs=best.epochs,
        micro_batch=size,
        groups_by_length=ranking.workload.padding == "grouped",
        steps=steps(job, size * recipe.of_rank(gpus).micro_batches(size) * gpus),
        placements=tuple(_ranked(row) for row in alike if (row.largest_batch or size) >= size),
        basis=best.basis,
        gpus=gpus,
        strategy=None if parallel is None else parallel.strategy,
        nodes=best.cell.nodes,
        replicas=None if parallel is None else parallel.replicas,
        **_of_layout(parallel),
        host_gib=best.host_gib,
        on_cpu=catalog.gpu(best.cell.gpu).kind == "cpu",
    )


def best_ranked(
    ranking: Ranking,
    model: str | None,
    cell: str | None,
    *,
    among: OfferFilter,
    prefers_own: bool | None = None,
) -> RankedOffer:
    """The offer that ``ranked_training`` starts on, by the same arguments.

    Raises:
        ExportError: the ranking has no such offer, or offers of several trainings.
    """
    of_model = [row for row in ranking.offers if model in (None, row.cell.model)]
    offers = list(filter(among.allows, of_model))
    if of_model and not offers:
        raise ExportError(f"the ranking has no offer with {' '.join(among.options)}")

    def preference(row: RankedOffer) -> tuple[bool, int]:
        is_own = row.provider == OWN
        return prefers_own is not None and is_own is not prefers_own, row.rank

    return _best(sorted(offers, key=preference), model, cell)


def _best(offers: Sequence[RankedOffer], model: str | None, cell: str | None) -> RankedOffer:
    """First offer of the only training, or of a cell."""
    if cell is not None:
        of_cell = [row for row in offers if row.cell.key == cell]
        if not of_cell:
            near = did_you_mean(cell, list(dict.fromkeys(row.cell.key for row in offers)))
            of_model = f" and --model {model}" if model else ""
            raise ExportError(f"the ranking has no offer of --cell {cell}{of_model}{near}")
        return of_cell[0]
    by_training: dict[tuple[object, ...], RankedOffer] = {}
    for row in offers:
        by_training.setdefault(comparable(row.cell), row)
    first = list(by_training.values())
    if not first:
        which = f" of {model}" if model else ""
        raise ExportError(f"the ranking has no offer{which}: 'finetune-cost rank' says why")
    if len(first) > 1:
        raise ExportError(_several(first))
    return first[0]


def _of_layout(parallel: Parallel | None) -> dict[str, Any]:
    """Settings of a layout beside strategy, GPUs and copies."""
    if parallel is None:
        return {}
    on_host = parallel.shards_on_host is True
    return {"zero": parallel.zero_settings, "shards_on_host": on_host}


def _check_layout(parallel: Parallel | None) -> None:
    """Refuse a layout that no task file starts."""
    if parallel is None:
        return
    if parallel.strategy == "tp":
        raise ExportError(
            f"{parallel.key}: no task file starts tensor parallelism: choose fsdp2, hsdp or ddp"
        )
    if parallel.zero_stage is None and parallel.is_sharded and not parallel.reshards:
        raise ExportError(
            f"{parallel.key}: no task file keeps gathered weights: choose a layout without "
            "reshard_after_forward: false"
        )


def _ranked(row: RankedOffer) -> ChosenOffer:
    parallel = row.cell.parallel
    return ChosenOffer(
        gpu=row.cell.gpu,
        instances=row.instances,
        rdma=parallel is not None and bool(parallel.rdma),
        hours_high=row.hours_high,
        **row.model_dump(include=OF_PLACEMENT),
    )


def _several(first: Sequence[RankedOffer]) -> str:
    models = list(dict.fromkeys(row.cell.model for row in first))
    if len(models) == len(first):
        return f"the ranking has {len(models)} models: add --model, one of {', '.join(models)}"
    cells = "\n".join(f"  {row.cell.key}" for row in first)
    return f"the ranking has {len(first)} trainings: add --cell, one of\n{cells}"
