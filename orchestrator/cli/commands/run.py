"""Commands on a run folder: ``status``, ``rank``, ``what-if`` and ``report``."""

import argparse
import dataclasses

from gpu_catalog.errors import UserError
from orchestrator.cli.options.clock import now, today
from orchestrator.console import print_file, print_result, remark
from orchestrator.markdown_table import table
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.spending import Meter
from orchestrator.planning.throughput import fastest
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.reporting.sections.trouble_section import slow_nodes_text, trouble_lines
from orchestrator.request import request_of
from orchestrator.run_folder.file_names import IMAGE, PAGE, REPORT, SPEC
from orchestrator.run_folder.plan_and_prices import plan_of, run_and_prices
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.run_storage import distinct_names
from trials.records.cell import by_cell
from trials.records.log_reader import LineReader
from trials.records.observation import largest_batch
from trials.records.profile import Profiled, observations_of


def run_rank(options: argparse.Namespace) -> int:
    """Print a ranking; ``rank`` also writes it into the run. Without any offer it fails."""
    from orchestrator.ranking.ranked_offer import ranking_csv
    from orchestrator.reporting.markdown_report import cheapest_section, headline
    from orchestrator.reporting.write_reports import write_ranking
    from orchestrator.run_folder.rank_run import RankRequest, rank_run
    from orchestrator.tables.table_or_run import run_of

    options.run = run_of(options.run)
    request = request_of(RankRequest, vars(options))
    ranked = rank_run(request, today())
    ranking = ranked.ranking
    if options.command == "rank":
        folder = RunFolder(options.run)
        write_ranking(folder, ranking)
        if not request.is_of_own_job:
            remark(f"ranking.csv and ranking.json have this job. {_own_job(folder)}")
    remark(f"Prices: {ranked.prices}")
    for line in slow_nodes_text(ranked.slow_nodes):
        remark(line)
    if options.json:
        print_result(ranking.model_dump_json(indent=1))
    elif options.csv:
        print_file(ranking_csv(ranking).rstrip("\n"))
    else:
        print_result(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    return 0 if ranking.offers else 1


def run_report(options: argparse.Namespace) -> int:
    """Write and print the report of the specification's job, or compare two runs."""
    if options.other is not None:
        if options.image:
            raise UserError("--image is of one run's report: leave it out to compare two")
        return _compare(options)
    if options.url is not None and not options.image:
        raise UserError("--url is of the picture's preview: give --image, too")
    from orchestrator.reporting.write_reports import write_pages
    from orchestrator.run_folder.run_results import results_of

    folder = RunFolder.existing(options.run)
    prices, spec = run_and_prices(folder, request_of(PriceOptions, vars(options)))
    catalog = prices.over(spec.merged_catalog())
    results = results_of(folder, spec, catalog, today())
    courses = prices.courses({cell.gpu for cell in results.cells})
    # The observations of cells that the report does not show are freed before it is written.
    results = dataclasses.replace(results, price_courses=courses).shown
    write_pages(folder, results, now(), image=options.image, url=options.url)
    remark(f"Prices: {prices.age(catalog, today())}")
    remark(_own_job(folder))
    print_result((folder.storage.read(REPORT) or b"").decode().rstrip())
    remark(f"{folder.path / PAGE}: the same report with charts, in one file")
    if options.image:
        remark(f"{folder.path / IMAGE}: a picture of its top")
    return 0


def _own_job(folder: RunFolder) -> str:
    """Which job reports price, whatever ``rank`` wrote last, and how they price another."""
    return (
        f"Reports price the job of {folder.path / SPEC}: change its workload to report another, "
        "and give report the same --prices"
    )


def _compare(options: argparse.Namespace) -> int:
    """Compare two runs."""
    from orchestrator.reporting.comparison import compare, comparison_markdown
    from orchestrator.reporting.html_report import html_comparison
    from orchestrator.run_folder.run_results import results_of

    folders = [RunFolder.existing(path) for path in (options.run, options.other)]
    results = []
    for folder in folders:
        prices, spec = run_and_prices(folder, request_of(PriceOptions, vars(options)))
        catalog = prices.over(spec.merged_catalog())
        results.append(results_of(folder, spec, catalog, today()))
    names = distinct_names([folder.path for folder in folders])
    comparison = compare(results[0], results[1], (names[0], names[1]))
    file = folders[0].write(f"comparison-{names[1]}.html", html_comparison(comparison, now()))
    print_result(comparison_markdown(comparison))
    remark(f"{file}: the same comparison with charts, in one file")
    return 0


def run_status(options: argparse.Namespace) -> int:
    """Print the state of each trial, and what the run has cost, from its files alone."""
    folder = RunFolder.existing(options.run)
    prices, spec = run_and_prices(folder, request_of(PriceOptions, vars(options)))
    cells = spec.all_cells()
    logged = folder.logged(LineReader(brief=cells, cells=cells))
    observations = observations_of(logged)
    plan = plan_of(folder, spec, observations)
    complete, skipped = {*plan.complete}, {skip.cell for skip in plan.skipped}
    is_running = folder.is_running()
    rows = []
    of_cell = by_cell(observations)
    for cell in cells:
        cells_own = of_cell[cell]
        # An adaptive sweep measures no more of a cell than it needs.
        throughput = fastest(cells_own)
        partial = "partial" if throughput and not is_running else "started"
        unfinished = partial if cells_own else "waiting"
        state = "done" if cell in complete else "skipped" if cell in skipped else unfinished
        largest = largest_batch(cells_own)
        size = "" if largest is None else largest[0]
        rows.append((cell.key, state, size, throughput or "", len(cells_own)))
    print_result(table(("trial", "state", "largest batch", "fastest", "observations"), rows))
    running = f"{'a' if is_running else 'no'} sweep is running"
    profiles = (record for record in logged if isinstance(record, Profiled))
    made = sum(profile.profile is not None for profile in profiles)
    profiled = f", {made} profiles" if made else ""
    print_result(f"\n{len(plan.complete)} of {len(rows)} trials done{profiled}; {running}")
    faults = folder.faults()
    catalog = prices.over(spec.merged_catalog())
    meter = Meter(spec, NodePrices(catalog, folder.rented()), logged, faults.faults)
    for line in (*meter.text(), *trouble_lines(faults, logged, catalog)):
        print_result(line)
    return 0
