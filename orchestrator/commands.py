"""One short function per command. Results go to stdout, progress and remarks to stderr."""

import argparse
import datetime as dt
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fitting.calibrate import CalibrationError, calibrate, measured_points
from fitting.families import fit_families
from fitting.fit import Fits, fit_observations
from fitting.paper import reproduction
from fitting.table_error import TableError
from gpu_catalog.catalog import Catalog, CatalogError, UnknownGpuError, load_catalog
from orchestrator.adaptive import Adaptive
from orchestrator.calibration import calibration_text, known_constants
from orchestrator.catalog_commands import catalog_command, in_use_text
from orchestrator.cluster import (
    ClusterError,
    cluster_address,
    connected_cluster,
    this_machine,
)
from orchestrator.comparison import compare, comparison_markdown
from orchestrator.dataset_command import dataset_command
from orchestrator.deploy import DeployError, deployment, write_file
from orchestrator.deploy_options import asked_deployment
from orchestrator.driver import (
    Everything,
    Keeper,
    PlanError,
    Strategy,
    measure,
    needs_extras,
    payable_gpus,
    refuse_skipped,
    remark,
    simulate,
    to_measure,
)
from orchestrator.effort import Left, Purse, expected, what_is_left
from orchestrator.estimate import EstimateError, estimates, possible_gpus
from orchestrator.estimate_options import asked_gpus, asked_question
from orchestrator.estimate_tables import as_json, as_table, explanation
from orchestrator.examples import DataError
from orchestrator.faults import faults_text
from orchestrator.folder_results import plan_of, results_of
from orchestrator.gpu_check import (
    GpuCheckError,
    gpu_check_spec_text,
    gpu_of_this_machine,
    in_order_of_value,
    machine_with,
    time_is_left,
)
from orchestrator.html_report import html_comparison, html_report
from orchestrator.job_options import JobError, asked_constraints, with_overheads
from orchestrator.join_check import JoinError, node_resources
from orchestrator.known_prices import KnownPrices, known_prices
from orchestrator.learn import learn_command
from orchestrator.learn_store import learned_file, learned_in
from orchestrator.learned import curves
from orchestrator.learned_epochs import EpochsError, Found, learned_epochs
from orchestrator.local_runner import run_trials_here
from orchestrator.memory_tables import limits_section
from orchestrator.next_measurements import Choice, choices, measurable, measured_cells
from orchestrator.next_tables import decisions, next_table
from orchestrator.place import RunPath, StoreError, distinct_names, run_path
from orchestrator.plan import ClusterResources, Plan, make_plan, trial_task
from orchestrator.profile_command import ProfileError, profile_command
from orchestrator.progress import Progress, fastest
from orchestrator.ranking import Ranking, rank, ranking_csv, too_long
from orchestrator.report import cheapest_section, headline, markdown
from orchestrator.reproduce import ReproduceError, as_markdown, draw
from orchestrator.spec_file import (
    DEFAULT_SPEC,
    SpecError,
    parse_spec,
    read_spec_text,
    shipped_specs,
)
from orchestrator.spending import Meter
from orchestrator.step_seconds import Batch
from orchestrator.store import PLAN, SPEC, ObservationWriter, RunFolder, open_run
from orchestrator.stragglers import stragglers_text
from orchestrator.sweep import SweepSpec
from orchestrator.tables import table
from orchestrator.tune_loggers import check_tools
from orchestrator.workload_options import AUTO, changed_workload
from trials.learn_child import LearnError
from trials.models.model import UnknownModelError
from trials.observation import Observation, largest_batch
from trials.simulation.clock import Constants
from trials.simulation.traces import TraceError, Traces

KNOWN_ERRORS = (
    CalibrationError,
    CatalogError,
    ClusterError,
    DataError,
    DeployError,
    EpochsError,
    EstimateError,
    GpuCheckError,
    JobError,
    JoinError,
    LearnError,
    PlanError,
    ProfileError,
    ReproduceError,
    SpecError,
    StoreError,
    TableError,
    TraceError,
    UnknownGpuError,
    UnknownModelError,
)


REPORT, PAGE = "report.md", "report.html"


def run(options: argparse.Namespace) -> int:
    """Runs the command that was parsed."""
    if options.command == "fit" and _is_of_a_table(options):
        return fit_table(options)
    if options.command == "fit":
        return fit(RunFolder.existing(options.run))
    if options.command == "catalog":
        return catalog_command(options, _today())
    if options.command == "dataset":
        return dataset_command(options)
    if options.command == "learn":
        return learn_command(options, _run_path(options.out, "learn"))
    others = {
        "sweep": sweep,
        "estimate": estimate,
        "export": export,
        "calibrate": calibrate_runs,
        "gpu-check": gpu_check,
        "deploy": deploy,
        "join-check": join_check,
        "completion": completion,
        "plan": plan_run,
        "profile": profile,
        "rank": rank_run,
        "what-if": rank_run,
        "report": report,
        "status": status,
        "reproduce": reproduce,
    }
    return others[options.command](options)


def sweep(options: argparse.Namespace) -> int:
    """Measures what a specification asks for and is not known yet, then fits and ranks."""
    prices, text, spec = _given_sweep(options)
    constants = known_constants(options.constants)
    folder = _run_path(options.out, spec.name)
    catalog = prices.over(spec.merged_catalog())
    _tell_misfits(spec)
    if options.dry_run or options.strict:
        known = RunFolder(folder).observations()
        plan, cluster = _plan_without_starting(spec, catalog, known)
        if options.strict:
            refuse_skipped(plan)
        if options.dry_run:
            left = what_is_left(spec, catalog, cluster, plan, known)
            spent = Meter(spec, catalog, RunFolder(folder).logged()).usd or 0.0
            profiled = spec.profile and not options.adaptive
            _print_plan(plan, folder, left, Purse(options.budget_usd, spent, profiled))
            if profiled:
                remark("what is measured is then profiled, at one query and at its largest batch")
            return 0
    check_tools(options.log_to, folder)
    folder_run = open_run(folder, text, spec, prices.rows)
    wait_seconds: float = options.wait_for_nodes * 60
    with ObservationWriter(folder_run) as writer:
        if options.adaptive:
            # What is simulated tells what to expect of what is measured.
            plan = make_plan(spec, catalog, this_machine(), folder_run.observations())
            simulate(folder_run, writer, spec, plan, constants)
            strategy: Strategy = Adaptive(spec, catalog, options.budget_usd)
            if spec.profile:
                remark("profile: an adaptive sweep makes no profiles: resume it without --adaptive")
        else:
            strategy = Everything(spec, catalog, options.budget_usd)
        profiled = spec.profile and not options.adaptive
        plan = measure(
            folder_run,
            writer,
            spec,
            catalog,
            strategy,
            wait_seconds=wait_seconds,
            profile=profiled,
            log_to=options.log_to,
        )
        if not options.adaptive:
            plan = simulate(folder_run, writer, spec, plan, constants)
    ranking = _derive(folder_run, spec, catalog, plan)
    _tell(_troubles(folder_run))
    remark(in_use_text(prices, catalog, _today()))
    _say(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    _say(f"\nEvery offer, the fits and the limits: {folder_run.path / PAGE}, and {REPORT} to read")
    if options.adaptive:
        found = _choices(spec, catalog, plan, folder_run.observations())
        if not any(choice.leader.is_measured for choice in found):
            remark("nothing was measured that a choice could be made by: see Left out")
            return 1
        _say(f"\n{decisions(found)}")
        return 0
    return end_of_sweep(spec, catalog, plan, folder_run, options.budget_usd)


def end_of_sweep(
    spec: SweepSpec, catalog: Catalog, plan: Plan, folder: RunFolder, budget_usd: float | None
) -> int:
    """Tells what a sweep cost, and what it did not get to."""
    observations = folder.observations()
    meter = Meter(spec, catalog, folder.logged())
    if meter.usd is not None:
        remark(f"spent: ${meter.usd:.3g}, by its probes and the starts of nodes")
    purse = Purse(budget_usd, meter.usd or 0.0)
    paid = payable_gpus(spec, catalog, to_measure(plan), observations, purse)
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


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        remark(line)


def _troubles(folder: RunFolder) -> Iterator[str]:
    """A line on trials that were cut short, and on nodes that are not to be trusted."""
    faults = folder.faults()
    if faults.faults:
        yield f"{faults_text(faults)} See Faults in the report."
    yield from stragglers_text(folder.observations())


def _tell_misfits(spec: SweepSpec) -> None:
    """Which cells are no good for the job of the specification, though they can be measured."""
    misfits = [too_long(spec.workload, cell) for cell in spec.all_cells()]
    for reason, count in Counter(reason for reason in misfits if reason is not None).items():
        remark(f"{count} of {len(misfits)} cells cannot be ranked for this job: {reason}")


def plan_run(options: argparse.Namespace) -> int:
    """What is to be measured of a specification or a run; or what of it would help most."""
    given: Path | str | None = options.given
    if isinstance(given, str) or (given is not None and (given / SPEC).exists()):
        folder = RunFolder.existing(given)
        prices, spec = _run_and_prices(folder, options)
        plan, cluster = plan_of(folder, spec), this_machine()
        catalog = prices.over(spec.merged_catalog())
    else:
        prices = known_prices(options)
        text, name = _spec_text(given)
        spec = parse_spec(text, name, base=prices.catalog)
        folder = RunFolder(_run_path(None, spec.name))
        catalog = prices.over(spec.merged_catalog())
        plan, cluster = _plan_without_starting(spec, catalog, folder.observations())
    if not options.next:
        left = what_is_left(spec, catalog, cluster, plan, folder.observations())
        _print_plan(plan, folder.path, left, Purse(profiles=spec.profile))
        return 0
    found = _choices(spec, catalog, None, folder.observations())
    remark(in_use_text(prices, catalog, _today()))
    _say(next_table(found, options.most))
    return 0


def _choices(
    spec: SweepSpec, catalog: Catalog, plan: Plan | None, observations: Sequence[Observation]
) -> list[Choice]:
    """The GPUs to choose from: a plan's, or all that could be rented and measured."""
    cells = measurable(spec, catalog) if plan is None else measured_cells(plan)
    return choices(spec, catalog, cells, observations, fit_families(observations))


def gpu_check(options: argparse.Namespace) -> int:
    """Measures the GPU of this machine without Ray, and goes on where an earlier check ended."""
    path = _run_path(options.out, "gpu-check")
    prices = known_prices(options, RunFolder(path).catalog_rows())
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
        threads = machine.threads(gpu)
        tasks = [trial_task(spec, catalog, cell, known, threads=threads) for cell in cells]
        with Progress(cells, complete=len(plan.complete)) as progress:
            keeper = Keeper(writer, progress)
            run_trials_here(tasks, keeper, time_is_left(options.seconds, keeper.seen))
        plan = make_plan(spec, catalog, machine, run.observations())
        run.write(PLAN, plan)
    _derive(run, spec, catalog, plan)
    _say(limits_section(spec.all_cells(), run.observations()))
    left = [cell for cell in cells if cell in plan.pending]
    _say(f"\n{len(cells) - len(left)} of {len(cells)} cells done; the report: {run.path / PAGE}")
    if left:
        remark(f"{len(left)} cells are left: run the same command again to go on")
    return 0


def deploy(options: argparse.Namespace) -> int:
    """Writes the file of a cluster for a specification, and tells the bill."""
    prices, asked = known_prices(options), asked_deployment(options)
    text, _ = _spec_text(options.spec)
    spec = parse_spec(text, str(options.spec), base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    made = deployment(asked, spec, text, str(options.spec), catalog)
    out: Path | None = options.out
    if out is None:
        _say(made.text.rstrip("\n"))
    else:
        write_file(out, made.text)
    for line in (*made.left_out, *made.bill):
        remark(line)
    remark(in_use_text(prices, catalog, _today()))
    return 0


def join_check(options: argparse.Namespace) -> int:
    """Prints the resources of this machine's node, if it is what its key says."""
    prices = known_prices(options)
    keys = [key.strip() for key in options.keys.split(",") if key.strip()]
    _say(node_resources(keys, prices.catalog))
    return 0


def completion(options: argparse.Namespace) -> int:
    """Prints a script that completes this command line."""
    from orchestrator.cli import build_parser  # noqa: PLC0415 - it imports this module
    from orchestrator.completion import completion_script  # noqa: PLC0415 - for this command only

    _say(completion_script(build_parser(), options.shell))
    return 0


def estimate(options: argparse.Namespace) -> int:
    """Simulates a job on GPUs of the catalog."""
    prices = known_prices(options)
    catalog = prices.over(prices.catalog)
    question = asked_question(options, catalog, _today())
    asked = asked_gpus(options, catalog)
    gpus, reasons = possible_gpus(question, asked)
    for reason in reasons:
        remark(reason)
    if not gpus:
        if options.json and len(asked) > 1:
            _say("[]")
        return 1
    constants = known_constants(options.constants)
    found = estimates(question, gpus, catalog, constants, Traces())
    if options.json:
        _say(as_json(found, one=len(asked) == 1))
        return 0
    remark(in_use_text(prices, catalog, _today()))
    _say(as_table(found, question.workload))
    if options.explain:
        for each in found:
            _say(f"\n{explanation(each)}")
    return 0


def calibrate_runs(options: argparse.Namespace) -> int:
    """Fits the clock's constants to what runs have measured."""
    catalog = load_catalog()
    out: Path = options.out
    folders = [RunFolder.existing(run) for run in options.runs]
    specs = [folder.spec() for folder in folders]
    models = {name: model for spec in specs for name, model in spec.models.items()}
    gpus = {gpu.key: gpu for spec in specs for gpu in spec.merged_catalog().gpus}
    gpus |= {gpu.key: gpu for gpu in catalog.gpus}
    seen = [o for folder in folders for o in folder.observations()]
    points, reasons = measured_points(seen, models, gpus, Traces())
    for reason in reasons:
        remark(reason)
    calibration = calibrate(points, Constants())
    out.write_text(f"{calibration.model_dump_json(indent=2)}\n", encoding="utf-8")
    _say(calibration_text(calibration))
    _say(f"\n{out}: give it to estimate and sweep as --constants {out}")
    return 0


def profile(options: argparse.Namespace) -> int:
    """Says where the time of a cell's steps goes."""
    return profile_command(options, known_prices(options).catalog)


def reproduce(options: argparse.Namespace) -> int:
    """Works out the paper's tables and figures anew."""
    told = reproduction()
    if options.json:
        _say(json.dumps({"figures": told.figures}, indent=2))
        return 0
    text = as_markdown(told)
    _say(text)
    folder: Path = options.out
    try:
        drawn = draw(told, folder)
        (folder / "reproduction.md").write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ReproduceError(f"--out {folder}: cannot be written ({error.strerror})") from None
    remark(f"{folder}: reproduction.md, {', '.join(path.name for path in drawn)}")
    return 0


def fit(folder: RunFolder) -> int:
    """Fits the laws to a run's observations."""
    fits = fit_observations(folder.observations())
    path = folder.write("fits.json", fits)
    usable = sum(f.status.is_usable for f in fits.fits)
    with_law = sum(family.form is not None for family in fits.families)
    _say(
        f"{path}: {usable} of {len(fits.fits)} fits usable, {with_law} of {len(fits.families)} "
        "families with a law of the step time"
    )
    return 0


def fit_table(options: argparse.Namespace) -> int:
    """Fits the laws to anybody's observations, in a CSV."""
    from orchestrator.table_fit import fit_csv  # noqa: PLC0415 - pandas, for tables only

    text, remarks = fit_csv(options.run, options.predict, options.lengths, options.out)
    for line in remarks:
        remark(line)
    _say(text)
    return 0


def export(options: argparse.Namespace) -> int:
    """Writes a run's observations in the columns of another project."""
    from orchestrator.table_export import export_ado  # noqa: PLC0415 - pandas, for tables only

    _say(export_ado(RunFolder.existing(options.run), options.out))
    return 0


def rank_run(options: argparse.Namespace) -> int:
    """Prices a job on every offer, the specification's own unless told otherwise.

    ``what-if`` does it for the answer alone, and leaves the run as it is.
    """
    folder = RunFolder.existing(options.run)
    prices, spec = _run_and_prices(folder, options)
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
        today=_today(),
        learned=_learned(options, folder, plan),
        seed=spec.seed,
    )
    if options.command == "rank":
        _write_ranking(folder, ranking)
    remark(in_use_text(prices, catalog, _today()))
    if options.json:
        _say(ranking.model_dump_json(indent=1))
    elif options.csv:
        _say(ranking_csv(ranking).rstrip("\n"))
    else:
        _say(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    return 0


def _learned(options: argparse.Namespace, folder: RunFolder, plan: Plan) -> Found | None:
    """The epochs of each cell by what was learnt, if they are asked for."""
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
    prices, spec = _run_and_prices(folder, options)
    catalog = prices.over(spec.merged_catalog())
    _write_report(folder, spec, catalog, plan_of(folder, spec))
    remark(in_use_text(prices, catalog, _today()))
    _say((folder.place.read(REPORT) or b"").decode().rstrip())
    remark(f"{folder.path / PAGE}: the same to look at, in one file")
    return 0


def compare_runs(options: argparse.Namespace) -> int:
    """Sets two runs side by side."""
    folders = [RunFolder.existing(path) for path in (options.run, options.other)]
    results = []
    for folder in folders:
        prices, spec = _run_and_prices(folder, options)
        catalog = prices.over(spec.merged_catalog())
        results.append(results_of(folder, spec, catalog, _today()))
    names = distinct_names([folder.path for folder in folders])
    found = compare(results[0], results[1], (names[0], names[1]))
    file = folders[0].write(f"comparison-{names[1]}.html", html_comparison(found, _now()))
    _say(comparison_markdown(found))
    remark(f"{file}: the same to look at, in one file")
    return 0


def status(options: argparse.Namespace) -> int:
    """Tells how far a run is, from its files alone."""
    folder = RunFolder.existing(options.run)
    prices, spec = _run_and_prices(folder, options)
    observations = folder.observations()
    plan = plan_of(folder, spec)
    skipped = {skip.cell for skip in plan.skipped}
    is_running = folder.is_running()
    rows = []
    for cell in spec.all_cells():
        seen = [o for o in observations if o.cell == cell]
        # An adaptive sweep measures no more of a cell than it needs.
        in_part = "in part" if fastest(seen) and not is_running else "begun"
        begun = in_part if seen else "waiting"
        state = "done" if cell in plan.complete else "skipped" if cell in skipped else begun
        known = largest_batch(seen)
        rows.append(
            (cell.key, state, "" if known is None else known[0], fastest(seen) or "", len(seen))
        )
    _say(table(("trial", "state", "largest batch", "fastest", "observations"), rows))
    profiles = folder.profiles()
    catalog = prices.over(spec.merged_catalog())
    spent = Meter(spec, catalog, [*observations, *profiles]).usd
    cost = "" if spent is None else f", ${spent:.3g} spent"
    running = f"a sweep is running{cost}" if is_running else f"no sweep is running{cost}"
    made = sum(each.profile is not None for each in profiles)
    profiled = f", {made} profiles" if made else ""
    _say(f"\n{len(plan.complete)} of {len(rows)} trials done{profiled}; {running}")
    for line in _troubles(folder):
        _say(line)
    return 0


def _is_of_a_table(options: argparse.Namespace) -> bool:
    """Whether ``fit`` is given a CSV, and not a run.

    Raises:
        TableError: it is a run, with options of a CSV.
    """
    path: Path | str = options.run
    if isinstance(path, Path) and path.suffix.casefold() == ".csv" and not path.is_dir():
        return True
    for name in ("predict", "lengths", "out"):
        if getattr(options, name) is not None:
            raise TableError(f"{path}: --{name} goes with a CSV of observations, not with a run")
    return False


def _derive(folder: RunFolder, spec: SweepSpec, catalog: Catalog, plan: Plan) -> Ranking:
    """Fits, ranking and report, written from the observations."""
    fits, ranking = _write_report(folder, spec, catalog, plan)
    folder.write("fits.json", fits)
    _write_ranking(folder, ranking)
    return ranking


def _write_report(
    folder: RunFolder, spec: SweepSpec, catalog: Catalog, plan: Plan
) -> tuple[Fits, Ranking]:
    """The reports of the specification's own job, and what they were made from."""
    results = results_of(folder, spec, catalog, _today(), plan)
    folder.write(REPORT, markdown(results))
    folder.write(PAGE, html_report(results, _now()))
    return results.fits, results.ranking


def _write_ranking(folder: RunFolder, ranking: Ranking) -> None:
    folder.write("ranking.csv", ranking_csv(ranking))
    folder.write("ranking.json", ranking)


def _plan_without_starting(
    spec: SweepSpec, catalog: Catalog, known: Sequence[Observation]
) -> tuple[Plan, ClusterResources]:
    """What would be done, and on which nodes."""
    if cluster_address() is None:
        return make_plan(spec, catalog, this_machine(), known), this_machine()
    with connected_cluster(ask_for_packages=needs_extras(spec)) as cluster:
        return make_plan(spec, catalog, cluster, known), cluster


def _print_plan(plan: Plan, folder: RunPath, left: Sequence[Left], purse: Purse) -> None:
    rows = [
        *((c.key, "to simulate" if c.simulated else "to measure", "") for c in plan.pending),
        *((cell.key, "done", f"in {folder}") for cell in plan.complete),
        *((skip.cell.key, "skipped", skip.reason) for skip in plan.skipped),
    ]
    _say(table(("trial", "plan", "why"), rows))
    measured = len(to_measure(plan))
    simulated = len(plan.pending) - measured
    counts = (
        f"{measured} to measure, "
        + (f"{simulated} to simulate, " if simulated else "")
        + f"{len(plan.complete)} done, {len(plan.skipped)} skipped"
    )
    for text in expected(left, purse):
        _say(f"\n{text}")
    _say(f"\n{counts}; nothing was started")


def _run_and_prices(
    folder: RunFolder, options: argparse.Namespace
) -> tuple[KnownPrices, SweepSpec]:
    """The prices in use, and a run's specification that goes by them."""
    prices = known_prices(options, folder.catalog_rows())
    return prices, folder.spec(prices.catalog)


def _given_sweep(options: argparse.Namespace) -> tuple[KnownPrices, str, SweepSpec]:
    """The sweep that was asked for: its prices, its text, and what it says."""
    if options.resume:
        if options.out is None or options.spec is not None:
            raise SpecError(
                "--resume takes the run folder and no specification: sweep --resume --out DIR"
            )
        folder = RunFolder.existing(_run_path(options.out, ""))
        # By the models the run knows: their folders, or the hub, may be gone.
        prices, spec = _run_and_prices(folder, options)
        return prices, folder.spec_text(), spec
    prices = known_prices(options)
    text, name = _spec_text(options.spec)
    return prices, text, parse_spec(text, name, base=prices.catalog)


def _spec_text(spec_path: Path | None) -> tuple[str, str]:
    if spec_path is None:
        return shipped_specs()[DEFAULT_SPEC], "the default sweep"
    if not spec_path.exists() and str(spec_path) in shipped_specs():
        return shipped_specs()[str(spec_path)], f"the shipped sweep {spec_path}"
    return read_spec_text(spec_path), str(spec_path)


def _run_path(out: str | None, name: str) -> RunPath:
    """Where the run folder is.

    A Ray job runs in a copy of the working directory that goes away with the job, and would take
    the results along: there, a relative path starts at the home directory.
    """
    path = run_path(out) if out is not None else Path("runs") / name
    if not isinstance(path, Path):
        return path
    in_ray_job = "runtime_resources" in Path.cwd().parts
    return Path.home() / path if in_ray_job else path.absolute()


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _today() -> dt.date:
    return _now().date()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
