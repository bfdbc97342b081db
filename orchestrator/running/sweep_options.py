"""Options of a sweep, and the request that they come to."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.estimating.calibration_file import known_constants
from orchestrator.pricing.offer_options import RentalOptions
from orchestrator.pricing.prices_in_use import PriceOptions, PricesInUse
from orchestrator.ray_backend.tune_loggers import Tool
from orchestrator.request import PathText
from orchestrator.run_folder.load_results import run_and_prices
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.sweep import SweepRequest
from orchestrator.spec.spec_file import SpecError, named_spec_text, parse_spec
from orchestrator.storage.run_storage import output_path

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


def sweep_request(options: SweepOptions) -> tuple[SweepRequest, PricesInUse]:
    """Resolve options into a sweep, and the prices that it goes by.

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
        text, name = named_spec_text(options.spec)
        spec = parse_spec(text, name, base=prices.catalog)
    catalog = prices.over(spec.merged_catalog())
    request = SweepRequest(
        path=output_path(options.out, spec.name),
        spec_text=text,
        spec=spec,
        catalog=catalog,
        catalog_rows=prices.rows,
        rented_as=options.nodes.rented_as(catalog),
        constants=constants,
        is_adaptive=options.adaptive,
        budget_usd=options.budget_usd,
        wait_minutes=options.wait_for_nodes,
        log_to=options.log_to,
    )
    return request, prices
