"""Commands on a run that is there. Results go to stdout, progress and remarks to stderr."""

import argparse

from fitting.families.cell_step_time import Batch, StepTimeSource
from fitting.families.fit_family import fit_families
from fitting.learning_curves import curves
from orchestrator.cli.commands.catalog import in_use_text
from orchestrator.cli.options.inputs import now, run_and_prices, today
from orchestrator.cli.options.job import AUTO, changed_workload
from orchestrator.cli.options.offers import asked_constraints, with_overheads
from orchestrator.console import print_result, remark
from orchestrator.markdown_table import table
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import Meter
from orchestrator.ranking.epochs_needed import EpochsByCell, EpochsError, learned_epochs
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.ranking.ranking import rank
from orchestrator.reporting.comparison import compare, comparison_markdown
from orchestrator.reporting.html_report import html_comparison
from orchestrator.reporting.markdown_report import cheapest_section, headline
from orchestrator.reporting.sections.slow_node_section import slow_nodes_text
from orchestrator.reporting.write_reports import trouble_lines, write_ranking, write_report
from orchestrator.run_folder.file_names import PAGE, REPORT
from orchestrator.run_folder.learning_log import learned_file, learned_in
from orchestrator.run_folder.load_results import plan_of, results_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import fastest
from orchestrator.storage.run_storage import distinct_names
from trials.records.observation import by_cell, largest_batch


def rank_run(options: argparse.Namespace) -> int:
    """Prices a job on every offer, the specification's own unless told otherwise.

    ``what-if`` does it for the answer alone, and leaves the run as it is.
    """
    folder = RunFolder.existing(options.run)
    prices, spec = run_and_prices(folder, options)
    catalog = prices.over(spec.merged_catalog())
    workload = changed_workload(spec.workload, options, tuple(spec.models.values()))
    workload = with_overheads(options, workload)
    batch: Batch = options.batch_size or workload.batch_size or "fastest"
    observations = folder.observations()
    plan = plan_of(folder, spec)
    # The fastest batch size is among those timed, and no law is asked about it.
    needs_law = isinstance(batch, int) or workload.lengths is not None
    families = fit_families(observations) if needs_law else ()
    inputs = RankingInputs(
        workload,
        catalog,
        plan,
        StepTimeSource(observations, families),
        batch_wish=batch,
        constraints=asked_constraints(options, catalog),
        today=today(),
        epochs=_learned(options, folder, plan),
        seed=spec.seed,
    )
    ranking = rank(inputs)
    if options.command == "rank":
        write_ranking(folder, ranking)
    remark(in_use_text(prices, catalog, today()))
    for line in slow_nodes_text(observations):
        remark(line)
    if options.json:
        print_result(ranking.model_dump_json(indent=1))
    elif options.csv:
        print_result(ranking_csv(ranking).rstrip("\n"))
    else:
        print_result(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    return 0


def _learned(options: argparse.Namespace, folder: RunFolder, plan: Plan) -> EpochsByCell | None:
    """The epochs of each cell by what was learned, if they are asked for."""
    if options.epochs != AUTO:
        if options.learned is not None:
            raise EpochsError(f"--learned {options.learned}: goes with --epochs auto: add it")
        return None
    cells = (*plan.complete, *plan.pending, *(skip.cell for skip in plan.skipped))
    if options.learned is not None:
        return learned_epochs(cells, curves(learned_file(options.learned)), str(options.learned))
    return learned_epochs(cells, curves(learned_in(folder)), str(folder.path))


def report(options: argparse.Namespace) -> int:
    """Writes the report of the specification's job anew; what `rank` wrote stays.

    Of two runs, it writes what differs between them.
    """
    if options.other is not None:
        return compare_runs(options)
    folder = RunFolder.existing(options.run)
    prices, spec = run_and_prices(folder, options)
    catalog = prices.over(spec.merged_catalog())
    write_report(folder, spec, catalog, plan_of(folder, spec), now())
    remark(in_use_text(prices, catalog, today()))
    print_result((folder.storage.read(REPORT) or b"").decode().rstrip())
    remark(f"{folder.path / PAGE}: the same to look at, in one file")
    return 0


def compare_runs(options: argparse.Namespace) -> int:
    """Sets two runs side by side."""
    folders = [RunFolder.existing(path) for path in (options.run, options.other)]
    results = []
    for folder in folders:
        prices, spec = run_and_prices(folder, options)
        catalog = prices.over(spec.merged_catalog())
        results.append(results_of(folder, spec, catalog, today()))
    names = distinct_names([folder.path for folder in folders])
    found = compare(results[0], results[1], (names[0], names[1]))
    file = folders[0].write(f"comparison-{names[1]}.html", html_comparison(found, now()))
    print_result(comparison_markdown(found))
    remark(f"{file}: the same to look at, in one file")
    return 0


def status(options: argparse.Namespace) -> int:
    """Tells how far a run is, from its files alone."""
    folder = RunFolder.existing(options.run)
    prices, spec = run_and_prices(folder, options)
    observations = folder.observations()
    plan = plan_of(folder, spec)
    skipped = {skip.cell for skip in plan.skipped}
    is_running = folder.is_running()
    rows = []
    of_cell = by_cell(observations)
    for cell in spec.all_cells():
        seen = of_cell[cell]
        # An adaptive sweep measures no more of a cell than it needs.
        in_part = "in part" if fastest(seen) and not is_running else "begun"
        begun = in_part if seen else "waiting"
        state = "done" if cell in plan.complete else "skipped" if cell in skipped else begun
        known = largest_batch(seen)
        rows.append(
            (cell.key, state, "" if known is None else known[0], fastest(seen) or "", len(seen))
        )
    print_result(table(("trial", "state", "largest batch", "fastest", "observations"), rows))
    profiles = folder.profiles()
    catalog = prices.over(spec.merged_catalog())
    running = f"{'a' if is_running else 'no'} sweep is running"
    made = sum(each.profile is not None for each in profiles)
    profiled = f", {made} profiles" if made else ""
    print_result(f"\n{len(plan.complete)} of {len(rows)} trials done{profiled}; {running}")
    faults = folder.faults()
    rates = NodePrices(catalog, folder.rented())
    meter = Meter(spec, rates, [*observations, *profiles], faults.faults)
    for line in (*meter.text(), *trouble_lines(faults, observations)):
        print_result(line)
    return 0
