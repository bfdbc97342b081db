"""The command ``profile``: where the time of steps goes, on this machine and without Ray."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu
from orchestrator.estimate_options import asked_recipe
from orchestrator.estimate_question import EstimateError, plain
from orchestrator.gpu_check import machine_with, this_machines_device
from orchestrator.output import remark, say
from orchestrator.profile_tables import group_text, profile_groups
from trials.extras import importable_extras
from trials.models.model import Model, UnknownModelError, find_model
from trials.observation import Observation, largest_batch
from trials.possible import obstacle, resolved
from trials.profile import Profiled, ProfileRule
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, run_profile
from trials.recipe import Recipe
from trials.timing import TimingRule
from trials.trial import TrialTask, child_prober, run_trial
from trials.workload import Cell

TIMEOUT_SECONDS = 600.0  # as a specification has them
T = TypeVar("T")
NO_TIMING = TimingRule(warmup_steps=0, warmup_seconds=0.0, max_steps=6)


class ProfileError(ValueError):
    """What is asked cannot be profiled; a line for each reason."""


def profile_command(options: argparse.Namespace, catalog: Catalog) -> int:
    """Profiles what was asked for and tells it.

    Returns:
        0 when all of it could be profiled.
    """
    tasks = _tasks(options, catalog)
    rule = ProfileRule(steps=options.steps, training_steps=options.training_steps)
    found: list[Profiled] = []
    asked_for: set[tuple[Cell, int]] = set()
    for task in tasks:
        sizes = _sizes(options, task)
        asked_for |= {(task.cell, size) for size in sizes or (0,)}
        with child_prober(task, PROFILE_TIMEOUTS) as prober:
            asked = ProfileTask(trial=task, rule=rule, batch_sizes=sizes)
            run_profile(asked, prober, lambda each: found.append(_told(each)))
    groups = profile_groups(found)
    if options.json:
        tables = [asdict(group) for group in groups]
        raw = [each.model_dump(mode="json") for each in found]
        say(json.dumps({"profiles": raw, "tables": tables}, default=_plain))
    elif groups:
        say("\n\n".join(part for of in groups for part in group_text(of)))
    made = {(each.cell, each.batch_size) for each in found if each.profile is not None}
    return 0 if asked_for == made else 1


def _plain(record: Any) -> Any:
    return record.model_dump(mode="json")


def _tasks(options: argparse.Namespace, catalog: Catalog) -> list[TrialTask]:
    """A trial for each sparsity and length.

    Raises:
        ProfileError: some are not possible; a line for each reason.
    """
    mistakes: list[str] = []
    gpu = _or_mistake(lambda: _device(options.device, catalog), mistakes)
    model = _or_mistake(lambda: find_model(options.model), mistakes)
    asked = _or_mistake(lambda: asked_recipe(options), mistakes)
    if gpu is None or model is None or asked is None:
        raise ProfileError("\n".join(mistakes))
    recipe = resolved(asked, model, gpu)
    cells = _cells(options, gpu, model, recipe, mistakes)
    reason = obstacle(recipe, model, gpu, importable_extras())
    mistakes += [] if reason is None else [f"{gpu.key}: {reason}"]
    if mistakes:
        raise ProfileError("\n".join(dict.fromkeys(mistakes)))
    threads = machine_with(gpu, len(os.sched_getaffinity(0))).threads(gpu)
    return [
        TrialTask(
            cell=cell,
            model=model,
            gpu=gpu,
            seed=0,
            batch_limit=options.max_batch_size,
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
    except (UnknownGpuError, UnknownModelError, EstimateError) as error:
        mistakes.append(str(error))
        return None


def _device(key: str | None, catalog: Catalog) -> Gpu:
    return this_machines_device(catalog) if key is None else catalog.gpu(key)


def _cells(
    options: argparse.Namespace, gpu: Gpu, model: Model, recipe: Recipe, mistakes: list[str]
) -> list[Cell]:
    """What is asked for; what of it cannot be is added to the mistakes."""
    if options.active_experts is not None and model.experts is None:
        mistakes.append(f"--active-experts: {model.name} has no experts: leave it out")
        return []
    cells = []
    for active in options.active_experts or (model.active_experts,):
        for seq_len in options.seq_lens:
            try:
                cell = Cell(
                    gpu=gpu.key,
                    model=model.name,
                    weights=options.weights,
                    recipe=recipe,
                    experts=model.experts,
                    active_experts=active,
                    seq_len=seq_len,
                )
            except ValidationError as error:
                mistakes.append(plain(error))
                continue
            cells.append(cell)
    if options.weights == "pretrained" and model.weights is None:
        mistakes.append(f"--weights: no pretrained weights of {model.name} are known")
    return cells


def _sizes(options: argparse.Namespace, task: TrialTask) -> tuple[int, ...]:
    """The batch sizes to profile, the largest looked for; none where none fits, which is told."""
    if isinstance(options.batch_size, int):
        return (options.batch_size,)
    remark(f"{task.cell.key}: looking for the largest batch")
    seen: list[Observation] = []
    with child_prober(task) as prober:
        run_trial(task, prober, seen.append, keep_going=lambda: largest_batch(seen) is None)
    known = largest_batch(seen)
    if known is None or known[0] == 0:
        remark(f"{task.cell.key}: {_why(seen)}")
        return ()
    remark(f"{task.cell.key}: largest batch {known[0]}")
    return (known[0],) if options.batch_size == "largest" else tuple(sorted({1, known[0]}))


def _why(seen: Sequence[Observation]) -> str:
    last = seen[-1]
    return f"no batch fits: batch {last.batch_size} {last.outcome}: {last.detail}"


def _told(each: Profiled) -> Profiled:
    how = "profiled" if each.profile is not None else f"{each.outcome}: {each.detail}"
    remark(f"{each.cell.key}: batch {each.batch_size} {how} in {each.seconds:.0f} s")
    return each
