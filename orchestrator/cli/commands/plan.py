"""Command ``plan``, and the plan that ``sweep --dry-run`` prints."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from fitting.families.fit_family import fit_families
from gpu_catalog.catalog import Catalog
from orchestrator.cli.commands.catalog import in_use_text
from orchestrator.cli.options.inputs import (
    asked_prices,
    given_run_path,
    run_and_prices,
    spec_text,
    today,
)
from orchestrator.cli.options.offers import asked_offers
from orchestrator.console import print_result, remark
from orchestrator.markdown_table import table
from orchestrator.planning.cluster_resources import SCALES_TO, ClusterResources, Node, this_machine
from orchestrator.planning.measurement_cost import Budget, remaining_work
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.ranking.next_measurement import choices, measurable
from orchestrator.ray_backend.cluster import cluster_address, connected_cluster
from orchestrator.reporting.sections.cost_text import expected
from orchestrator.reporting.sections.next_measurement_section import next_measurements_table
from orchestrator.run_folder.file_names import SPEC
from orchestrator.run_folder.load_results import node_prices, plan_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.driver import needs_extras
from orchestrator.scheduling.strategy import to_measure
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.storage.run_storage import RunPath
from trials.records.observation import Observation


def asked_rented(options: argparse.Namespace, catalog: Catalog) -> OfferFilter | None:
    """What nodes are said to be rented as; None where nothing is said.

    Raises:
        JobError: no offer is of a provider or region that was given.
    """
    asked = asked_offers(options, catalog)
    is_said = any(each is not None for each in (options.providers, options.regions, options.spot))
    return asked if is_said else None


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
        plan, cluster = plan_without_starting(spec, catalog, folder.observations())
    rates = node_prices(folder, catalog, asked_rented(options, catalog))
    if not options.next:
        known = folder.observations()
        left = remaining_work(spec, rates, cluster, plan, known)
        lines = expected(left, Budget(profiles=spec.profile), rates)
        print_plan(plan, folder.path, lines, cluster, catalog)
        _tell_what_a_cluster_takes(spec, rates, cluster, plan, known)
        return 0
    observations = folder.observations()
    cells, families = measurable(spec, catalog), fit_families(observations)
    found = choices(spec, rates, cells, observations, families)
    remark(in_use_text(prices, catalog, today()))
    print_result(next_measurements_table(found, options.most))
    return 0


def plan_without_starting(
    spec: SweepSpec, catalog: Catalog, known: Sequence[Observation]
) -> tuple[Plan, ClusterResources]:
    """What would be done, and on which nodes."""
    if cluster_address() is None:
        return make_plan(spec, catalog, this_machine(), known), this_machine()
    with connected_cluster(ask_for_packages=needs_extras(spec)) as cluster:
        return make_plan(spec, catalog, cluster, known), cluster


def _tell_what_a_cluster_takes(
    spec: SweepSpec,
    rates: NodePrices,
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
        for each in remaining_work(spec, rates, there, with_them, known)
        if each.gpu in {gpu.key for gpu in absent}
    ]
    if left:
        keys = ", ".join(each.gpu for each in left)
        print_result(f"\nOn a cluster with a node of each of {keys} ('deploy' writes one):")
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
