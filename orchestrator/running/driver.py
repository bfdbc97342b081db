"""The driver of a sweep's measurements: plan, execute what the strategy wants, plan again."""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from orchestrator.planning.cluster_resources import ClusterResources, this_machine
from orchestrator.planning.measurement_cost import Budget, remaining_work
from orchestrator.planning.plan import Plan
from orchestrator.pricing.catalog_file import THIS_MACHINE
from orchestrator.ray_backend.cluster import cluster_address, connected_cluster
from orchestrator.ray_backend.errors import RayEndedError
from orchestrator.ray_backend.own_ray import own_ray, report_logs
from orchestrator.ray_backend.tune_loggers import Tool
from orchestrator.reporting.sections.cost_text import expected_text
from orchestrator.run_folder.file_names import PLAN
from orchestrator.running.recorder import RunJournal
from orchestrator.running.session import SweepSession
from orchestrator.scheduling.strategy import Strategy, to_measure
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell

if TYPE_CHECKING:
    from orchestrator.running.trial_executor import TrialExecutor

logger = logging.getLogger(__name__)
STARTS_IN_VAIN = 3  # of a Ray of the sweep's own, each of which ends before a verdict


class PlanError(UserError):
    """A strict sweep would skip cells; a line for the cells of each GPU and reason."""


def measure(
    session: SweepSession, strategy: Strategy, *, wait_seconds: float, log_to: Sequence[Tool] = ()
) -> Plan:
    """Measure what a strategy wants, time slow cells again, then profile.

    Ray is started, or joined, only if there is work for it.

    Returns:
        The plan that is left.
    """
    folder = session.folder
    makes_profiles = session.spec.profile and strategy.makes_profiles
    plan = session.plan(this_machine(), folder.observations())
    to_profile = makes_profiles and session.largest_to_profile(plan)
    if cluster_address() is None and not to_measure(plan) and not to_profile:
        session.writer.write(PLAN, plan)
        log_skipped(plan)
        if plan.complete and not plan.pending:
            logger.info("%s: nothing left to measure; another --out measures anew", folder.path)
        return plan
    logger.info("%s: %s", folder.path, "on Ray" if cluster_address() else "starting Ray")
    # Ray may delete the working directory of a Ray job under it: nodes that share a machine share
    # the copy, and the first one to finish removes it. Ray's workers import from the driver's
    # working directory first, so it is one that no user writes to.
    os.chdir("/")
    with own_ray() if cluster_address() is None else nullcontext() as ray_folder:
        return _measure_on_rays(
            session, strategy, ray_folder, wait_seconds=wait_seconds, log_to=log_to
        )


def _measure_on_rays(
    session: SweepSession,
    strategy: Strategy,
    ray_folder: Path | None,
    *,
    wait_seconds: float,
    log_to: Sequence[Tool],
) -> Plan:
    """Measure as ``measure`` does, on another Ray each time that the driver's own has ended.

    Args:
        session: the run.
        strategy: what to measure.
        ray_folder: folder for the driver's own Rays; None where it joins another.
        wait_seconds: longest wait for a node.
        log_to: tools that the trials are logged to.

    Raises:
        RayEndedError: several in a row have ended before a verdict.
    """
    journal = RunJournal(session.folder, session.writer, session.rates)
    in_vain = 0
    while True:
        before = session.writer.verdicts
        try:
            with connected_cluster(
                ask_for_packages=needs_extras(session.spec), folder=ray_folder
            ) as cluster:
                # Tune takes seconds to import, and only work needs it.
                from orchestrator.running.trial_executor import TrialExecutor  # noqa: PLC0415

                executor = TrialExecutor(
                    session,
                    cluster,
                    journal,
                    wait_seconds=wait_seconds,
                    budget_usd=strategy.budget_usd,
                )
                plan = _measure_on_ray(executor, cluster, strategy, log_to)
        except RayEndedError as error:
            in_vain = 0 if session.writer.verdicts > before else in_vain + 1
            if in_vain == STARTS_IN_VAIN:
                raise RayEndedError(
                    f"{error}, {in_vain} times in a row: free some memory, and run the same "
                    "command again, which continues where this stopped"
                ) from None
            logger.warning("%s; starting Ray again", error)
            strategy.start_again()
        else:
            if ray_folder is not None and (executor.no_node or executor.died):
                report_logs(ray_folder)  # which say why no worker started, or why workers died
            return plan


def _measure_on_ray(
    executor: "TrialExecutor", cluster: ClusterResources, strategy: Strategy, log_to: Sequence[Tool]
) -> Plan:
    """Measure as ``measure`` does, on one Ray.

    Raises:
        RayEndedError: it was the driver's own, and has ended.
    """
    session = executor.session
    makes_profiles = session.spec.profile and strategy.makes_profiles
    observations, plan = executor.replan()
    log_skipped(plan)
    log_stand_ins(plan, cluster, session.rates.catalog)
    budget = Budget(strategy.budget_usd, executor.spent_usd, makes_profiles)
    work = remaining_work(session.spec, session.rates, cluster, plan, observations)
    for line in expected_text(work, budget, session.rates):
        logger.info(line)
    while wanted := strategy.wanted(plan, observations, executor.spent_usd):
        executor.measure(wanted, plan, log_to)
        observations, plan = executor.replan()
    if executor.retime_slow_cells():  # which may complete a cell
        _, plan = executor.replan()
    if makes_profiles:
        executor.profile(plan)
    return plan


def needs_extras(spec: SweepSpec) -> bool:
    """Whether a recipe needs a package that not every node has."""
    return any(cell.recipe.extras for cell in spec.all_cells())


def refuse_skipped(plan: Plan) -> None:
    """Refuse a plan that skips cells.

    Raises:
        PlanError: it does; one line for the cells of a GPU and reason.
    """
    if plan.skipped:
        text = f"--strict: {len(plan.skipped)} trials cannot be had, nothing was started"
        raise PlanError("\n".join([*_skipped_lines(plan), text]))


def log_skipped(plan: Plan) -> None:
    """Log the skipped cells with their reasons."""
    for line in _skipped_lines(plan):
        logger.info("skipped %s", line)


def log_stand_ins(plan: Plan, cluster: ClusterResources, catalog: Catalog) -> None:
    """Log the CPUs of pending cells that no node declares, so that any node's cores run them."""
    pending = dict.fromkeys(cell.device for cell in plan.pending if not cell.simulated)
    cpus = [
        gpu for gpu in map(catalog.gpu, pending) if gpu.kind == "cpu" and gpu.key != THIS_MACHINE
    ]
    for gpu in cpus:
        resources = cluster.trial_resources(gpu)
        if resources is not None and gpu.key not in resources:
            logger.warning(
                "%s: no node declares this CPU, so any node's cores measure its trials; a node of "
                "its own declares it by ray start --resources",
                gpu.key,
            )


def _skipped_lines(plan: Plan) -> Iterator[str]:
    """A line for the skipped cells of each GPU and reason."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for skip in plan.skipped:
        groups[skip.cell.key_parts[0], skip.reason].append(skip.cell)
    for (gpu, reason), cells in groups.items():
        which = cells[0].key if len(cells) == 1 else f"{len(cells)} trials on {gpu}"
        yield f"{which}: {reason}"
