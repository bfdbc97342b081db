"""Options that say which job is priced, and which offers are wanted."""

import argparse
from typing import Any

from orchestrator.cost import Overheads
from orchestrator.ranking import Constraints
from orchestrator.sweep import Workload


def asked_constraints(options: argparse.Namespace) -> Constraints:
    """What an offer must be."""
    markets = {True: "spot", False: "on-demand", None: None}
    return Constraints.model_validate(
        {
            "deadline_hours": getattr(options, "deadline", None),
            "budget_usd": getattr(options, "budget_usd", None),
            "providers": _listed(options.providers),
            "regions": _listed(options.regions),
            "market": markets[options.spot],
            "single_gpu": options.single_gpu_instances,
        }
    )


def asked_job(options: argparse.Namespace, workload: Workload) -> Workload:
    """A workload with what was given in place of its own."""
    update: dict[str, Any] = {
        name: value
        for name in ("queries", "epochs")
        if (value := getattr(options, name)) is not None
    }
    beside = {
        name: value
        for name in Overheads.model_fields
        if (value := getattr(options, name)) is not None
    }
    update["overheads"] = Overheads.model_validate(workload.overheads.model_dump() | beside)
    return workload.model_copy(update=update)


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
