"""What the options of ``learn`` mean."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_catalog.catalog import UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.asked_workload import AskedWorkload, asked_rendering, own_tokenizer
from orchestrator.estimate_options import asked_recipe
from orchestrator.estimate_question import EstimateError
from orchestrator.examples import DataError, Mistake, Source
from orchestrator.gpu_check import this_machines_device
from orchestrator.learn_data import FEWEST_HELD_OUT, AskedData, data_mistakes
from orchestrator.price_files import read_catalog_file
from orchestrator.workload_options import asked_workload, given_options
from trials.extras import importable_extras
from trials.learning import Training
from trials.models.model import Model, UnknownModelError, find_model
from trials.models.tokens import TokenizerError, said_of_own, tokenizer_path
from trials.possible import obstacle, resolved
from trials.recipe import Recipe
from trials.workload import Cell, Weights

CUTOFF = 2048  # unless told: as far as trainers go by default
CPU = "cpu"
OF_A_JOB = frozenset({"epochs"})  # options of the same name that say something else here


@dataclass(frozen=True, slots=True)
class AskedLearning:
    """What is to be learnt.

    Attributes:
        model: what learns.
        gpu: where.
        cells: one for each number of active experts, the fewest first.
        training: how.
        data: from what.
        whole: all epochs, though learning has stopped.
        checkpoints: whether the state is kept after each epoch.
        threads: CPU threads a step may use.
    """

    model: Model
    gpu: Gpu
    cells: tuple[Cell, ...]
    training: Training
    data: AskedData
    whole: bool
    checkpoints: bool
    threads: int


def asked_learning(options: argparse.Namespace) -> AskedLearning:
    """What is to be learnt.

    Raises:
        DataError: the options cannot be, or contradict one another; a line for each mistake.
        GpuCheckError: the catalog does not know the GPU of this machine.
    """
    mistakes: list[Mistake] = []
    model = _model(options.model, mistakes)
    gpu = _gpu(options, mistakes)
    data = _data(options, model, mistakes)
    cells: tuple[Cell, ...] = ()
    if model is not None and gpu is not None:
        cells = tuple(_cells(options, model, gpu, mistakes))
    if mistakes:
        raise DataError([*mistakes, *([] if data is None else data_mistakes(data))])
    assert model is not None
    assert gpu is not None
    assert data is not None
    return AskedLearning(
        model=model,
        gpu=gpu,
        cells=cells,
        training=Training(
            learning_rate=options.learning_rate,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps,
            batch_size=options.batch_size,
            epochs=options.epochs,
            patience=options.patience,
            seed=options.seed,
            cutoff=cells[0].seq_len,
        ),
        data=data,
        whole=options.whole,
        checkpoints=not options.no_checkpoints,
        threads=options.threads or len(os.sched_getaffinity(0)),
    )


def _model(name: str, mistakes: list[Mistake]) -> Model | None:
    try:
        return find_model(name)
    except UnknownModelError as error:
        mistakes.append(Mistake("model", str(error)))
        return None


def _gpu(options: argparse.Namespace, mistakes: list[Mistake]) -> Gpu | None:
    catalog = load_catalog()
    if options.catalog is not None:
        rows = read_catalog_file(options.catalog, catalog)
        catalog = catalog.merged(rows.gpus, rows.offers)
    if options.gpu is None:
        return this_machines_device(catalog)
    try:
        return catalog.gpu(options.gpu)
    except UnknownGpuError as error:
        mistakes.append(Mistake("gpu", str(error)))
        return None


def _data(
    options: argparse.Namespace, model: Model | None, mistakes: list[Mistake]
) -> AskedData | None:
    fields = given_options(options)
    if "named" in fields:
        name = fields["named"]
        mistakes.append(
            Mistake(
                "dataset",
                f"{name}: the lengths of {name} are known, not its queries: name the data itself",
            )
        )
        return None
    fields = {name: value for name, value in fields.items() if name not in OF_A_JOB}
    try:
        asked = asked_workload(fields | {"epochs": 1})
    except DataError as error:
        mistakes += error.mistakes
        return None
    rendering = asked_rendering(asked, mistakes)
    tokenizer = _tokenizer(asked.tokenizer, model, mistakes)
    held_out = _held_out_source(options, asked, mistakes)
    if options.held_out is not None and options.held_out >= 1:
        part = options.held_out % 1
        if part or options.held_out < FEWEST_HELD_OUT:
            text = f"{options.held_out:g}: give a share below 1, or a number from {FEWEST_HELD_OUT}"
            mistakes.append(Mistake("held_out", text))
    if rendering is None:
        return None
    assert asked.dataset is not None  # the parser asks for it
    return AskedData(
        source=Source(asked.dataset, asked.subset, asked.split),
        rendering=rendering,
        tokenizer=tokenizer,
        choices=_listed(options.choices),
        held_out=options.held_out,
        held_out_source=held_out,
        most=asked.most,
        seed=options.seed,
    )


def _tokenizer(name: str | None, model: Model | None, mistakes: list[Mistake]) -> str:
    """Whose tokens queries are made of: the model's own, unless one is named."""
    own = own_tokenizer([model], mistakes) if name is None and model is not None else ""
    named = name or own
    if not named:
        return ""
    try:
        path = tokenizer_path(named)
    except TokenizerError as error:
        text = said_of_own(str(error), own) if own else str(error)
        mistakes.append(Mistake("tokenizer", text))
        return ""
    return named if own or path is None else str(path)


def _held_out_source(
    options: argparse.Namespace, asked: AskedWorkload, mistakes: list[Mistake]
) -> Source | None:
    """Where held-out queries are, if not among the others."""
    other, split = options.held_out_data, options.held_out_split
    if other is None and split is None:
        return None
    assert asked.dataset is not None
    subset = asked.subset if other is None else None
    source = Source(other or asked.dataset, subset, split)
    if source == Source(asked.dataset, asked.subset, asked.split):
        mistakes.append(Mistake("held_out_data", f"{source.name}: is what is learnt from"))
    return source


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _cells(
    options: argparse.Namespace, model: Model, gpu: Gpu, mistakes: list[Mistake]
) -> Iterator[Cell]:
    """A cell for each number of active experts; what is wrong is added to the mistakes."""
    weights: Weights = options.weights or ("random" if model.weights is None else "pretrained")
    if weights == "pretrained" and model.weights is None:
        mistakes.append(
            Mistake("weights", f"pretrained: none of {model.name} are known: give random")
        )
    actives = _actives(options.active_experts, model, mistakes)
    try:
        recipe = asked_recipe(
            options,
            method="full" if weights == "random" else "lora",
            precision="fp32" if gpu.kind == "cpu" else "bf16",
        )
    except EstimateError as error:
        mistakes += [_said(line) for line in str(error).split("\n")]
        return
    recipe = resolved(recipe, model, gpu)
    reason = obstacle(recipe, model, gpu, importable_extras())
    if reason is not None:
        mistakes.append(Mistake("recipe", reason))
        return
    for active in actives:
        yield _cell(model, gpu, recipe, active, weights, options.cutoff)


def _cell(  # noqa: PLR0913, PLR0917 - what a cell is
    model: Model,
    gpu: Gpu,
    recipe: Recipe,
    active: int | None,
    weights: Weights,
    cutoff: int | None,
) -> Cell:
    return Cell(
        gpu=gpu.key,
        model=model.name,
        weights=weights,
        recipe=recipe,
        experts=model.experts,
        active_experts=active,
        seq_len=cutoff or min(CUTOFF, model.positions or CUTOFF),
    )


def _said(line: str) -> Mistake:
    """A mistake that may name its option already."""
    name, colon, text = line.partition(": ")
    if colon and name.startswith("--"):
        return Mistake(name.removeprefix("--").replace("-", "_"), text)
    return Mistake("recipe", line)


def _actives(asked: str | None, model: Model, mistakes: list[Mistake]) -> Sequence[int | None]:
    """How many experts are to be active, one curve each."""
    if model.experts is None:
        if asked is not None:
            text = f"{asked}: {model.name} has no experts: leave it out"
            mistakes.append(Mistake("active_experts", text))
        return [None]
    if asked is None:
        return sorted({model.active_experts or model.experts, model.experts})
    found = []
    for part in _listed(asked) or ("",):
        if part.isdecimal() and 1 <= int(part) <= model.experts:
            found.append(int(part))
        else:
            text = f"{part!r}: {model.name} has {model.experts} experts: give numbers up to that"
            mistakes.append(Mistake("active_experts", text))
    return sorted(set(found))
