"""Commands ``sweep``, ``plan`` and ``status``: results to stdout, remarks to stderr."""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fitting.families.fit_family import fit_families
from gpu_catalog.catalog import Catalog
from gpu_catalog.number_text import given
from orchestrator.cli.options.clock import now, today
from orchestrator.configurations.cells import spec_text
from orchestrator.console import print_result, remark
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.markdown_table import table
from orchestrator.planning.cluster_resources import SCALES_TO, ClusterResources, Node, this_machine
from orchestrator.planning.measurement_cost import Budget, remaining_work
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan, obstacle
from orchestrator.pricing.offer_options import RentalOptions
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.ranking.job_lengths import unsuited
from orchestrator.ranking.next_measurement import choices, measurable
from orchestrator.ray_backend.cluster import cluster_address, connected_cluster
from orchestrator.reporting.markdown_report import cheapest_section, headline
from orchestrator.reporting.sections.alternative_recipes import chosen_section
from orchestrator.reporting.sections.cost_text import expected
from orchestrator.reporting.sections.next_measurement_section import (
    choices_table,
    next_measurements_table,
)
from orchestrator.reporting.sections.trouble_section import trouble_lines
from orchestrator.request import request_of
from orchestrator.run_folder.file_names import PAGE, REPORT, SPEC
from orchestrator.run_folder.plan_and_prices import (
    node_prices,
    plan_of,
    run_and_prices,
    spending_meter,
)
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running import sweep
from orchestrator.running.driver import needs_extras, refuse_skipped
from orchestrator.running.recipe_choices import with_chosen_recipes
from orchestrator.running.sweep import SweepOutcome, SweepRequest
from orchestrator.scheduling.strategy import to_measure
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.storage.run_storage import RunPath, output_path
from trials.records.log_reader import LineReader
from trials.records.observation import Observation


def run_sweep(options: argparse.Namespace) -> int:
    """Measure what a specification asks for and its run lacks, then fit and rank."""
    request = sweep.sweep_request(request_of(sweep.SweepOptions, vars(options)), today())
    _remark_misfits(request.spec)
    if options.dry_run or options.strict:
        observations = RunFolder(request.path).observations()
        plan, cluster = plan_without_starting(request.spec, request.catalog, observations)
        if options.strict:
            refuse_skipped(plan)
        if options.dry_run:
            _print_dry_run(request, plan, cluster, observations)
            return 0
    outcome = sweep.run_sweep(request, now())
    faults, logged = outcome.folder.faults(), outcome.folder.logged()
    for line in trouble_lines(faults, logged, request.catalog):
        remark(line)
    remark(f"Prices: {request.prices.age(request.catalog, today())}")
    return print_outcome(outcome, options.budget_usd)


def _print_dry_run(
    request: SweepRequest,
    plan: Plan,
    cluster: ClusterResources,
    observations: Sequence[Observation],
) -> None:
    spec, folder = request.spec, RunFolder(request.path)
    rates = node_prices(folder, request.catalog, request.rented_as)
    left = remaining_work(spec, rates, cluster, plan, observations)
    makes_profiles = spec.profile and request.strategy(rates).makes_profiles
    spent_usd = spending_meter(folder, spec, rates).usd or 0.0
    budget = Budget(request.options.budget_usd, spent_usd, makes_profiles)
    chosen = chosen_section(spec.chosen)
    lines = [*filter(None, [chosen]), *expected(left, budget, rates), *_defaults_text(spec)]
    print_plan(plan, folder.path, lines, cluster, request.catalog)
    if makes_profiles:
        remark("each measured cell is then profiled at one example and at its largest batch")


def print_outcome(outcome: SweepOutcome, budget_usd: float | None) -> int:
    """Print the ranking, the costs and the conclusion of a sweep; return the exit code."""
    ranking, conclusion = outcome.ranking, outcome.conclusion
    print_result(f"{headline(ranking)}\n\n{cheapest_section(ranking)}")
    page = outcome.folder.path / PAGE
    print_result(f"\nEvery offer, the fits and the limits: {page}, and {REPORT} to read")
    if conclusion.choices:
        print_result(f"\n{choices_table(conclusion.choices)}")
    for line in outcome.meter.text():
        remark(line)
    if conclusion.unpaid:
        keys = ", ".join(cell.key for cell in conclusion.unpaid)
        remark(
            f"{len(conclusion.unpaid)} trials are excluded by the budget of ${given(budget_usd)}: "
            f"{keys}: run the same command with a larger budget to measure them"
        )
    if conclusion.failure is None:
        return 0
    remark(conclusion.failure)
    return 1


def _remark_misfits(spec: SweepSpec) -> None:
    """Name the cells that can be measured but not ranked for the job of the specification."""
    cells = spec.all_cells()
    misfits = [unsuited(spec.workload, cell, cells) for cell in cells]
    for reason, count in Counter(reason for reason in misfits if reason is not None).items():
        remark(f"{count} of {len(misfits)} cells cannot be ranked for this job: {reason}")


def _defaults_text(spec: SweepSpec) -> list[str]:
    """A text on fields that recipes leave out, unless the specification chooses their defaults."""
    text = (
        "Fields that recipes leave out have plain defaults (bf16, no checkpointing, no clipping). "
        "'recipe_defaults: trl' in the specification gives those of TRL's trainer; "
        "'recipe_defaults: plain' keeps these."
    )
    return [text] if spec.has_plain_recipes else []


def _reader(spec: SweepSpec, *, steps: bool) -> LineReader:
    cells = spec.all_cells()
    return LineReader(brief=cells, steps=steps, cells=cells)


def run_plan(options: argparse.Namespace) -> int:
    """Print what is left to measure, or which measurements help most."""
    path: Path | str | None = options.spec_or_run
    price_options = request_of(PriceOptions, vars(options))
    if isinstance(path, str) or (path is not None and (path / SPEC).exists()):
        folder = RunFolder.existing(path)
        prices, spec = run_and_prices(folder, price_options)
        observations = folder.observations(_reader(spec, steps=options.next))
        plan, cluster = plan_of(folder, spec, observations), this_machine()
        catalog = prices.over(spec.merged_catalog())
    else:
        prices = price_options.in_use()
        text, name = spec_text(path)
        spec = parse_spec(text, name, base=prices.catalog)
        folder = RunFolder(output_path(None, spec.name))
        catalog = prices.over(spec.merged_catalog())
        constants = known_constants(None)
        spec = with_chosen_recipes(spec, folder, catalog, constants, today())
        observations = folder.observations(_reader(spec, steps=options.next))
        plan, cluster = plan_without_starting(spec, catalog, observations)
    rented_as = request_of(RentalOptions, vars(options)).rented_as(catalog)
    rates = node_prices(folder, catalog, rented_as)
    if options.next:
        cells, families = measurable(spec, catalog), fit_families(observations)
        gpu_choices = choices(spec, rates, cells, observations, families)
        remark(f"Prices: {prices.age(catalog, today())}")
        print_result(next_measurements_table(gpu_choices, options.most))
        if any(cell.simulated for cell in spec.all_cells()):
            remark(
                "A sweep simulates the GPUs under simulated_on: to measure one, move it to gpus."
            )
        return 0
    left = remaining_work(spec, rates, cluster, plan, observations)
    budget = Budget(profiles=spec.profile)
    chosen = chosen_section(spec.chosen)
    lines = [*filter(None, [chosen]), *expected(left, budget, rates), *_defaults_text(spec)]
    print_plan(plan, folder.path, lines, cluster, catalog)
    _print_cost_of_absent_gpus(spec, rates, cluster, plan, observations)
    return 0


def plan_without_starting(
    spec: SweepSpec, catalog: Catalog, observations: Sequence[Observation]
) -> tuple[Plan, ClusterResources]:
    """Plan a sweep on the cluster that is there, or on this machine; return its nodes as well."""
    if cluster_address() is None:
        return make_plan(spec, catalog, this_machine(), observations), this_machine()
    with connected_cluster(ask_for_packages=needs_extras(spec)) as cluster:
        return make_plan(spec, catalog, cluster, observations), cluster


def _print_cost_of_absent_gpus(
    spec: SweepSpec,
    rates: NodePrices,
    cluster: ClusterResources,
    plan: Plan,
    observations: Sequence[Observation],
) -> None:
    """Print hours and dollars of the GPUs that the cluster lacks, with one node for each."""
    catalog = rates.catalog
    skipped = {skip.cell.devices: skip.cell for skip in plan.skipped}
    absent = {
        name
        for name, cell in skipped.items()
        if not cluster.at_a_time(catalog.gpu(cell.device), cell.ranks_per_node, cell.nodes)
    }
    startable: dict[str, int] = {}
    for cell in (skipped[name] for name in absent):
        startable[cell.node_devices] = max(cell.nodes, startable.get(cell.node_devices, 0))
    nodes = tuple(Node({SCALES_TO + gpus: float(most)}) for gpus, most in startable.items())
    extended = ClusterResources((*cluster.nodes, *nodes))
    complete = {*plan.complete}
    pending = tuple(
        cell
        for cell in spec.all_cells()
        if cell.devices in absent and cell not in complete
        if obstacle(cell, spec.model(cell.model), catalog, extended) is None
    )
    plan = plan.model_copy(update={"pending": pending})
    if left := remaining_work(spec, rates, extended, plan, observations):
        names = ", ".join(part.gpu for part in left)
        nodes_text = "one node" if max(startable.values()) == 1 else "the nodes of a trial"
        print_result(
            f"\nOn a cluster with {nodes_text} per GPU ({names}; 'deploy' writes its file):"
        )
        for text in expected(left, Budget(profiles=spec.profile), rates):
            print_result(f"\n{text}")


def print_plan(
    plan: Plan,
    folder: RunPath,
    expectations: Iterable[str],
    cluster: ClusterResources,
    catalog: Catalog,
) -> None:
    """Print each trial with its plan and its reason."""
    measured_now = (c for c in plan.pending if not c.simulated and cluster_address() is not None)
    nodes = {
        devices: f"nodes: {text}"
        for devices, cell in {c.devices: c for c in measured_now}.items()
        if (text := cluster.nodes_text(catalog.gpu(cell.device), cell.ranks_per_node))
    }
    rows = [
        *(
            (c.key, "to simulate", "")
            if c.simulated
            else (c.key, "to measure", nodes.get(c.devices, ""))
            for c in plan.pending
        ),
        *((cell.key, "done", f"in {folder}") for cell in plan.complete),
        *((skip.cell.key, "skipped", skip.reason) for skip in plan.skipped),
    ]
    print_result(table(("trial", "plan", "why"), rows))
    measured = len(to_measure(plan))
    simulated = len(plan.pending) - measured
    counts = (
        f"{measured} to measure, "
        + (f"{simulated} to simulate, " if simulated else "")
        + f"{len(plan.complete)} done, {len(plan.skipped)} skipped"
    )
    for text in expectations:
        print_result(f"\n{text}")
    print_result(f"\n{counts}; nothing was started")
