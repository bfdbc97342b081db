"""Commands on a run that is there. Results go to stdout, progress and remarks to stderr."""

import argparse
import datetime as dt
from collections.abc import Iterator, Sequence

from fitting.families import fit_families
from fitting.fit import Fits
from gpu_catalog.catalog import Catalog
from orchestrator.catalog_commands import in_use_text
from orchestrator.command_tools import now, run_and_prices, today
from orchestrator.comparison import compare, comparison_markdown
from orchestrator.faults import Faults, faults_text
from orchestrator.folder_results import plan_of, results_of
from orchestrator.html_report import html_comparison, html_report
from orchestrator.job_options import asked_constraints, with_overheads
from orchestrator.learn_store import learned_file, learned_in
from orchestrator.learned import curves
from orchestrator.learned_epochs import EpochsError, Found, learned_epochs
from orchestrator.long_log import fits_of
from orchestrator.output import remark, say
from orchestrator.place import distinct_names
from orchestrator.plan import Plan
from orchestrator.progress import fastest
from orchestrator.ranked import Ranking, ranking_csv
from orchestrator.ranking import rank
from orchestrator.rented import Rates
from orchestrator.report import cheapest_section, headline, markdown
from orchestrator.spending import Meter
from orchestrator.step_seconds import Batch
from orchestrator.store import RunFolder
from orchestrator.stragglers import stragglers_text
from orchestrator.sweep import SweepSpec
from orchestrator.tables import table
from orchestrator.workload_options import AUTO, changed_workload
from trials.observation import Observation, by_cell, largest_batch

REPORT, PAGE = "report.md", "report.html"


def fit(folder: RunFolder) -> int:
    """Fits the laws to a run's observations."""
    fits = fits_of(folder)
    path = folder.write("fits.json", fits)
    usable = sum(f.status.is_usable for f in fits.fits)
    with_law = sum(family.form is not None for family in fits.families)
    say(
        f"{path}: {usable} of {len(fits.fits)} fits usable, {with_law} of {len(fits.families)} "
        "families with a law of the step time"
    )
    return 0


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
    ranking = rank(
        workload,
        catalog,
        plan,
        observations,
        families,
        batch=batch,
        constraints=asked_constraints(options, catalog),
        today=today(),
        learned=_learned(options, folder, plan),
        seed=spec.seed,
    )
    if options.command == "rank":
        write_ranking(folder, ranking)
    remark(in_use_text(prices, catalog, today()))
    for line in stragglers_text(observations):
        remark(line)
    if options.json:
        say(ranking.model_dump_json(indent=1))
    elif options.csv:
        say(ranking_csv(ranking).rstrip("\n"))
    else:
        say(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    return 0


def _learned(options: argparse.Namespace, folder: RunFolder, plan: Plan) -> Found | None:
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
    say((folder.place.read(REPORT) or b"").decode().rstrip())
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
    say(comparison_markdown(found))
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
    say(table(("trial", "state", "largest batch", "fastest", "observations"), rows))
    profiles = folder.profiles()
    catalog = prices.over(spec.merged_catalog())
    running = f"{'a' if is_running else 'no'} sweep is running"
    made = sum(each.profile is not None for each in profiles)
    profiled = f", {made} profiles" if made else ""
    say(f"\n{len(plan.complete)} of {len(rows)} trials done{profiled}; {running}")
    faults = folder.faults()
    rates = Rates(catalog, folder.rented())
    meter = Meter(spec, rates, [*observations, *profiles], faults.faults)
    for line in (*meter.text(), *troubles(faults, observations)):
        say(line)
    return 0


def troubles(faults: Faults, observations: Sequence[Observation]) -> Iterator[str]:
    """A line on trials that were cut short, and on nodes that are not to be trusted."""
    if faults.faults:
        yield f"{faults_text(faults)} See Faults in the report."
    yield from stragglers_text(observations)


def derive(
    folder: RunFolder, spec: SweepSpec, catalog: Catalog, plan: Plan, now: dt.datetime
) -> Ranking:
    """Fits, ranking and report, written from the observations."""
    fits, ranking = write_report(folder, spec, catalog, plan, now)
    folder.write("fits.json", fits)
    write_ranking(folder, ranking)
    return ranking


def write_report(
    folder: RunFolder, spec: SweepSpec, catalog: Catalog, plan: Plan, now: dt.datetime
) -> tuple[Fits, Ranking]:
    """The reports of the specification's own job, and what they were made from."""
    results = results_of(folder, spec, catalog, now.date(), plan)
    folder.write(REPORT, markdown(results))
    folder.write(PAGE, html_report(results, now))
    return results.fits, results.ranking


def write_ranking(folder: RunFolder, ranking: Ranking) -> None:
    """The ranking, as CSV and as JSON."""
    folder.write("ranking.csv", ranking_csv(ranking))
    folder.write("ranking.json", ranking)
