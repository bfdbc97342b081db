"""A profile of steps as a user asks for it: options in, profiles out."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.request import OptionError, PathText, validation_lines
from orchestrator.running.gpu_check import device_of, machine_with
from orchestrator.spec.recipe_options import RecipeOptions, recipe_of, recipe_text
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, profiles
from trials.recipes.optional_packages import importable_extras
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell, Weights
from trials.records.compatibility import has_bf16, incompatibility, with_defaults
from trials.records.model import Model, UnknownModelError, find_model
from trials.records.observation import Observation, largest_batch
from trials.records.profile import Profiled, ProfileRule
from trials.records.timing_rule import TimingRule
from trials.run_trial import child_prober, run_trial
from trials.trial import TrialTask

TIMEOUT_SECONDS = 600.0  # the default of a specification
NO_TIMING = TimingRule(warmup_steps=0, warmup_seconds=0.0, max_steps=6)
T = TypeVar("T")
logger = logging.getLogger(__name__)


class ProfileError(UserError):
    """A profile that cannot be made; a line for each reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Options of a profile."""

    model: PathText
    device: str | None = None
    active_experts: tuple[int, ...] | None = None
    seq_lens: tuple[int, ...]
    batch_size: int | str | None = None
    max_batch_size: int = 1024
    weights: Weights = "random"
    steps: int = 3
    training_steps: int = 10
    recipe: RecipeOptions


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profiles, and whether there is one for everything that was asked for."""

    profiled: tuple[Profiled, ...]
    is_complete: bool


def run_profiles(request: ProfileRequest, catalog: Catalog) -> Profiles:
    """Profile a few steps of each sparsity and length, in child processes.

    Raises:
        ProfileError: a cell is impossible; a line for each reason.
    """
    rule = ProfileRule(steps=request.steps, training_steps=request.training_steps)
    profiled: list[Profiled] = []
    wanted: set[tuple[Cell, int]] = set()

    def keep(profile: Profiled) -> None:
        result = "profiled"
        if profile.profile is None:
            result = f"{profile.outcome}: {profile.detail}"
        batch = f"{profile.cell.key}: batch {profile.batch_size}"
        logger.info("%s %s in %.0f s", batch, result, profile.seconds)
        profiled.append(profile)

    for task in _tasks(request, catalog):
        sizes = _sizes(request.batch_size, task)
        wanted |= {(task.cell, size) for size in sizes or (0,)}
        with child_prober(task, PROFILE_TIMEOUTS) as prober:
            for profile in profiles(ProfileTask(trial=task, rule=rule, batch_sizes=sizes), prober):
                keep(profile)
    made = {(p.cell, p.batch_size) for p in profiled if p.profile is not None}
    return Profiles(tuple(profiled), wanted == made)


def _tasks(request: ProfileRequest, catalog: Catalog) -> list[TrialTask]:
    """Make a task for each sparsity and length, or report every reason why one is impossible."""
    mistakes: list[str] = []
    gpu = _or_mistake(lambda: device_of(request.device, catalog), mistakes)
    model = _or_mistake(lambda: find_model(request.model), mistakes)
    on_bf16 = gpu is None or has_bf16(gpu)
    stated = _or_mistake(lambda: recipe_of(request.recipe, has_bf16=on_bf16), mistakes)
    if gpu is None or model is None or stated is None:
        raise ProfileError("\n".join(mistakes))
    recipe = with_defaults(stated, model, gpu)
    cells = _cells(request, gpu, model, recipe, mistakes)
    reason = incompatibility(recipe, model, gpu, importable_extras())
    mistakes += [] if reason is None else [f"{gpu.key}: {reason}"]
    if mistakes:
        raise ProfileError("\n".join(dict.fromkeys(mistakes)))
    logger.info("%s", recipe_text(request.recipe, recipe))
    threads = machine_with(gpu, len(os.sched_getaffinity(0))).threads(gpu)
    return [
        TrialTask(
            cell=cell,
            model=model,
            gpu=gpu,
            seed=0,
            batch_limit=cell.recipe.batch_limit(request.max_batch_size),
            boundary_repeats=0,
            timing=NO_TIMING,
            build_timeout_seconds=TIMEOUT_SECONDS,
            probe_timeout_seconds=TIMEOUT_SECONDS,
            threads=threads,
        )
        for cell in cells
    ]


def _or_mistake(make: Callable[[], T], mistakes: list[str]) -> T | None:
    try:
        return make()
    except (UnknownGpuError, UnknownModelError, OptionError) as error:
        mistakes.append(str(error))
        return None


def _cells(
    request: ProfileRequest, gpu: Gpu, model: Model, recipe: Recipe, mistakes: list[str]
) -> list[Cell]:
    """The cells of a request; the reasons why cells are impossible are added to the mistakes."""
    if request.active_experts is not None and model.experts is None:
        mistakes.append(f"--active-experts: {model.name} has no experts: leave it out")
        return []
    cells = []
    for active in request.active_experts or (model.active_experts,):
        for seq_len in request.seq_lens:
            try:
                cell = Cell(
                    gpu=gpu.key,
                    model=model.name,
                    weights=request.weights,
                    recipe=recipe,
                    experts=model.experts,
                    active_experts=active,
                    seq_len=seq_len,
                )
            except ValidationError as error:
                mistakes.append(validation_lines(error))
                continue
            cells.append(cell)
    if request.weights == "pretrained" and model.weights is None:
        mistakes.append(f"--weights: no pretrained weights of {model.name} are known")
    return cells


def _sizes(batch_size: int | str | None, task: TrialTask) -> tuple[int, ...]:
    """Batch sizes to profile, by a search for the largest; none where not even one example fits."""
    if isinstance(batch_size, int):
        return (batch_size,)
    key = task.cell.key
    logger.info("%s: searching for the largest batch", key)
    observations: list[Observation] = []
    with child_prober(task) as prober:
        run_trial(
            task,
            prober,
            observations.append,
            keep_going=lambda: largest_batch(observations) is None,
        )
    largest = largest_batch(observations)
    if largest is None or largest[0] == 0:
        last = observations[-1]
        outcome = f"{last.outcome}: {last.detail}"
        logger.info("%s: no batch fits: batch %d %s", key, last.batch_size, outcome)
        return ()
    logger.info("%s: largest batch %d", key, largest[0])
    return (largest[0],) if batch_size == "largest" else tuple(sorted({1, largest[0]}))
