"""Command ``learn``: fine-tune on a user's data and keep the training curve."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.filesize import decimal

from fitting.learning_curves import best, curves
from gpu_catalog.catalog import UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.cli.commands.estimate import asked_recipe
from orchestrator.cli.options.job import asked_workload, given_options
from orchestrator.console import print_result, remark
from orchestrator.datasets.source import DataError, DatasetSource, Mistake
from orchestrator.datasets.training_data import FEWEST_HELD_OUT, AskedData, data_mistakes, read_data
from orchestrator.estimating.question import EstimateError
from orchestrator.pricing.catalog_file import read_catalog_file
from orchestrator.reporting.sections.learning_section import learning_json, learning_section
from orchestrator.run_folder.file_names import LEARNING
from orchestrator.run_folder.learning_log import LearnedWriter
from orchestrator.running.gpu_check import this_machines_device
from orchestrator.running.learning_runner import LearningRun
from orchestrator.running.learning_task import LearningRequest
from orchestrator.spec.job_request import JobRequest, asked_rendering, own_tokenizer
from orchestrator.storage.run_storage import RunPath, StoreError
from trials.child_process.learning_child import LearnError, NoStartError
from trials.child_process.token_counter import TokenizerError, mention_own_tokenizer, tokenizer_path
from trials.records.cell import Cell, Weights
from trials.records.compatibility import incompatibility, with_defaults
from trials.records.learning import Training, curve_key
from trials.records.model import Model, UnknownModelError, find_model
from trials.records.optional_packages import importable_extras

CUTOFF = 2048  # by default, as in common trainers


def asked_learning(options: argparse.Namespace) -> LearningRequest:
    """Validate options and resolve them into a request.

    Raises:
        DataError: options are invalid or contradict one another; a line for each mistake.
        GpuCheckError: the GPU of this machine is not in the catalog.
    """
    mistakes: list[Mistake] = []
    model, gpu = None, None
    with _noting(mistakes, "model", UnknownModelError):
        model = find_model(options.model)
    with _noting(mistakes, "gpu", UnknownGpuError):
        gpu = _gpu(options)
    data = _data(options, model, mistakes)
    cells: tuple[Cell, ...] = ()
    if model is not None and gpu is not None:
        cells = tuple(_cells(options, model, gpu, mistakes))
    if mistakes:
        raise DataError([*mistakes, *([] if data is None else data_mistakes(data))])
    assert model is not None
    assert gpu is not None
    assert data is not None
    return LearningRequest(
        model=model,
        gpu=gpu,
        cells=cells,
        training=Training.model_validate(
            {name: getattr(options, name) for name in Training.model_fields}
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


def _gpu(options: argparse.Namespace) -> Gpu:
    catalog = load_catalog()
    if options.catalog is not None:
        rows = read_catalog_file(options.catalog, catalog)
        catalog = catalog.merged(rows.gpus, rows.offers)
    return this_machines_device(catalog) if options.gpu is None else catalog.gpu(options.gpu)


def _data(
    options: argparse.Namespace, model: Model | None, mistakes: list[Mistake]
) -> AskedData | None:
    fields = given_options(options)
    if "named" in fields:
        text = f"{fields['named']}: its lengths are built in, not its examples: give the data set"
        mistakes.append(Mistake("dataset", text))
        return None
    try:
        # Epochs of a job are how often it is priced; --epochs here is a maximum to train.
        workload = asked_workload(fields | {"epochs": 1})
    except DataError as error:
        mistakes += error.mistakes
        return None
    rendering = asked_rendering(workload, mistakes)
    tokenizer = _tokenizer(workload.tokenizer, model, mistakes)
    held_out = _held_out_source(options, workload, mistakes)
    count = options.held_out or 0
    if count >= 1 and (count % 1 or count < FEWEST_HELD_OUT):
        text = f"{count:g}: give a share below 1, or a number from {FEWEST_HELD_OUT}"
        mistakes.append(Mistake("held_out", text))
    if rendering is None:
        return None
    assert workload.dataset is not None  # the parser asks for it
    return AskedData(
        source=DatasetSource(workload.dataset, workload.subset, workload.split),
        rendering=rendering,
        tokenizer=tokenizer,
        choices=_listed(options.choices),
        held_out=options.held_out,
        held_out_source=held_out,
        most=workload.most,
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
    options: argparse.Namespace, workload: JobRequest, mistakes: list[Mistake]
) -> DatasetSource | None:
    """DatasetSource of the held-out set, if it is not split from the training data."""
    other, split = options.held_out_data, options.held_out_split
    if other is None and split is None:
        return None
    assert workload.dataset is not None
    subset = workload.subset if other is None else None
    source = DatasetSource(other or workload.dataset, subset, split)
    if source == DatasetSource(workload.dataset, workload.subset, workload.split):
        mistakes.append(Mistake("held_out_data", f"{source.name}: is the training data itself"))
    return source


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _cells(
    options: argparse.Namespace, model: Model, gpu: Gpu, mistakes: list[Mistake]
) -> Iterator[Cell]:
    """One cell per number of active experts; mistakes are appended."""
    weights: Weights = options.weights or ("random" if model.weights is None else "pretrained")
    if weights == "pretrained" and model.weights is None:
        text = f"pretrained: there are none for {model.name}: give random"
        mistakes.append(Mistake("weights", text))
    actives = _actives(options.active_experts, model, mistakes)
    try:
        recipe = asked_recipe(
            options,
            method="full" if weights == "random" else "lora",
            precision="fp32" if gpu.kind == "cpu" else "bf16",
        )
    except EstimateError as error:
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
            seq_len=options.cutoff or min(CUTOFF, model.positions or CUTOFF),
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
    for part in _listed(numbers) or ("",):
        if part.isdecimal() and 1 <= int(part) <= model.experts:
            actives.add(int(part))
        else:
            text = f"{part!r}: {model.name} has {model.experts} experts: give numbers up to that"
            mistakes.append(Mistake("active_experts", text))
    return sorted(actives)


def learn_command(options: argparse.Namespace, path: RunPath) -> int:
    """Train the curves that are not in the log yet, and print them all.

    Args:
        options: options of ``learn``.
        path: folder of the log.

    Returns:
        0 when every curve is complete, else 1.

    Raises:
        DataError: the options or the data are wrong; a line for each mistake.
        StoreError: the folder cannot be used.
    """
    if not isinstance(path, Path):
        raise StoreError(f"{path}: 'learn' keeps its results in a local folder: give one as --out")
    request = asked_learning(options)
    data = read_data(request.data)
    for line in data.remarks:
        remark(line)
    keys = {cell: curve_key(cell, request.training, data.facts) for cell in request.cells}
    failures = []
    with LearnedWriter(path) as writer, tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples.jsonl"
        lines = "".join(f"{example.model_dump_json()}\n" for example in data.examples)
        examples.write_text(lines, encoding="utf-8", errors="replace")
        for cell, key in keys.items():
            try:
                LearningRun(request, data, cell, key, writer).run(examples)
            except LearnError as error:
                failures.append(str(error))
                if isinstance(error, NoStartError):
                    break  # the others would not start either
        learned = [curve for curve in curves(writer.records) if curve.key in keys.values()]
    for line in failures:
        remark(line)
    if learned:
        print_result(learning_json(learned) if options.json else learning_section(learned))
        if any(best(curve).is_conclusive for curve in learned):
            remark(f"{writer.path}: 'rank RUN --epochs auto --learned {writer.path}' goes by it")
    if writer.state_bytes:
        remark(
            f"{path / LEARNING}: {decimal(writer.state_bytes)} of state, to go on from with more "
            "--epochs or --patience, or --whole: delete it when that is not wanted"
        )
    return 1 if failures else 0
