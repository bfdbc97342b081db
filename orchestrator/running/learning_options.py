"""Options of learning, and the request that they come to."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_catalog.catalog import UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.datasets.source import DataError, DatasetSource, Mistake
from orchestrator.datasets.training_data import FEWEST_HELD_OUT, TrainingDataRequest, data_mistakes
from orchestrator.pricing.catalog_file import read_catalog_file
from orchestrator.request import Names, OptionError, names_in
from orchestrator.running.gpu_check import device_of
from orchestrator.spec.job_options import JobOptions, job_request
from orchestrator.spec.job_request import JobRequest, own_tokenizer, requested_rendering
from orchestrator.spec.recipe_options import RecipeOptions, recipe_of, recipe_text
from trials.child_process.token_counter import TokenizerError, mention_own_tokenizer, tokenizer_path
from trials.recipes.optional_packages import importable_extras
from trials.records.cell import Cell, Weights
from trials.records.compatibility import has_bf16, incompatibility, with_defaults
from trials.records.learning import Schedule, Training
from trials.records.model import Model, UnknownModelError, find_model

CUTOFF = 2048  # by default, as in common trainers
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearningRequest:
    """A request to learn."""

    model: Model
    gpu: Gpu
    cells: tuple[Cell, ...]
    training: Training
    data: TrainingDataRequest
    whole: bool
    checkpoints: bool
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """Options of ``learn``."""

    model: str
    gpu: str | None = None
    catalog: Path | None = None
    weights: Weights | None = None
    active_experts: str | None = None
    choices: Names = ()
    held_out: float | None = None
    held_out_data: str | None = None
    held_out_split: str | None = None
    epochs: int = 10
    batch_size: int = 8
    learning_rate: float = 5e-5
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    patience: int = 2
    seed: int = 0
    whole: bool = False
    no_checkpoints: bool = False
    threads: int | None = None
    job: JobOptions
    recipe: RecipeOptions


def learning_request(options: LearnOptions) -> LearningRequest:
    """Validate options and resolve them into a request.

    Raises:
        DataError: options are invalid or contradict one another; a line for each mistake.
        GpuCheckError: the GPU of this machine is not in the catalog.
    """
    mistakes: list[Mistake] = []
    if options.recipe.packing:
        text = "learn trains on padded batches: leave it out"
        mistakes.append(Mistake("packing", text))
        options = replace(options, job=replace(options.job, packing=False))
    model, gpu = None, None
    with _noting(mistakes, "model", UnknownModelError):
        model = find_model(options.model)
    with _noting(mistakes, "gpu", UnknownGpuError):
        gpu = _gpu(options)
    data = _data(options, model, mistakes)
    cells = () if model is None or gpu is None else tuple(_cells(options, model, gpu, mistakes))
    if mistakes or model is None or gpu is None or data is None:
        raise DataError([*mistakes, *([] if data is None else data_mistakes(data))])
    logger.info("%s", recipe_text(options.recipe, cells[0].recipe))
    return LearningRequest(
        model=model,
        gpu=gpu,
        cells=cells,
        training=Training.model_validate(
            {name: getattr(options, name) for name in Training.model_fields if name != "cutoff"}
            | {"cutoff": cells[0].seq_len}
        ),
        data=data,
        whole=options.whole,
        checkpoints=not options.no_checkpoints,
        threads=options.threads or len(os.sched_getaffinity(0)),
    )


@contextlib.contextmanager
def _noting(mistakes: list[Mistake], part: str, expected: type[Exception]) -> Iterator[None]:
    """Append an expected error to the mistakes, and go on."""
    try:
        yield
    except expected as error:
        mistakes.append(Mistake(part, str(error)))


def _gpu(options: LearnOptions) -> Gpu:
    catalog = load_catalog()
    if options.catalog is not None:
        rows = read_catalog_file(options.catalog, catalog)
        catalog = catalog.merged(rows.gpus, rows.offers)
    return device_of(options.gpu, catalog)


def _data(
    options: LearnOptions, model: Model | None, mistakes: list[Mistake]
) -> TrainingDataRequest | None:
    fields = options.job.fields()
    if "named" in fields:
        text = f"{fields['named']}: its lengths are built in, not its examples: give the data set"
        mistakes.append(Mistake("dataset", text))
        return None
    try:
        # Epochs of a job are how often it is priced; --epochs here is a maximum to train.
        job = job_request(fields | {"epochs": 1})
    except DataError as error:
        mistakes += error.mistakes
        return None
    rendering = requested_rendering(job, mistakes)
    tokenizer = _tokenizer(job.tokenizer, model, mistakes)
    held_out = _held_out_source(options, job, mistakes)
    count = options.held_out or 0
    if count >= 1 and (count % 1 or count < FEWEST_HELD_OUT):
        text = f"{count:g}: give a share below 1, or a number from {FEWEST_HELD_OUT}"
        mistakes.append(Mistake("held_out", text))
    if rendering is None:
        return None
    assert job.dataset is not None  # the parser asks for it
    return TrainingDataRequest(
        source=DatasetSource(job.dataset, job.subset, job.split),
        rendering=rendering,
        tokenizer=tokenizer,
        choices=options.choices,
        held_out=options.held_out,
        held_out_source=held_out,
        most=job.most,
        seed=options.seed,
    )


def _tokenizer(name: str | None, model: Model | None, mistakes: list[Mistake]) -> str:
    """Name of the tokenizer: the model's own by default."""
    own = own_tokenizer([model], mistakes) if name is None and model is not None else ""
    named = name or own
    if not named:
        return ""
    try:
        path = tokenizer_path(named)
    except TokenizerError as error:
        text = mention_own_tokenizer(str(error), own) if own else str(error)
        mistakes.append(Mistake("tokenizer", text))
        return ""
    return named if own or path is None else str(path)


def _held_out_source(
    options: LearnOptions, job: JobRequest, mistakes: list[Mistake]
) -> DatasetSource | None:
    """Source of the held-out set, if it is not split from the training data."""
    other, split = options.held_out_data, options.held_out_split
    if other is None and split is None:
        return None
    assert job.dataset is not None
    subset = job.subset if other is None else None
    source = DatasetSource(other or job.dataset, subset, split)
    if source == DatasetSource(job.dataset, job.subset, job.split):
        mistakes.append(Mistake("held_out_data", f"{source.name}: is the training data itself"))
    return source


def _cells(
    options: LearnOptions, model: Model, gpu: Gpu, mistakes: list[Mistake]
) -> Iterator[Cell]:
    """One cell per number of active experts; mistakes are appended."""
    weights: Weights = options.weights or ("random" if model.weights is None else "pretrained")
    if weights == "pretrained" and model.weights is None:
        text = f"pretrained: there are none for {model.name}: give random"
        mistakes.append(Mistake("weights", text))
    actives = _actives(options.active_experts, model, mistakes)
    task = options.recipe.task or "sft"
    if task != "sft":
        mistakes.append(Mistake("task", f"{task}: learn trains by sft alone: leave it out"))
        return
    try:
        recipe = recipe_of(
            options.recipe,
            method="full" if weights == "random" else "lora",
            precision="fp32" if gpu.kind == "cpu" else None,
            loss="full-logits",  # every loss gives the same curve, and this one needs no package
            has_bf16=has_bf16(gpu),
        )
    except OptionError as error:
        mistakes += [_of_line(line) for line in str(error).split("\n")]
        return
    recipe = with_defaults(recipe, model, gpu)
    reason = incompatibility(recipe, model, gpu, importable_extras())
    if reason is not None:
        mistakes.append(Mistake("recipe", reason))
        return
    for active in actives:
        yield Cell(
            gpu=gpu.key,
            model=model.name,
            weights=weights,
            recipe=recipe,
            experts=model.experts,
            active_experts=active,
            seq_len=options.job.cutoff or min(CUTOFF, model.positions or CUTOFF),
        )


def _of_line(line: str) -> Mistake:
    """A mistake of a line that may name its option."""
    name, colon, text = line.partition(": ")
    if colon and name.startswith("--"):
        return Mistake(name.removeprefix("--").replace("-", "_"), text)
    return Mistake("recipe", line)


def _actives(numbers: str | None, model: Model, mistakes: list[Mistake]) -> Sequence[int | None]:
    """Numbers of active experts, one curve each."""
    if model.experts is None:
        if numbers is not None:
            text = f"{numbers}: {model.name} has no experts: leave it out"
            mistakes.append(Mistake("active_experts", text))
        return [None]
    if numbers is None:
        return sorted({model.active_experts or model.experts, model.experts})
    actives = set()
    for part in names_in(numbers) or ("",):
        if part.isdecimal() and 1 <= int(part) <= model.experts:
            actives.add(int(part))
        else:
            text = f"{part!r}: {model.name} has {model.experts} experts: give numbers up to that"
            mistakes.append(Mistake("active_experts", text))
    return sorted(actives)
