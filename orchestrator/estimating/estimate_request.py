"""Options of an estimate, and the question that they come to."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitting.families.cell_step_time import Batch
from gpu_catalog.catalog import Catalog, load_catalog
from orchestrator.datasets.dataset_reader import EXAMPLES_AT_ONCE
from orchestrator.estimating.calibration_file import constants_on
from orchestrator.estimating.choosing.layouts import StrategyOption, layouts, names_by_count
from orchestrator.estimating.choosing.recipe_choice import origin_text
from orchestrator.estimating.longest_sequence import (
    ASSUMED_TOKENS,
    check_longest,
    most_tokens,
    row_tokens,
)
from orchestrator.estimating.question import EstimateError, Question
from orchestrator.estimating.requested_gpus import (
    ALL,
    check_numbers,
    counted,
    requested_gpus,
    with_electricity,
)
from orchestrator.model_names import named_model
from orchestrator.pricing.offer_constraints import Above
from orchestrator.pricing.offer_options import OfferOptions
from orchestrator.pricing.own_cards import without_prefix
from orchestrator.pricing.price_drift import PriceDrift, young_gpus
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.request import (
    BatchOption,
    Checks,
    Counts,
    LengthOption,
    Names,
    OptionError,
    PathText,
)
from orchestrator.spec.data_kinds import wrong_kind
from orchestrator.spec.job import PACKED, Job
from orchestrator.spec.job_options import (
    JobOptions,
    OverheadOptions,
    changed_job,
    job_request,
    with_overheads,
)
from orchestrator.spec.job_request import SOURCES
from orchestrator.spec.job_tokens import job_of, of_task, rows
from orchestrator.spec.recipe_options import AUTO, RecipeOptions, recipe_of
from orchestrator.spec.trainer_defaults import fields_of_model, strategy_defaults
from trials.recipes.fields import FEWEST_PACKED, PositiveInt
from trials.recipes.parallel import ZERO_STRATEGIES, Parallel
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import OffloadOption, ZeroSettings
from trials.records.compatibility import has_square_mask
from trials.records.model import Model

DEFAULT_JOB = Job(examples=10_000, epochs=3)
BATCH_LIMIT = 65_536  # the largest batch to try
EFFECTIVE_BATCH = 16  # examples per optimizer step, assumed where nothing is stated
NODE_GPUS = 8  # GPUs of each of several nodes where their number is not given
MOST_DRAWS = 100  # seconds each; the 95th percentile needs no more


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """Options of an estimate."""

    model: PathText
    gpu: Names = ALL
    gpus: Counts | None = None
    nodes: PositiveInt = 1
    strategy: StrategyOption = "auto"
    degree: PositiveInt | None = None
    zero: ZeroSettings | None = None
    offload: OffloadOption | None = None
    memory_gib: float | None = None
    usd_per_kwh: Above | None = None
    active_experts: PositiveInt | None = None
    seq_len: LengthOption | None = None
    image_tokens: PositiveInt | None = None
    batch_size: BatchOption | None = None
    routing_draws: PositiveInt | None = None
    expandable_segments: bool = False
    steps: PositiveInt | None = None
    constants: Path | None = None
    host_speed: float | None = None
    job: JobOptions
    overheads: OverheadOptions
    recipe: RecipeOptions
    offers: OfferOptions
    prices: PriceOptions

    def __post_init__(self) -> None:
        """Leave ``packing`` to the recipe, which has an option of the same name."""
        object.__setattr__(self, "job", replace(self.job, packing=False))
        if self.seq_len == "max" and self.batch_size is None:
            object.__setattr__(self, "batch_size", 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of GPUs that train together, for names that state none; raises EstimateError."""
        check_numbers(self.gpu, self.gpus or ())
        return self.gpus or ((1,) if self.nodes == 1 else (NODE_GPUS * self.nodes,))

    @property
    def chooses_number(self) -> bool:
        """Whether the number of GPUs is chosen: neither that, nor a GPU, nor nodes are given."""
        is_open = self.gpus is None and self.nodes == 1 and self.gpu == ALL
        return is_open and self.seq_len != "max"

    def layouts(self, count: int) -> tuple[Parallel | None, ...]:
        """Layouts of so many GPUs (``layouts``); raises EstimateError."""
        own = (self.degree, self.zero)
        made = layouts(count, self.strategy, self.nodes, *own, offload=self.offload)
        if made != (None,) or self.chooses_number:
            return made
        if self.strategy in ZERO_STRATEGIES:
            raise EstimateError(
                f"{self.strategy} on one GPU shares nothing: give --gpus, 8xH100-SXM or --offload"
            )
        if self.offload not in {None, "none"}:
            raise EstimateError(
                f"--offload {self.offload} on one GPU is DeepSpeed's: give --gpus, 8xH100-SXM or "
                "--strategy deepspeed-zero3"
            )
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Names of GPUs without the number of those that train together."""
        return tuple(dict.fromkeys(counted(name)[1] for name in self.gpu))

    @property
    def chooses(self) -> bool:
        """Whether recipes are chosen; the longest sequence that fits is that of one recipe."""
        return self.recipe.is_automatic and self.seq_len != "max"


def without_electricity(request: EstimateRequest) -> EstimateRequest:
    """The request with the user's cards as any others, where electricity has no price."""
    if request.usd_per_kwh is not None:
        return request
    return replace(request, gpu=tuple(without_prefix(name) for name in request.gpu))


def checks_of(request: EstimateRequest) -> Checks:
    """Check every option by itself, so that all mistakes are reported at once."""
    checks = Checks()
    model = checks.of(model_of, request)
    prices = checks.of(request.prices.in_use)
    catalog = None if prices is None else checks.of(prices.over, prices.catalog)
    catalog = catalog or load_catalog()
    for count in checks.of(lambda: names_by_count(request.gpu, request.counts)) or ():
        checks.of(request.layouts, count)
    if checks.of(requested_gpus, request.names, request.memory_gib, catalog) is not None:
        own = request.names, request.memory_gib
        checks.of(with_electricity, *own, request.usd_per_kwh, catalog, dt.date.min)
    checks.of(request.offers.constraints, catalog)
    checks.of(constants_on, request.constants, request.host_speed)
    recipe = checks.of(_recipe, request)
    if recipe is not None:
        checks.of(_check_divides, request.batch_size, recipe)
    if model is not None:
        checks.of(_draws, request.routing_draws, model)
    checks.of(with_overheads, request.overheads, DEFAULT_JOB)
    job = checks.of(_sample_job, request, model)
    if job is not None:
        if recipe is not None:
            checks.of(_check_kind, job, recipe)
        if request.seq_len == "max":
            checks.of(check_longest, job, recipe, request.batch_size)
        lengths = request.seq_len if isinstance(request.seq_len, tuple) else (request.seq_len,)
        for tokens in lengths:
            if tokens != "max":
                checks.of(row_tokens, tokens, job, recipe)
    return checks


def question_of(request: EstimateRequest, catalog: Catalog, today: dt.date) -> Question:
    """Resolve a request into the question that every GPU is asked.

    Raises:
        DataError: the data set cannot be read.
        EstimateError: options contradict one another; a line each.
        OptionError: the recipe or the offers cannot be; a line each.
        UnknownModelError: there is no such model.
    """
    model = model_of(request)
    job = with_overheads(request.overheads, changed_job(DEFAULT_JOB, request.job, [model]))
    return question_on(request, model, job, catalog, today)


def model_of(request: EstimateRequest) -> Model:
    """The model of a request.

    Raises:
        EstimateError: its images do not go with other options.
        UnknownModelError: there is no such model, or it does not read images where they are given.
    """
    if request.image_tokens is not None:
        for name, is_given in (
            ("--seq-len max", request.seq_len == "max"),
            ("data", bool(request.job.fields().keys() & set(SOURCES))),
        ):
            if is_given:
                raise EstimateError(
                    f"--image-tokens with {name} is not estimated: give --seq-len a number of "
                    "tokens, those of images included"
                )
    return named_model(request.model, reads_images=request.image_tokens is not None)


def question_on(
    request: EstimateRequest, model: Model, job: Job, catalog: Catalog, today: dt.date
) -> Question:
    """The question of a request with this model and this job.

    Raises:
        EstimateError, OptionError: as for ``question_of``.
    """
    recipe = _recipe(request)
    _check_divides(request.batch_size, recipe)
    constraints = request.offers.constraints(catalog)
    draws = _draws(request.routing_draws, model)
    _check_kind(job, recipe)
    if request.seq_len == "max":
        check_longest(job, recipe, request.batch_size)
    assert not isinstance(request.seq_len, tuple)  # estimate_job asks for one length at a time
    tokens = most_tokens(model) if request.seq_len == "max" else request.seq_len
    stated = row_tokens(tokens, of_task(job, recipe), recipe)
    seq_len = stated or ASSUMED_TOKENS
    job = job_of(job, recipe, seq_len, request.steps)
    filled = _fields_of_model(request, recipe, model)
    if recipe.packing and request.recipe.examples_per_row is None:
        filled["examples_per_row"] = max(FEWEST_PACKED, round(job.examples / rows(job)))
    recipe = recipe.model_copy(update=filled)
    is_sized = request.steps or request.job.fields().keys() & set(SOURCES)
    given = {
        "--seq-len": stated,
        "--examples": is_sized or request.job.examples,
        "--epochs": request.job.epochs,
        "--examples-per-row": is_sized or not recipe.packing or request.recipe.examples_per_row,
    }
    return Question(
        model=model,
        recipe=recipe,
        fp16_recipe=_fp16_recipe(request, recipe).model_copy(update=filled),
        recipe_text=origin_text(request.recipe, recipe, finds_seq_len=request.seq_len == "max"),
        active_experts=request.active_experts,
        seq_len=seq_len,
        image_tokens=request.image_tokens,
        batch=_batch(request, recipe, model, job),
        batch_limit=recipe.batch_limit(BATCH_LIMIT),
        workload=job,
        constraints=constraints,
        drift=PriceDrift(job.overheads, today, seed=0, draws=0, young=young_gpus(catalog)),
        routing_draws=draws,
        # axolotl/cli/main.py:48; llamafactory/launcher.py:82
        expandable_segments=request.expandable_segments or request.recipe.trainer == "axolotl",
        expands_on_several=request.recipe.trainer == "LLaMA-Factory",
        finds_seq_len=request.seq_len == "max",
        by_default=tuple(name for name, value in given.items() if not value),
        assumes_batch=_assumed_batch(request) is not None,
    )


def varied_question(
    request: EstimateRequest, question: Question, changes: Mapping[str, Any]
) -> Question | None:
    """A question with other options; None where they contradict the given ones.

    Examples per optimizer step and per packed row stay.
    """
    kept = question.recipe.model_dump(
        include={"effective_batch", "examples_per_row"} - changes.keys()
    )
    job, cutoff = question.workload, changes.get("cutoff")
    if cutoff is not None:
        job = job.model_copy(update={"cutoff": cutoff})
    fields = {name: value for name, value in changes.items() if name in Recipe.model_fields}
    changed = replace(request, recipe=replace(request.recipe, **fields))
    try:
        recipe = _recipe(changed)
    except OptionError:
        return None
    kept |= _fields_of_model(request, recipe, question.model)
    return replace(
        question,
        recipe=recipe.model_copy(update=kept),
        fp16_recipe=_fp16_recipe(changed, recipe).model_copy(update=kept),
        batch=changes.get("batch_size") or _batch(request, recipe, question.model, job),
        seq_len=changes.get("seq_len", cutoff or question.seq_len),
        workload=job,
        expandable_segments=changes.get("expandable_segments", question.expandable_segments),
        changes={name: value for name, value in changes.items() if value is not None},
    )


def _batch(request: EstimateRequest, recipe: Recipe, model: Model, job: Job) -> Batch:
    """Batch size that is priced: the fastest where padding, or the mask, grows faster than it."""
    is_padded = job.lengths is not None and job.padding not in PACKED
    grows_faster = is_padded or has_square_mask(recipe, model)
    return request.batch_size or ("fastest" if grows_faster else "largest")


def _fp16_recipe(request: EstimateRequest, recipe: Recipe) -> Recipe:
    """Recipe on GPUs without bf16; the one of others, which they refuse, if fp16 excludes it."""
    try:
        return _recipe(request, has_bf16=False)
    except OptionError:
        return recipe


def _recipe(request: EstimateRequest, *, has_bf16: bool = True) -> Recipe:
    """Recipe of the options, with the effective batch that is assumed."""
    defaults = strategy_defaults(request.strategy)
    recipe = recipe_of(_stated(request.recipe), has_bf16=has_bf16, **defaults)
    effective_batch = _assumed_batch(request)
    if effective_batch is None:
        return recipe
    return recipe.model_copy(update={"effective_batch": effective_batch})


def _stated(options: RecipeOptions) -> RecipeOptions:
    """Options without the request to choose the others."""
    return replace(options, recipe=None) if options.recipe == AUTO else options


def _sample_job(request: EstimateRequest, model: Model | None) -> Job | None:
    """Job by the first examples of its data; None where the model that counts them is unknown."""
    options = request.job
    if "dataset" not in options.fields():
        return changed_job(DEFAULT_JOB, options, [])
    if model is None and options.tokenizer is None:
        job_request({"epochs": 1} | options.fields())
        return None
    most = min(options.most or EXAMPLES_AT_ONCE, EXAMPLES_AT_ONCE)
    return changed_job(
        DEFAULT_JOB, replace(options, most=most, others=()), [model] if model else []
    )


def _check_kind(job: Job, recipe: Recipe) -> None:
    mistake = wrong_kind(job, recipe)
    if mistake is not None:
        raise EstimateError(mistake)


def _fields_of_model(request: EstimateRequest, recipe: Recipe, model: Model) -> dict[str, Any]:
    given, is_of_file = request.recipe.given(), request.recipe.recipe_source is not None
    return fields_of_model(recipe, model, given, is_of_file=is_of_file)


def _assumed_batch(request: EstimateRequest) -> int | None:
    """Effective batch that is assumed; None where the request or its recipe decides on it.

    It is a multiple of the batch size that is asked for.
    """
    options = _stated(request.recipe)
    stated = options.recipe, options.gradient_accumulation, options.effective_batch
    if options.defaults == "plain" or any(value is not None for value in stated):
        return None
    size = request.batch_size
    return nearest_multiple(size) if isinstance(size, int) else EFFECTIVE_BATCH


def nearest_multiple(batch_size: int) -> int:
    """The multiple of a batch size that is nearest to the effective batch that is assumed."""
    return batch_size * max(1, round(EFFECTIVE_BATCH / batch_size))


def _check_divides(batch_size: BatchOption | None, recipe: Recipe) -> None:
    """Check that micro-batches of the size that is asked for add up to the effective batch."""
    effective_batch = recipe.effective_batch
    if effective_batch is None or not isinstance(batch_size, int):
        return
    if effective_batch % batch_size:
        divisors = [size for size in range(1, effective_batch + 1) if effective_batch % size == 0]
        near = min(divisors, key=lambda size: abs(size - batch_size))
        raise EstimateError(
            f"--batch-size {batch_size} does not divide --effective-batch {effective_batch}: use "
            f"{near}, or another effective batch"
        )


def _draws(draws: int | None, model: Model) -> int:
    if draws is None:
        return 0
    if model.experts is None:
        raise EstimateError(f"--routing-draws: {model.name} has no experts: leave it out")
    if draws > MOST_DRAWS:
        raise EstimateError(f"--routing-draws {draws}: each is traced: give at most {MOST_DRAWS}")
    return draws
