"""Training of an estimate or of a ranking, and the offers to start it on."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orchestrator.estimating.estimate_records import Estimated, Price
from orchestrator.estimating.estimate_request import EstimateRequest, Estimates
from orchestrator.exporting.training import ExportError, Placement, Training
from orchestrator.pricing.rental_cost import rental
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking, comparable
from orchestrator.spec.job import Job
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.compatibility import with_defaults
from trials.records.observation import Basis, Outcome


def estimated_training(estimates: Estimates, request: EstimateRequest) -> Training:
    """Training of the cheapest estimate, and the offers of all GPUs that its micro-batch fits.

    Raises:
        ExportError: no estimate has a price.
    """
    rows = [row for row in estimates if row.prices and row.step is not None]
    if not rows:
        raise ExportError("--export: no offer has a price for this job: see the table above")
    best = rows[0]
    assert best.step is not None  # rows have it
    question, size = best.question, best.estimate.batch_size
    recipe = best.cell.cell.recipe
    alike = [r for r in rows if r.cell.cell.recipe == recipe and _largest(r) >= size]
    pairs = [(row, price) for row in alike for price in row.prices]
    options = request.job
    fields = options.fields().get("text_fields", ())
    return Training(
        model=question.model,
        recipe=recipe,
        active_experts=best.estimate.active_experts,
        seq_len=question.seq_len,
        examples=question.workload.examples,
        epochs=question.workload.epochs,
        micro_batch=size,
        groups_by_length=question.workload.padding == "grouped",
        step_seconds=best.step.seconds,
        placements=tuple(
            _placement(row, price, question.workload)
            for row, price in sorted(pairs, key=lambda pair: pair[1].usd)
        ),
        basis=Basis.SIMULATED,
        dataset=options.dataset,
        subset=options.subset,
        split=options.split,
        text_field=fields[0] if len(fields) == 1 else None,
        expandable_segments=request.expandable_segments,
    )


def _largest(row: Estimated) -> int:
    estimate = row.estimate
    if estimate.outcome is not Outcome.FITS:
        return 0
    survives = estimate.surviving_batch_size
    return estimate.max_batch_size if survives is None else survives


def _placement(row: Estimated, price: Price, job: Job) -> Placement:
    is_spot = price.market == "spot"
    rented = rental(np.array([price.hours]), job.overheads, spot=is_spot)
    terms = {f.name: getattr(price, f.name, None) for f in dataclasses.fields(Placement)}
    return Placement(
        **terms | {"gpu": row.gpu.key, "checkpoint_minutes": rented.checkpoint_minutes}
    )


def ranked_training(ranking: Ranking, spec: SweepSpec, model: str | None = None) -> Training:
    """Training of the cheapest offer of a run's ranking.

    Args:
        ranking: the ranking.
        spec: specification of the run.
        model: name of the model; None for the only one.

    Raises:
        ExportError: the ranking has no offer, or offers of several trainings.
    """
    offers = [row for row in ranking.offers if model in (None, row.cell.model)]
    first = [row for row in offers if row.rank == 1]
    if not first:
        raise ExportError(f"the ranking has no offer{f' of {model}' if model else ''}")
    if len(first) > 1:
        raise ExportError(_several(first))
    (best,) = first
    catalog, facts = spec.merged_catalog(), spec.model(best.cell.model)
    recipe = with_defaults(best.cell.recipe, facts, catalog.gpu(best.cell.gpu))
    alike = [row for row in offers if comparable(row.cell) == comparable(best.cell)]
    size = best.batch_size
    rows_per_step = size * recipe.micro_batches(size)
    return Training(
        model=facts,
        recipe=recipe,
        active_experts=best.cell.active_experts,
        seq_len=best.cell.seq_len,
        examples=ranking.workload.examples,
        epochs=best.epochs,
        micro_batch=size,
        groups_by_length=ranking.workload.padding == "grouped",
        step_seconds=rows_per_step / best.examples_per_second,
        placements=tuple(_ranked(row) for row in alike if (row.largest_batch or size) >= size),
        basis=best.basis,
    )


def _ranked(row: RankedOffer) -> Placement:
    names = {field.name for field in dataclasses.fields(Placement)} - {"gpu"}
    return Placement(gpu=row.cell.gpu, **row.model_dump(include=names))


def _several(first: Sequence[RankedOffer]) -> str:
    models = list(dict.fromkeys(row.cell.model for row in first))
    if len(models) == len(first):
        return f"the ranking has {len(models)} models: add --model, one of {', '.join(models)}"
    cells = "\n".join(f"  {row.cell.key}" for row in first)
    return f"the ranking has {len(first)} trainings, of which a sweep to export has one:\n{cells}"
