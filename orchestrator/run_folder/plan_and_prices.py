"""Plan, prices and costs of a run, by the files in its folder."""

from collections.abc import Sequence

from gpu_catalog.catalog import Catalog
from orchestrator.planning.cluster_resources import this_machine
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.planning.spending import Meter
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.pricing.prices_in_use import PriceOptions, PricesInUse
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.observation import Observation


def run_and_prices(folder: RunFolder, options: PriceOptions) -> tuple[PricesInUse, SweepSpec]:
    """The prices in use, and a run's specification with their GPUs."""
    prices = options.in_use(folder.catalog_rows())
    return prices, folder.spec(prices.catalog)


def plan_of(folder: RunFolder, spec: SweepSpec, observations: Sequence[Observation]) -> Plan:
    """Plan of the latest driver, brought up to date by the observations."""
    plan = make_plan(spec, spec.merged_catalog(), this_machine(), observations)
    of_driver = folder.plan()
    if of_driver is None:
        return plan
    # The driver knew which cells its cluster could not run; this machine may have no GPU at all.
    skipped = tuple(skip for skip in of_driver.skipped if skip.cell not in plan.complete)
    settled = {*plan.complete, *(skip.cell for skip in skipped)}
    return Plan(
        complete=plan.complete,
        pending=tuple(cell for cell in spec.all_cells() if cell not in settled),
        skipped=skipped,
        given_up=tuple(skip for skip in of_driver.given_up if skip.cell not in settled),
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
