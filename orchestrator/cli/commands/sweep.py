"""Command ``sweep``. Results go to stdout, progress and remarks to stderr."""

import argparse
from collections import Counter

from orchestrator.cli.commands.catalog import in_use_text
from orchestrator.cli.commands.plan import asked_rented, plan_without_starting, print_plan
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
from orchestrator.planning.measurement_cost import Budget, remaining_work
from orchestrator.pricing.prices_in_use import PricesInUse
from orchestrator.ranking.job_lengths import too_long
from orchestrator.reporting.markdown_report import cheapest_section, headline
from orchestrator.reporting.sections.cost_text import expected
from orchestrator.reporting.sections.next_measurement_section import choices_table
from orchestrator.reporting.write_reports import trouble_lines
from orchestrator.run_folder.file_names import PAGE, REPORT
from orchestrator.run_folder.load_results import node_prices, spending_meter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.driver import refuse_skipped
from orchestrator.running.sweep import SweepOutcome, SweepRequest, run_sweep
from orchestrator.spec.spec_file import SpecError, parse_spec
from orchestrator.spec.sweep_spec import SweepSpec


def sweep(options: argparse.Namespace) -> int:
    """Measure what a specification asks for and its run lacks, then fit and rank."""
    prices, request = _requested(options)
    _remark_misfits(request.spec)
    if options.dry_run or options.strict:
        observations = RunFolder(request.path).observations()
        plan, cluster = plan_without_starting(request.spec, request.catalog, observations)
        if options.strict:
            refuse_skipped(plan)
        if options.dry_run:
            spec, folder = request.spec, RunFolder(request.path)
            rates = node_prices(folder, request.catalog, request.rented_as)
            left = remaining_work(spec, rates, cluster, plan, observations)
            makes_profiles = spec.profile and request.strategy(rates).makes_profiles
            spent_usd = spending_meter(folder, spec, rates).usd or 0.0
            budget = Budget(request.budget_usd, spent_usd, makes_profiles)
            lines = expected(left, budget, rates)
            print_plan(plan, folder.path, lines, cluster, request.catalog)
            if makes_profiles:
                remark("what is measured is then profiled, at one example and at its largest batch")
            return 0
    outcome = run_sweep(request, now())
    tell(trouble_lines(outcome.folder.faults(), outcome.folder.observations()))
    remark(in_use_text(prices, request.catalog, today()))
    return print_outcome(outcome, request.budget_usd)


def print_outcome(outcome: SweepOutcome, budget_usd: float | None) -> int:
    """Print the ranking, the costs and the conclusion of a sweep; the exit status."""
    ranking, conclusion = outcome.ranking, outcome.conclusion
    print_result(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    page = outcome.folder.path / PAGE
    print_result(f"\nEvery offer, the fits and the limits: {page}, and {REPORT} to read")
    if conclusion.choices:
        print_result(f"\n{choices_table(conclusion.choices)}")
    tell(outcome.meter.text())
    if conclusion.unpaid:
        keys = ", ".join(cell.key for cell in conclusion.unpaid)
        remark(
            f"{len(conclusion.unpaid)} trials are excluded by the budget of ${budget_usd:g}: "
            f"{keys}: run the same command with a larger budget to measure them"
        )
    if conclusion.failure is None:
        return 0
    remark(conclusion.failure)
    return 1


def _remark_misfits(spec: SweepSpec) -> None:
    """Name the cells that can be measured but not ranked for the job of the specification."""
    cells = spec.all_cells()
    misfits = [too_long(spec.workload, cell, cells) for cell in cells]
    for reason, count in Counter(reason for reason in misfits if reason is not None).items():
        remark(f"{count} of {len(misfits)} cells cannot be ranked for this job: {reason}")


def _requested(options: argparse.Namespace) -> tuple[PricesInUse, SweepRequest]:
    """The sweep that was asked for, and the prices that it goes by."""
    constants = known_constants(options.constants)
    if options.resume:
        if options.out is None or options.spec is not None:
            raise SpecError(
                "--resume takes the run folder and no specification: sweep --resume --out DIR"
            )
        folder = RunFolder.existing(given_run_path(options.out, ""))
        # By the models the run knows: their folders, or the hub, may be gone.
        prices, spec = run_and_prices(folder, options)
        text = folder.spec_text()
    else:
        prices = asked_prices(options)
        text, name = spec_text(options.spec)
        spec = parse_spec(text, name, base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    return prices, SweepRequest(
        path=given_run_path(options.out, spec.name),
        spec_text=text,
        spec=spec,
        catalog=catalog,
        catalog_rows=prices.rows,
        rented_as=asked_rented(options, catalog),
        constants=constants,
        is_adaptive=options.adaptive,
        budget_usd=options.budget_usd,
        wait_minutes=options.wait_for_nodes,
        log_to=tuple(options.log_to),
    )
