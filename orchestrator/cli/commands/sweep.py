"""Commands that measure, or plan to. Results go to stdout, progress and remarks to stderr."""

import argparse
from collections import Counter

from orchestrator.cli.commands.catalog import in_use_text
from orchestrator.cli.commands.plan import (
    asked_rented,
    gpu_choices,
    node_prices,
    plan_without_starting,
    print_plan,
    spending_meter,
)
from orchestrator.cli.options.inputs import (
    asked_prices,
    given_run_path,
    now,
    run_and_prices,
    spec_text,
    tell,
    today,
)
from orchestrator.console import print_result, remark
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.planning.cluster_resources import this_machine
from orchestrator.planning.measurement_cost import Budget, expected, remaining_work
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.pricing.prices_in_use import PricesInUse
from orchestrator.ranking.exclusions import too_long
from orchestrator.ray_backend.tune_loggers import check_tools
from orchestrator.reporting.markdown_report import cheapest_section, headline
from orchestrator.reporting.sections.next_measurement_section import choices_table
from orchestrator.reporting.write_reports import trouble_lines, write_derived_files
from orchestrator.run_folder.file_names import PAGE, RENTED, REPORT
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.driver import measure, refuse_skipped
from orchestrator.running.simulate import simulate
from orchestrator.scheduling.adaptive import AdaptiveStrategy
from orchestrator.scheduling.strategy import ExhaustiveStrategy, Strategy, payable_gpus, to_measure
from orchestrator.spec.spec_file import SpecError, parse_spec
from orchestrator.spec.sweep_spec import SweepSpec


def sweep(options: argparse.Namespace) -> int:
    """Measures what a specification asks for and is not known yet, then fits and ranks."""
    prices, text, spec = _given_sweep(options)
    constants = known_constants(options.constants)
    folder = given_run_path(options.out, spec.name)
    catalog = prices.over(spec.merged_catalog())
    rented = asked_rented(options, catalog)
    _tell_misfits(spec)
    if options.dry_run or options.strict:
        known = RunFolder(folder).observations()
        plan, cluster = plan_without_starting(spec, catalog, known)
        if options.strict:
            refuse_skipped(plan)
        if options.dry_run:
            rates = node_prices(catalog, RunFolder(folder), rented)
            left = remaining_work(spec, rates, cluster, plan, known)
            spent = spending_meter(spec, rates, RunFolder(folder)).usd or 0.0
            profiled = spec.profile and not options.adaptive
            purse = Budget(options.budget_usd, spent, profiled)
            print_plan(plan, folder, expected(left, purse, rates), cluster, catalog)
            if profiled:
                remark("what is measured is then profiled, at one example and at its largest batch")
            return 0
    check_tools(options.log_to, folder)
    folder_run = open_run(folder, text, spec, prices.rows)
    wait_seconds: float = options.wait_for_nodes * 60
    with ObservationWriter(folder_run) as writer:
        rates = node_prices(
            catalog, folder_run, rented
        )  # the writer may have found what was not sent
        _keep_rented(folder_run, writer, rates)
        if options.adaptive:
            # What is simulated tells what to expect of what is measured.
            plan = make_plan(spec, catalog, this_machine(), folder_run.observations())
            simulate(folder_run, writer, spec, plan, constants)
            strategy: Strategy = AdaptiveStrategy(spec, rates, options.budget_usd)
            if spec.profile:
                remark("profile: an adaptive sweep makes no profiles: resume it without --adaptive")
        else:
            strategy = ExhaustiveStrategy(spec, rates, options.budget_usd)
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
    ranking = write_derived_files(folder_run, spec, catalog, plan, now())
    tell(trouble_lines(folder_run.faults(), folder_run.observations()))
    remark(in_use_text(prices, catalog, today()))
    print_result(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    print_result(
        f"\nEvery offer, the fits and the limits: {folder_run.path / PAGE}, and {REPORT} to read"
    )
    if options.adaptive:
        found = gpu_choices(spec, rates, plan, folder_run.observations())
        if not any(choice.leader.is_measured for choice in found):
            remark("nothing was measured that a choice could be made by: see Left out")
            return 1
        print_result(f"\n{choices_table(found)}")
        return 0
    return end_of_sweep(spec, rates, plan, folder_run, options.budget_usd)


def end_of_sweep(
    spec: SweepSpec, rates: NodePrices, plan: Plan, folder: RunFolder, budget_usd: float | None
) -> int:
    """Tells what a sweep cost, and what it did not get to."""
    observations = folder.observations()
    meter = spending_meter(spec, rates, folder)
    tell(meter.text())
    purse = Budget(budget_usd, meter.usd or 0.0)
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


def _keep_rented(folder: RunFolder, writer: ObservationWriter, rates: NodePrices) -> None:
    """Whoever goes on with the run, or looks at it, prices it alike."""
    if rates.rented != folder.rented():
        writer.write(RENTED, rates.rented)


def _tell_misfits(spec: SweepSpec) -> None:
    """Which cells are no good for the job of the specification, though they can be measured."""
    cells = spec.all_cells()
    misfits = [too_long(spec.workload, cell, cells) for cell in cells]
    for reason, count in Counter(reason for reason in misfits if reason is not None).items():
        remark(f"{count} of {len(misfits)} cells cannot be ranked for this job: {reason}")


def _given_sweep(options: argparse.Namespace) -> tuple[PricesInUse, str, SweepSpec]:
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
