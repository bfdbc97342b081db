"""A sweep, from its request to its outcome: measure and simulate, then write the reports."""

import datetime as dt
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gpu_catalog.catalog import Catalog
from orchestrator.configurations.cells import spec_text
from orchestrator.estimating.calibration_file import known_constants
from orchestrator.planning.cluster_resources import this_machine
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import Meter
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.pricing.offer_options import RentalOptions
from orchestrator.pricing.prices_in_use import PriceOptions, PricesInUse
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ray_backend.tune_loggers import Tool, check_tools
from orchestrator.reporting.write_reports import write_derived_files
from orchestrator.request import PathText
from orchestrator.run_folder.file_names import RENTED
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.plan_and_prices import node_prices, run_and_prices, spending_meter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.driver import measure
from orchestrator.running.recipe_choices import with_chosen_recipes
from orchestrator.running.session import SweepSession
from orchestrator.running.simulate import simulate
from orchestrator.scheduling.adaptive import AdaptiveStrategy
from orchestrator.scheduling.strategy import Conclusion, ExhaustiveStrategy, Strategy
from orchestrator.spec.spec_file import SpecError, parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.storage.run_storage import RunPath, output_path
from trials.simulation.timing_model import EfficiencyConstants

logger = logging.getLogger(__name__)
WAIT_MINUTES = 20.0  # an instance, an image of some GB, and a second try


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of ``sweep``."""

    spec: Path | None = None
    out: PathText | None = None
    resume: bool = False
    constants: Path | None = None
    adaptive: bool = False
    budget_usd: float | None = None
    wait_for_nodes: float = WAIT_MINUTES
    log_to: tuple[Tool, ...] = ()
    nodes: RentalOptions
    prices: PriceOptions


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """A sweep to run, or to resume.

    Attributes:
        spec_text: specification, as given.
        prices: prices in use, with the rows of the user's catalog file.
        catalog: GPUs and offers of the specification, with the user's prices.
        rented_as: offers that the nodes are rented at; None for those that the run has on record.
        constants: efficiency constants of the simulation.
        progress_stream: output of the progress display; None for standard error.
    """

    options: SweepOptions
    path: RunPath
    spec_text: str
    spec: SweepSpec
    prices: PricesInUse
    catalog: Catalog
    rented_as: OfferFilter | None
    constants: EfficiencyConstants
    progress_stream: TextIO | None = None

    def strategy(self, rates: NodePrices) -> Strategy:
        """Strategy that the request asks for, at these prices of nodes."""
        strategy = AdaptiveStrategy if self.options.adaptive else ExhaustiveStrategy
        return strategy(self.spec, rates, self.options.budget_usd)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The state of a run after a sweep."""

    folder: RunFolder
    plan: Plan
    ranking: Ranking
    meter: Meter
    conclusion: Conclusion


def sweep_request(options: SweepOptions, today: dt.date) -> SweepRequest:
    """Resolve options into a sweep.

    Raises:
        UserError: options contradict one another, or a file cannot be read.
    """
    constants = known_constants(options.constants)
    if options.resume:
        if options.out is None or options.spec is not None:
            raise SpecError(
                "--resume takes the run folder and no specification: sweep --resume --out DIR"
            )
        folder = RunFolder.existing(output_path(options.out, ""))
        # The run has its models on record: their folders, or the hub, may be gone.
        prices, spec = run_and_prices(folder, options.prices)
        text = folder.spec_text()
    else:
        prices = options.prices.in_use()
        text, name = spec_text(options.spec)
        spec = parse_spec(text, name, base=prices.catalog)
    path, catalog = output_path(options.out, spec.name), prices.over(spec.merged_catalog())
    spec = with_chosen_recipes(spec, RunFolder(path), catalog, constants, today)
    rented_as = options.nodes.rented_as(catalog)
    return SweepRequest(options, path, text, spec, prices, catalog, rented_as, constants)


def run_sweep(request: SweepRequest, now: dt.datetime) -> SweepOutcome:
    """Measure and simulate what a request asks for and its run lacks; then fit, rank and report.

    Raises:
        UserError: the folder, the cluster or a tool cannot be used.
    """
    spec, catalog = request.spec, request.catalog
    check_tools(request.options.log_to, request.path)
    folder = open_run(request.path, request.spec_text, spec, request.prices.rows)
    with ObservationWriter(folder) as writer:
        # Read after the writer opened: it recovers files that had not been sent to a bucket.
        rates = node_prices(folder, catalog, request.rented_as)
        if rates.rented != folder.rented():  # later commands on this run must price it alike
            writer.write(RENTED, rates.rented)
        session = SweepSession(folder, writer, spec, rates, request.progress_stream)
        strategy = request.strategy(rates)
        plan = _execute(request, session, strategy)
    ranking = write_derived_files(folder, spec, catalog, plan, now)
    meter = spending_meter(folder, spec, rates)
    conclusion = strategy.conclusion(plan, folder.observations(), meter.usd or 0.0)
    return SweepOutcome(folder, plan, ranking, meter, conclusion)


def _execute(request: SweepRequest, session: SweepSession, strategy: Strategy) -> Plan:
    """Measure and simulate, in the order of the strategy; the plan that is left."""
    if session.spec.profile and not strategy.makes_profiles:
        logger.info("profile: an adaptive sweep makes no profiles: resume it without --adaptive")
    if strategy.simulates_first:
        plan = session.plan(this_machine(), session.folder.observations())
        simulate(session, plan, request.constants)
    options = request.options
    plan = measure(
        session, strategy, wait_seconds=options.wait_for_nodes * 60, log_to=options.log_to
    )
    return plan if strategy.simulates_first else simulate(session, plan, request.constants)
