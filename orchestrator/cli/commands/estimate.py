"""Commands ``estimate`` and ``calibrate``."""

import argparse
import datetime as dt
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fitting.calibration_points import measured_points
from fitting.clock_calibration import calibrate
from fitting.families.cell_step_time import Batch
from gpu_catalog.catalog import Catalog, UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.cli.commands.catalog import in_use_text
from orchestrator.cli.options.inputs import asked_prices, today
from orchestrator.cli.options.job import changed_workload, given_options
from orchestrator.cli.options.offers import asked_constraints, with_overheads
from orchestrator.console import print_result, remark
from orchestrator.estimating.calibration_file import calibration_text, known_constants
from orchestrator.estimating.estimate import estimates
from orchestrator.estimating.question import EstimateError, Question, plain, possible_gpus
from orchestrator.pricing.price_drift import PriceDrift
from orchestrator.reporting.estimate_tables import as_json, as_table, explanation
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.job import Job
from orchestrator.spec.job_request import SOURCES
from orchestrator.spec.job_tokens import longest_example, longest_tokens
from orchestrator.spec.sweep_spec import written_out
from trials.records.model import Model, find_model
from trials.records.recipe import Method, Precision, Recipe
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces


def estimate(options: argparse.Namespace) -> int:
    """Simulates a job on GPUs of the catalog."""
    prices = asked_prices(options)
    catalog = prices.over(prices.catalog)
    question = asked_question(options, catalog, today())
    asked = asked_gpus(options, catalog)
    gpus, reasons = possible_gpus(question, asked)
    for reason in reasons:
        remark(reason)
    if not gpus:
        if options.json and len(asked) > 1:
            print_result("[]")
        return 1
    constants = known_constants(options.constants)
    found = estimates(question, gpus, catalog, constants, Traces(ahead=options.ahead, tell=remark))
    if options.json:
        print_result(as_json(found, one=len(asked) == 1, explain=options.explain))
        return 0
    remark(in_use_text(prices, catalog, today()))
    print_result(as_table(found, question))
    if options.explain:
        for each in found:
            print_result(f"\n{explanation(each)}")
    return 0


def calibrate_runs(options: argparse.Namespace) -> int:
    """Fits the clock's constants to what runs have measured."""
    catalog = load_catalog()
    out: Path = options.out
    folders = [RunFolder.existing(run) for run in options.runs]
    specs = [folder.spec() for folder in folders]
    models = {name: model for spec in specs for name, model in spec.models.items()}
    gpus = {gpu.key: gpu for spec in specs for gpu in spec.merged_catalog().gpus}
    gpus |= {gpu.key: gpu for gpu in catalog.gpus}
    seen = [o for folder in folders for o in folder.observations()]
    points, reasons = measured_points(seen, models, gpus, Traces(tell=remark))
    for reason in reasons:
        remark(reason)
    calibration = calibrate(points, EfficiencyConstants())
    out.write_text(f"{calibration.model_dump_json(indent=2)}\n", encoding="utf-8")
    print_result(calibration_text(calibration))
    print_result(f"\n{out}: give it to estimate and sweep as --constants {out}")
    return 0


JOB = Job(examples=15_000, epochs=10)  # where nothing else is asked for
BATCH_LIMIT = 65_536  # the largest batch to try
LORA_RANK = 16
MOST_DRAWS = 100  # seconds each; the 95th percentile needs no more


def asked_question(options: argparse.Namespace, catalog: Catalog, today: dt.date) -> Question:
    """What is asked of every GPU.

    Args:
        options: those of ``estimate``.
        catalog: where offers are from.
        today: the day that prices have moved until.

    Raises:
        DataError: the data set cannot be read.
        EstimateError: options contradict one another; a line each.
        UnknownModelError: there is no such model.
    """
    model = find_model(options.model)
    workload = with_overheads(options, changed_workload(JOB, options, [model]))
    return Question(
        model=model,
        recipe=asked_recipe(options),
        active_experts=options.active_experts,
        seq_len=_seq_len(options, workload),
        batch=options.batch_size or _batch(workload),
        batch_limit=BATCH_LIMIT,
        workload=workload,
        constraints=asked_constraints(options, catalog),
        drift=PriceDrift(workload.overheads, today, seed=0, draws=0),
        routing_draws=_draws(options, model),
        expandable_segments=options.expandable_segments,
        by_default=_not_given(options),
    )


def _batch(workload: Job) -> Batch:
    """Where larger batches are padded to more, the largest is seldom the fastest."""
    is_padded = workload.lengths is not None and workload.padding != "packed"
    return "fastest" if is_padded else "largest"


def _not_given(options: argparse.Namespace) -> tuple[str, ...]:
    """The options in whose place the job is a made-up one."""
    has_data = bool(given_options(options).keys() & set(SOURCES))
    given = {"--examples": has_data or options.examples is not None, "--epochs": options.epochs}
    return tuple(name for name, value in given.items() if not value)


def _seq_len(options: argparse.Namespace, workload: Job) -> int:
    """Tokens of the longest row, which must fit: as asked, or as the data has them."""
    longest = longest_example(workload)
    if longest is None:
        if options.seq_len is None:
            raise EstimateError("--seq-len is missing: give it, or --dataset, whose examples tell")
        return int(options.seq_len)
    if options.seq_len is not None and options.seq_len < longest:
        raise EstimateError(
            f"--seq-len {options.seq_len}: examples have up to {longest} tokens: add "
            f"--cutoff {options.seq_len}, or leave --seq-len out"
        )
    return int(options.seq_len or longest_tokens(workload, longest))


def asked_gpus(options: argparse.Namespace, catalog: Catalog) -> list[Gpu]:
    """The GPUs that are meant, with the memory that is.

    Raises:
        UnknownGpuError: one is in no catalog, and its memory was not given.
    """
    if options.gpu == "all":
        found = [gpu for gpu in catalog.gpus if gpu.kind == "cuda"]
    else:
        keys = [key.strip() for key in options.gpu.split(",") if key.strip()]
        if "all" in keys:
            raise EstimateError(f"--gpu {options.gpu}: all has every GPU in it: give it alone")
        found = [_gpu(key, catalog, options.memory_gib) for key in dict.fromkeys(keys)]
    if not found:
        raise EstimateError(
            f"--gpu {options.gpu!r} names none: give keys of 'catalog gpus', or all"
        )
    for gpu in found:
        if gpu.kind != "cuda":
            raise EstimateError(f"--gpu {gpu.key}: only CUDA GPUs are simulated; measure it")
    if options.memory_gib is None:
        return found
    if len(found) > 1:
        raise EstimateError("--memory-gib is the memory of one GPU: name it with --gpu")
    return [_with_memory(found[0], options.memory_gib, is_known=found[0] in catalog.gpus)]


def _with_memory(gpu: Gpu, memory_gib: float, *, is_known: bool) -> Gpu:
    """A GPU with another memory than the catalog's is another GPU: of that name has no offer."""
    usable = round(memory_gib * 2**30)
    key = f"{gpu.key}-{memory_gib:g}GiB" if is_known else gpu.key
    return gpu.model_copy(update={"key": key, "usable_memory_bytes": usable})


def _gpu(key: str, catalog: Catalog, memory_gib: float | None) -> Gpu:
    try:
        return catalog.gpu(key)
    except UnknownGpuError as error:
        if memory_gib is None:
            raise UnknownGpuError(
                f"{error}; or give --memory-gib for one that is not in it"
            ) from None
    try:
        # Of a GPU that does not exist yet there is memory to tell, and no time.
        return Gpu(
            key=key,
            kind="cuda",
            device_names=(key,),
            source="asked for",
            recorded=dt.date.today(),  # noqa: DTZ011 - a note, not a time
        )
    except ValidationError as error:
        raise EstimateError(f"--gpu {key!r}: {plain(error)}") from None


def _draws(options: argparse.Namespace, model: Model) -> int:
    if options.routing_draws is None:
        return 0
    if model.experts is None:
        raise EstimateError(f"--routing-draws: {model.name} has no experts: leave it out")
    if options.routing_draws > MOST_DRAWS:
        raise EstimateError(
            f"--routing-draws {options.routing_draws}: each is traced: give at most {MOST_DRAWS}"
        )
    return int(options.routing_draws)


def asked_recipe(
    options: argparse.Namespace, *, method: Method = "lora", precision: Precision | None = None
) -> Recipe:
    """The recipe that options state.

    Args:
        options: those of a recipe.
        method: unless one is stated, or a named recipe.
        precision: alike; absent for the recipe's own.

    Raises:
        EstimateError: there is no such recipe; a line for each reason.
    """
    fields: dict[str, Any] = {}
    if options.recipe is not None:
        try:
            fields = dict(written_out({"named": options.recipe}))  # type: ignore[call-overload]
        except ValueError as error:
            raise EstimateError(f"--recipe: {error}") from None
    given = {
        "method": options.method or (None if fields else method),
        "lora_rank": options.lora_rank,
        "lora_targets": None if options.lora_targets is None else options.lora_targets.split(","),
        "gradient_checkpointing": None
        if options.gradient_checkpointing is None
        else options.gradient_checkpointing == "on",
        "attention": options.attention,
        "experts": options.experts,
        "optimizer": options.optimizer,
        "precision": options.precision or (None if fields else precision),
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if fields["method"] != "full":
        fields.setdefault("lora_rank", LORA_RANK)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise EstimateError(plain(error)) from None
