"""A sweep, from its request to its outcome: measure and simulate, then write the reports."""

import datetime as dt
import logging
from dataclasses import dataclass, field
from typing import TextIO

from gpu_catalog.catalog import Catalog
from orchestrator.planning.cluster_resources import this_machine
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import Meter
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ray_backend.tune_loggers import Tool, check_tools
from orchestrator.reporting.write_reports import write_derived_files
from orchestrator.run_folder.file_names import RENTED
from orchestrator.run_folder.load_results import node_prices
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.driver import measure
from orchestrator.running.session import SweepSession
from orchestrator.running.simulate import simulate
from orchestrator.scheduling.adaptive import AdaptiveStrategy
from orchestrator.scheduling.strategy import Conclusion, ExhaustiveStrategy, Strategy
from orchestrator.spec.sweep_spec import CatalogRows, SweepSpec
from orchestrator.storage.run_storage import RunPath
from trials.simulation.timing_model import EfficiencyConstants

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """A sweep to run, or to resume.

    Attributes:
        spec_text: specification, as given.
        catalog: GPUs and offers of the specification, with the user's prices.
        wait_minutes: time to wait for a node to start, to return or to start a worker.
        catalog_rows: GPUs and offers of the user's catalog file.
        rented_as: offers that the nodes are rented at; None for those that the run has on record.
        constants: efficiency constants of the simulation.
        is_adaptive: measure only what helps to decide between GPUs.
        budget_usd: no probe begins once the run has cost this much; None for no limit.
        log_to: tools that Ray Tune logs the trials to.
        progress_stream: output of the progress display; None for standard error.
    """

    path: RunPath
    spec_text: str
    spec: SweepSpec
    catalog: Catalog
    wait_minutes: float
    catalog_rows: CatalogRows = field(default_factory=CatalogRows)
    rented_as: OfferFilter | None = None
    constants: EfficiencyConstants = field(default_factory=EfficiencyConstants)
    is_adaptive: bool = False
    budget_usd: float | None = None
    log_to: tuple[Tool, ...] = ()
    progress_stream: TextIO | None = None

    def strategy(self, rates: NodePrices) -> Strategy:
        """Strategy that the request asks for, at these prices of nodes."""
        if self.is_adaptive:
            return AdaptiveStrategy(self.spec, rates, self.budget_usd)
        return ExhaustiveStrategy(self.spec, rates, self.budget_usd)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The state of a run after a sweep."""

    folder: RunFolder
    plan: Plan
    ranking: Ranking
    meter: Meter
    conclusion: Conclusion


def run_sweep(request: SweepRequest, now: dt.datetime) -> SweepOutcome:
    """Measure and simulate what a request asks for and its run lacks; then fit, rank and report.

    Raises:
        UserError: the folder, the cluster or a tool cannot be used.
    """
    spec, catalog = request.spec, request.catalog
    check_tools(request.log_to, request.path)
    folder = open_run(request.path, request.spec_text, spec, request.catalog_rows)
    with ObservationWriter(folder) as writer:
        # Read after the writer opened: it recovers files that had not been sent to a bucket.
        rates = node_prices(folder, catalog, request.rented_as)
        if rates.rented != folder.rented():  # later commands on this run must price it alike
            writer.write(RENTED, rates.rented)
        session = SweepSession(folder, writer, spec, rates, request.progress_stream)
        strategy = request.strategy(rates)
        plan = _execute(request, session, strategy)
    ranking = write_derived_files(folder, spec, catalog, plan, now)
    meter = session.meter()
    conclusion = strategy.conclusion(plan, folder.observations(), meter.usd or 0.0)
    return SweepOutcome(folder, plan, ranking, meter, conclusion)


def _execute(request: SweepRequest, session: SweepSession, strategy: Strategy) -> Plan:
    """Measure and simulate, in the order of the strategy; the plan that is left."""
    if session.spec.profile and not strategy.makes_profiles:
        logger.info("profile: an adaptive sweep makes no profiles: resume it without --adaptive")
    if strategy.simulates_first:
        plan = session.plan(this_machine(), session.folder.observations())
        simulate(session, plan, request.constants)
    plan = measure(session, strategy, wait_seconds=request.wait_minutes * 60, log_to=request.log_to)
    return plan if strategy.simulates_first else simulate(session, plan, request.constants)
