"""The results of a run folder, as its files are now."""

from datetime import date

from fitting.learning_curves import curves
from gpu_catalog.catalog import Catalog
from orchestrator.planning.cluster_resources import this_machine
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.planning.spending import Meter
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.run_folder.learning_log import learned_in
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.run_folder.run_results import RunResults, derived
from orchestrator.spec.sweep_spec import SweepSpec


def results_of(
    folder: RunFolder, spec: SweepSpec, catalog: Catalog, today: date, plan: Plan | None = None
) -> RunResults:
    """The results of a run, as its files are now.

    Args:
        folder: the run.
        spec: its specification.
        catalog: the GPUs and prices to rank by.
        today: for what prices may have done since.
        plan: what became of its cells; absent for what its files say.
    """
    return derived(
        spec,
        catalog,
        plan or plan_of(folder, spec),
        folder.observations(),
        today=today,
        profiled=folder.profiles(),
        learned=curves(learned_in(folder)),
        faults=folder.faults(),
        rented=folder.rented(),
    )


def plan_of(folder: RunFolder, spec: SweepSpec) -> Plan:
    """The latest driver's plan, brought up to date by the observations."""
    plan = make_plan(spec, spec.merged_catalog(), this_machine(), folder.observations())
    planned = folder.plan()
    if planned is None:
        return plan
    # What can be had was for the driver's cluster to say; this machine may have no such GPU.
    skipped = tuple(skip for skip in planned.skipped if skip.cell not in plan.complete)
    known = {*plan.complete, *(skip.cell for skip in skipped)}
    return Plan(
        complete=plan.complete,
        pending=tuple(cell for cell in spec.all_cells() if cell not in known),
        skipped=skipped,
        given_up=tuple(gone for gone in planned.given_up if gone.cell not in known),
    )


def node_prices(
    folder: RunFolder, catalog: Catalog, rented_as: OfferFilter | None = None
) -> NodePrices:
    """Prices of a run's nodes.

    Args:
        folder: the run.
        catalog: GPUs and offers.
        rented_as: offers that the nodes are rented at; None for those that the run has on record.
    """
    rentals = folder.rented()
    if rented_as is not None:
        rentals = rentals.model_copy(update={"offers": rented_as})
    return NodePrices(catalog, rentals)


def spending_meter(folder: RunFolder, spec: SweepSpec, rates: NodePrices) -> Meter:
    """Meter of the dollars that a run has spent."""
    return Meter(spec, rates, folder.logged(), folder.faults().faults)
