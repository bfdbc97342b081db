"""Commands that measure, or plan to. Results go to stdout, progress and remarks to stderr."""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fitting.families import fit_families
from gpu_catalog.catalog import Catalog
from orchestrator.adaptive import Adaptive
from orchestrator.calibration import known_constants
from orchestrator.catalog_commands import in_use_text
from orchestrator.cluster import cluster_address, connected_cluster, this_machine
from orchestrator.command_tools import (
    asked_prices,
    given_run_path,
    now,
    run_and_prices,
    spec_text,
    tell,
    today,
)
from orchestrator.constraints import OfferFilter
from orchestrator.driver import (
    Everything,
    Strategy,
    measure,
    needs_extras,
    payable_gpus,
    refuse_skipped,
    simulate,
    to_measure,
)
from orchestrator.effort import Purse, expected, what_is_left
from orchestrator.folder_results import plan_of
from orchestrator.gpu_check import (
    gpu_check_spec_text,
    gpu_of_this_machine,
    in_order_of_value,
    machine_with,
    time_is_left,
)
from orchestrator.job_options import asked_offers
from orchestrator.keeping import Keeper
from orchestrator.known_prices import KnownPrices
from orchestrator.local_runner import run_trials_here
from orchestrator.memory_tables import limits_section
from orchestrator.next_measurements import Choice, choices, measurable, measured_cells
from orchestrator.next_tables import decisions, next_table
from orchestrator.output import remark, say
from orchestrator.place import RunPath
from orchestrator.plan import SCALES_TO, ClusterResources, Node, Plan, make_plan, trial_task
from orchestrator.progress import Progress
from orchestrator.ranking import too_long
from orchestrator.rented import Rates
from orchestrator.report import cheapest_section, headline
from orchestrator.run_commands import PAGE, REPORT, derive, troubles
from orchestrator.spec_file import SpecError, parse_spec
from orchestrator.spending import Meter
from orchestrator.store import PLAN, RENTED, SPEC, ObservationWriter, RunFolder, open_run
from orchestrator.sweep import SweepSpec
from orchestrator.tables import table
from orchestrator.tune_loggers import check_tools
from trials.observation import Observation, by_cell


def sweep(options: argparse.Namespace) -> int:
    """Measures what a specification asks for and is not known yet, then fits and ranks."""
    prices, text, spec = _given_sweep(options)
    constants = known_constants(options.constants)
    folder = given_run_path(options.out, spec.name)
    catalog = prices.over(spec.merged_catalog())
    rented = _asked_rented(options, catalog)
    _tell_misfits(spec)
    if options.dry_run or options.strict:
        known = RunFolder(folder).observations()
        plan, cluster = _plan_without_starting(spec, catalog, known)
        if options.strict:
            refuse_skipped(plan)
        if options.dry_run:
            rates = _rates(catalog, RunFolder(folder), rented)
            left = what_is_left(spec, rates, cluster, plan, known)
            spent = _meter(spec, rates, RunFolder(folder)).usd or 0.0
            profiled = spec.profile and not options.adaptive
            purse = Purse(options.budget_usd, spent, profiled)
            _print_plan(plan, folder, expected(left, purse, rates), cluster, catalog)
            if profiled:
                remark("what is measured is then profiled, at one query and at its largest batch")
            return 0
    check_tools(options.log_to, folder)
    folder_run = open_run(folder, text, spec, prices.rows)
    wait_seconds: float = options.wait_for_nodes * 60
    with ObservationWriter(folder_run) as writer:
        rates = _rates(catalog, folder_run, rented)  # the writer may have found what was not sent
        _keep_rented(folder_run, writer, rates)
        if options.adaptive:
            # What is simulated tells what to expect of what is measured.
            plan = make_plan(spec, catalog, this_machine(), folder_run.observations())
            simulate(folder_run, writer, spec, plan, constants)
            strategy: Strategy = Adaptive(spec, rates, options.budget_usd)
            if spec.profile:
                remark("profile: an adaptive sweep makes no profiles: resume it without --adaptive")
        else:
            strategy = Everything(spec, rates, options.budget_usd)
        profiled = spec.profile and not options.adaptive
        plan = measure(
            folder_run,
            writer,
            spec,
            rates,
            strategy,
            wait_seconds=wait_seconds,
            profile=profiled,
            log_to=options.log_to,
        )
        if not options.adaptive:
            plan = simulate(folder_run, writer, spec, plan, constants)
    ranking = derive(folder_run, spec, catalog, plan, now())
    tell(troubles(folder_run.faults(), folder_run.observations()))
    remark(in_use_text(prices, catalog, today()))
    say(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    say(f"\nEvery offer, the fits and the limits: {folder_run.path / PAGE}, and {REPORT} to read")
    if options.adaptive:
        found = _choices(spec, rates, plan, folder_run.observations())
        if not any(choice.leader.is_measured for choice in found):
            remark("nothing was measured that a choice could be made by: see Left out")
            return 1
        say(f"\n{decisions(found)}")
        return 0
    return end_of_sweep(spec, rates, plan, folder_run, options.budget_usd)


def end_of_sweep(
    spec: SweepSpec, rates: Rates, plan: Plan, folder: RunFolder, budget_usd: float | None
) -> int:
    """Tells what a sweep cost, and what it did not get to."""
    observations = folder.observations()
    meter = _meter(spec, rates, folder)
    tell(meter.text())
    purse = Purse(budget_usd, meter.usd or 0.0)
    paid = payable_gpus(spec, rates, to_measure(plan), observations, purse)
    unpaid = [c for c in to_measure(plan) if c.device not in paid or meter.reaches(budget_usd)]
    tried = {gone.cell for gone in plan.given_up}
    for_budget = [cell for cell in unpaid if cell not in tried]
    if for_budget:
        keys = ", ".join(cell.key for cell in for_budget)
        remark(
            f"{len(for_budget)} trials are left out for the budget of ${budget_usd:g}: {keys}: "
            "the same command with a larger one goes on"
        )
    failed = [cell for cell in plan.pending if cell not in for_budget]
    if failed:
        keys = ", ".join(cell.key for cell in failed)
        remark(f"{len(failed)} trials did not finish: {keys}: the reasons stand under Left out")
        return 1
    if not plan.complete and not plan.pending:
        remark("nothing was measured: every trial was skipped, for the reasons above")
        return 1
    return 0


def _asked_rented(options: argparse.Namespace, catalog: Catalog) -> OfferFilter | None:
    """What nodes are said to be rented as; None where nothing is said.

    Raises:
        JobError: no offer is of a provider or region that was given.
    """
    asked = asked_offers(options, catalog)
    is_said = any(each is not None for each in (options.providers, options.regions, options.spot))
    return asked if is_said else None


def _rates(catalog: Catalog, folder: RunFolder, asked: OfferFilter | None) -> Rates:
    """What nodes cost: as they are said to be rented now, else as the run has it."""
    kept = folder.rented()
    return Rates(catalog, kept if asked is None else kept.model_copy(update={"offers": asked}))


def _keep_rented(folder: RunFolder, writer: ObservationWriter, rates: Rates) -> None:
    """Whoever goes on with the run, or looks at it, prices it alike."""
    if rates.rented != folder.rented():
        writer.write(RENTED, rates.rented)


def _meter(spec: SweepSpec, rates: Rates, folder: RunFolder) -> Meter:
    return Meter(spec, rates, folder.logged(), folder.faults().faults)


def _tell_misfits(spec: SweepSpec) -> None:
    """Which cells are no good for the job of the specification, though they can be measured."""
    cells = spec.all_cells()
    misfits = [too_long(spec.workload, cell, cells) for cell in cells]
    for reason, count in Counter(reason for reason in misfits if reason is not None).items():
        remark(f"{count} of {len(misfits)} cells cannot be ranked for this job: {reason}")


def plan_run(options: argparse.Namespace) -> int:
    """What is to be measured of a specification or a run; or what of it would help most."""
    given: Path | str | None = options.given
    if isinstance(given, str) or (given is not None and (given / SPEC).exists()):
        folder = RunFolder.existing(given)
        prices, spec = run_and_prices(folder, options)
        plan, cluster = plan_of(folder, spec), this_machine()
        catalog = prices.over(spec.merged_catalog())
    else:
        prices = asked_prices(options)
        text, name = spec_text(given)
        spec = parse_spec(text, name, base=prices.catalog)
        folder = RunFolder(given_run_path(None, spec.name))
        catalog = prices.over(spec.merged_catalog())
        plan, cluster = _plan_without_starting(spec, catalog, folder.observations())
    rates = _rates(catalog, folder, _asked_rented(options, catalog))
    if not options.next:
        known = folder.observations()
        left = what_is_left(spec, rates, cluster, plan, known)
        lines = expected(left, Purse(profiles=spec.profile), rates)
        _print_plan(plan, folder.path, lines, cluster, catalog)
        _tell_what_a_cluster_takes(spec, rates, cluster, plan, known)
        return 0
    found = _choices(spec, rates, None, folder.observations())
    remark(in_use_text(prices, catalog, today()))
    say(next_table(found, options.most))
    return 0


def _choices(
    spec: SweepSpec, rates: Rates, plan: Plan | None, observations: Sequence[Observation]
) -> list[Choice]:
    """The GPUs to choose from: a plan's, or all that could be rented and measured."""
    cells = measurable(spec, rates.catalog) if plan is None else measured_cells(plan)
    return choices(spec, rates, cells, observations, fit_families(observations))


def gpu_check(options: argparse.Namespace) -> int:
    """Measures the GPU of this machine without Ray, and goes on where an earlier check ended."""
    path = given_run_path(options.out, "gpu-check")
    prices = asked_prices(options, RunFolder(path).catalog_rows())
    catalog = prices.over(prices.catalog)
    gpu = gpu_of_this_machine(catalog)
    text = gpu_check_spec_text(gpu, catalog)
    spec = parse_spec(text, "gpu-check", base=prices.catalog)
    run = open_run(path, text, spec, prices.rows)
    machine = machine_with(gpu, len(os.sched_getaffinity(0)))
    with ObservationWriter(run) as writer:
        known = run.observations()
        plan = make_plan(spec, catalog, machine, known)
        run.write(PLAN, plan)
        cells = in_order_of_value(spec, plan)
        of_cell, threads = by_cell(known), machine.threads(gpu)
        tasks = [trial_task(spec, catalog, cell, of_cell[cell], threads=threads) for cell in cells]
        with Progress(cells, complete=len(plan.complete), known=known) as progress:
            keeper = Keeper(writer, progress)
            run_trials_here(tasks, keeper, time_is_left(options.seconds, keeper.seen))
        plan = make_plan(spec, catalog, machine, run.observations())
        run.write(PLAN, plan)
    derive(run, spec, catalog, plan, now())
    say(limits_section(spec.all_cells(), run.observations()))
    left = [cell for cell in cells if cell in plan.pending]
    say(f"\n{len(cells) - len(left)} of {len(cells)} cells done; the report: {run.path / PAGE}")
    if left:
        remark(f"{len(left)} cells are left: run the same command again to go on")
    return 0


def _plan_without_starting(
    spec: SweepSpec, catalog: Catalog, known: Sequence[Observation]
) -> tuple[Plan, ClusterResources]:
    """What would be done, and on which nodes."""
    if cluster_address() is None:
        return make_plan(spec, catalog, this_machine(), known), this_machine()
    with connected_cluster(ask_for_packages=needs_extras(spec)) as cluster:
        return make_plan(spec, catalog, cluster, known), cluster


def _tell_what_a_cluster_takes(
    spec: SweepSpec,
    rates: Rates,
    cluster: ClusterResources,
    plan: Plan,
    known: Sequence[Observation],
) -> None:
    """Hours and dollars of the GPUs that are not here, if a node of each could be started."""
    catalog = rates.catalog
    skipped = dict.fromkeys(skip.cell.device for skip in plan.skipped)
    absent = [catalog.gpu(key) for key in skipped if not cluster.nodes_for(catalog.gpu(key))]
    nodes = tuple(Node({SCALES_TO + gpu.key: 1.0}) for gpu in absent)
    there = ClusterResources((*cluster.nodes, *nodes))
    with_them = make_plan(spec, catalog, there, known)
    left = [
        each
        for each in what_is_left(spec, rates, there, with_them, known)
        if each.gpu in {gpu.key for gpu in absent}
    ]
    if left:
        keys = ", ".join(each.gpu for each in left)
        say(f"\nOn a cluster with a node of each of {keys} ('deploy' writes one):")
        for text in expected(left, Purse(profiles=spec.profile), rates):
            say(f"\n{text}")


def _print_plan(
    plan: Plan,
    folder: RunPath,
    expectations: Iterable[str],
    cluster: ClusterResources,
    catalog: Catalog,
) -> None:
    devices = {c.device for c in plan.pending if not c.simulated and cluster_address() is not None}
    nodes = {
        key: f"nodes: {text}" for key in devices if (text := cluster.nodes_text(catalog.gpu(key)))
    }
    rows = [
        *(
            (c.key, "to simulate", "")
            if c.simulated
            else (c.key, "to measure", nodes.get(c.device, ""))
            for c in plan.pending
        ),
        *((cell.key, "done", f"in {folder}") for cell in plan.complete),
        *((skip.cell.key, "skipped", skip.reason) for skip in plan.skipped),
    ]
    say(table(("trial", "plan", "why"), rows))
    measured = len(to_measure(plan))
    simulated = len(plan.pending) - measured
    counts = (
        f"{measured} to measure, "
        + (f"{simulated} to simulate, " if simulated else "")
        + f"{len(plan.complete)} done, {len(plan.skipped)} skipped"
    )
    for text in expectations:
        say(f"\n{text}")
    say(f"\n{counts}; nothing was started")


def _given_sweep(options: argparse.Namespace) -> tuple[KnownPrices, str, SweepSpec]:
    """The sweep that was asked for: its prices, its text, and what it says."""
    if options.resume:
        if options.out is None or options.spec is not None:
            raise SpecError(
                "--resume takes the run folder and no specification: sweep --resume --out DIR"
            )
        folder = RunFolder.existing(given_run_path(options.out, ""))
        # By the models the run knows: their folders, or the hub, may be gone.
        prices, spec = run_and_prices(folder, options)
        return prices, folder.spec_text(), spec
    prices = asked_prices(options)
    text, name = spec_text(options.spec)
    return prices, text, parse_spec(text, name, base=prices.catalog)
