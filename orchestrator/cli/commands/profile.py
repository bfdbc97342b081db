"""Command ``profile``: where a step's time goes."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.cli.commands.estimate import asked_recipe
from orchestrator.cli.options.inputs import asked_prices
from orchestrator.console import print_result, remark
from orchestrator.estimating.question import EstimateError, plain
from orchestrator.reporting.sections.profile_groups import profile_groups
from orchestrator.reporting.sections.profile_section import group_text
from orchestrator.running.gpu_check import machine_with, this_machines_device
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, run_profile
from trials.records.cell import Cell
from trials.records.compatibility import incompatibility, with_defaults
from trials.records.model import Model, UnknownModelError, find_model
from trials.records.observation import Observation, largest_batch
from trials.records.optional_packages import importable_extras
from trials.records.profile import Profiled, ProfileRule
from trials.records.recipe import Recipe
from trials.records.timing_rule import TimingRule
from trials.trial import TrialTask, child_prober, run_trial


def profile(options: argparse.Namespace) -> int:
    """Says where the time of a cell's steps goes."""
    return profile_command(options, asked_prices(options).catalog)


TIMEOUT_SECONDS = 600.0  # as a specification has them
T = TypeVar("T")
NO_TIMING = TimingRule(warmup_steps=0, warmup_seconds=0.0, max_steps=6)


class ProfileError(UserError):
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
        print_result(json.dumps({"profiles": raw, "tables": tables}, default=_plain))
    elif groups:
        print_result("\n\n".join(part for of in groups for part in group_text(of)))
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
    recipe = with_defaults(asked, model, gpu)
    cells = _cells(options, gpu, model, recipe, mistakes)
    reason = incompatibility(recipe, model, gpu, importable_extras())
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
