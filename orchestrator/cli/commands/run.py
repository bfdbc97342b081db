"""Commands on a run folder: ``rank``, ``what-if`` and ``report``."""

import argparse
import dataclasses

from gpu_catalog.errors import UserError
from orchestrator.cli.options.clock import now, today
from orchestrator.console import print_result, remark
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.reporting.comparison import compare, comparison_markdown
from orchestrator.reporting.html_report import html_comparison
from orchestrator.reporting.markdown_report import cheapest_section, headline
from orchestrator.reporting.sections.trouble_section import slow_nodes_text
from orchestrator.reporting.write_reports import write_pages, write_ranking
from orchestrator.request import request_of
from orchestrator.run_folder.file_names import IMAGE, PAGE, REPORT
from orchestrator.run_folder.load_results import results_of, run_and_prices
from orchestrator.run_folder.rank_run import RankRequest, rank_run
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.run_storage import distinct_names
from orchestrator.tables.table_run import run_of


def run_rank(options: argparse.Namespace) -> int:
    """Print a ranking; ``rank`` also writes it into the run. Without any offer it fails."""
    options.run = run_of(options.run)
    ranked = rank_run(request_of(RankRequest, vars(options)), today())
    ranking = ranked.ranking
    if options.command == "rank":
        write_ranking(RunFolder(options.run), ranking)
    remark(f"In use: {ranked.prices}")
    for line in slow_nodes_text(ranked.observations):
        remark(line)
    if options.json:
        print_result(ranking.model_dump_json(indent=1))
    elif options.csv:
        print_result(ranking_csv(ranking).rstrip("\n"))
    else:
        print_result(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    return 0 if ranking.offers else 1


def run_report(options: argparse.Namespace) -> int:
    """Write and print the report of the specification's job, or compare two runs."""
    if options.other is not None:
        if options.image:
            raise UserError("--image is of one run's report: leave it out to compare two")
        return _compare(options)
    folder = RunFolder.existing(options.run)
    prices, spec = run_and_prices(folder, request_of(PriceOptions, vars(options)))
    catalog = prices.over(spec.merged_catalog())
    results = results_of(folder, spec, catalog, today())
    courses = prices.courses({cell.gpu for cell in results.cells})
    results = dataclasses.replace(results, price_courses=courses)
    write_pages(folder, results, now(), image=options.image)
    remark(f"In use: {prices.age(catalog, today())}")
    print_result((folder.storage.read(REPORT) or b"").decode().rstrip())
    remark(f"{folder.path / PAGE}: the same report with charts, in one file")
    if options.image:
        remark(f"{folder.path / IMAGE}: a picture of its top")
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Compare two runs."""
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
