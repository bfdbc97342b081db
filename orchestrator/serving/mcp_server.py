"""The tools of the server: estimate, check, rank and prices. They write and start nothing."""

import datetime as dt
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import BaseModel, ConfigDict

from gpu_catalog.errors import UserError
from orchestrator.checking.memory_check import check_text, memory_check
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.layouts.several_gpus import on_several_gpus
from orchestrator.configurations.read_file import read_configuration
from orchestrator.estimating.choosing.layouts import names_by_count
from orchestrator.estimating.estimate_job import estimate_job
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.estimating.requested_gpus import gpus_named
from orchestrator.pricing.offer_constraints import Objective
from orchestrator.pricing.prices_in_use import prices_in_use
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.reporting.markdown_report import cheapest_section, headline
from orchestrator.request import request_from, request_of
from orchestrator.run_folder.rank_run import RankRequest, rank_run
from orchestrator.serving.confined_paths import check_confined

P = ParamSpec("P")
MOST_OFFERS = 20
READ_ONLY = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True)
INSTRUCTIONS = """\
Hours, dollars and memory of fine-tuning a language model on GPUs. Nothing is trained or rented. \
Values of `estimate` are simulated; those of `rank` say whether they were measured. Brackets are \
90 % intervals."""


class ToolOptions(BaseModel):
    """Options of a job; any other option of the command may be given by its name.

    A name has ``_`` for ``-``, as in ``lora_rank`` or ``startup_minutes``.
    """

    model_config = ConfigDict(extra="allow")

    examples: int | None = None
    epochs: int | None = None
    dataset: str | None = None
    batch_size: int | str | None = None
    objective: Objective | None = None
    deadline: float | None = None
    budget_usd: float | None = None
    providers: str | None = None
    spot: bool | None = None


class EstimateToolOptions(ToolOptions):
    """Options of an estimate.

    Attributes:
        gpu: names of GPUs, separated by commas, such as ``A40,H100``; ``own:A40`` for the user's
            own card, with ``usd_per_kwh``.
        seq_len: tokens of an example; not needed with a data set.
        model: a preset (llama-3.1-8b), a name on the hub, or a folder with a config.json.
        config: file of axolotl, LLaMA-Factory or TRL, whose training it is; the model is then
            stated there.
    """

    model: str | None = None
    config: str | None = None

    gpu: str | None = None
    seq_len: int | None = None
    method: str | None = None
    usd_per_kwh: float | None = None


class Tools:
    """The tools of a server that reads files in one folder only."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def estimate(self, options: EstimateToolOptions) -> dict[str, Any]:
        """Simulate fine-tuning a model on GPUs: memory, largest batch, hours and dollars."""
        request, remarks = _estimate_request(options, self._root)
        estimates = estimate_job(request, _today())
        rows = estimates.estimated
        return {
            "remarks": remarks,
            "summary": as_table(rows, estimates.question) if rows else "",
            "skipped": list(estimates.skipped),
            "estimates": [row.estimate.model_dump(mode="json") for row in rows],
        }

    def check(self, options: EstimateToolOptions) -> dict[str, Any]:
        """Say whether a training fits the memory of one GPU, and else the cheapest change."""
        request, remarks = _estimate_request(options, self._root)
        verdict = memory_check(request, _today())
        return {
            "remarks": remarks,
            "summary": check_text(verdict),
            "check": verdict.model_dump(mode="json"),
        }

    def rank(self, run: str, options: ToolOptions | None = None) -> dict[str, Any]:
        """Price a job on every offer by what a run folder holds. The folder stays as it is."""
        given = _given(options)
        check_confined({**given, "run": run}, self._root)
        ranking = rank_run(request_from(RankRequest, {**given, "run": run}), _today()).ranking
        offers = ranking.offers[:MOST_OFFERS]
        return {
            "summary": f"{headline(ranking)}\n\n{cheapest_section(ranking)}",
            "offers": [row.model_dump(mode="json") for row in offers],
            "all_offers": len(ranking.offers),
        }

    def prices(self, gpu: str) -> dict[str, Any]:
        """Rental offers of a GPU in the price table in use, the cheapest per GPU and hour first.

        `gpu` is a key or a name, such as A100, which stands for several.
        """
        used = prices_in_use()
        catalog = used.catalog
        keys = [one.key for one in gpus_named(gpu, catalog)]
        offers = [offer for key in keys for offer in catalog.offers(key)]
        cheapest = sorted(offers, key=lambda offer: offer.usd_per_gpu_hour)[:MOST_OFFERS]
        return {
            "gpus": keys,
            "table": used.age(catalog, _today()),
            "offers": [offer.model_dump(mode="json", exclude_none=True) for offer in cheapest],
            "all_offers": len(offers),
        }


def server_of(root: Path) -> MCPServer:
    """A server that reads files in one folder only."""
    server, tools = MCPServer("finetune-cost", instructions=INSTRUCTIONS), Tools(root)
    for tool in (tools.estimate, tools.check, tools.rank, tools.prices):
        add = server.tool(annotations=READ_ONLY, structured_output=False)
        add(_with_errors(tool))
    return server


def _estimate_request(
    options: EstimateToolOptions, root: Path
) -> tuple[EstimateRequest, list[str]]:
    """The request of options, and remarks on what a configuration leaves open.

    Raises:
        UserError: an option is wrong, or a path leads out of the folder.
    """
    given = _given(options)
    check_confined(given, root)
    file = given.pop("config", None)
    if file is None:
        return request_from(EstimateRequest, given), []
    request_from(EstimateRequest, {"model": "", **given})  # every option must exist
    configuration = read_configuration(Path(file))
    configuration.check()
    stated, remarks = with_configuration(configuration, given)
    check_confined(stated, root)
    request = request_of(EstimateRequest, stated)
    counts = names_by_count(request.gpu, request.counts)
    changed = on_several_gpus(configuration, stated, given, counts)
    return request_of(EstimateRequest, changed), remarks


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()


def _given(options: ToolOptions | None) -> dict[str, Any]:
    return {} if options is None else options.model_dump(exclude_none=True)


def _with_errors(tool: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """The tool, with the lines of a mistake as its answer."""

    @wraps(tool)
    def answered(*args: P.args, **options: P.kwargs) -> dict[str, Any]:
        try:
            return tool(*args, **options)
        except UserError as error:
            raise ToolError(str(error)) from None

    return answered
