"""Options that say which job is priced, and which offers are wanted."""

import argparse

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog
from gpu_catalog.near import did_you_mean
from gpu_catalog.offer import Market
from orchestrator.constraints import Constraints, OfferFilter
from orchestrator.cost import Overheads
from orchestrator.sweep import Workload


class JobError(ValueError):
    """A job that cannot be; a line for each mistake."""


def asked_constraints(options: argparse.Namespace, catalog: Catalog) -> Constraints:
    """What an offer must be.

    Raises:
        JobError: no offer of the catalog is of a provider or region.
    """
    return Constraints.model_validate(
        {
            "deadline_hours": getattr(options, "deadline", None),
            "budget_usd": getattr(options, "budget_usd", None),
            **asked_offers(options, catalog).model_dump(),
            "single_gpu": options.single_gpu_instances,
        }
    )


def asked_offers(options: argparse.Namespace, catalog: Catalog) -> OfferFilter:
    """Which offers are meant, by ``--providers``, ``--regions`` and ``--spot``.

    Raises:
        JobError: no offer of the catalog is of a provider or region.
    """
    markets: dict[bool | None, Market | None] = {True: "spot", False: "on-demand", None: None}
    offers = catalog.all_offers
    known = {
        "provider": sorted({offer.provider for offer in offers}),
        "region": sorted({offer.region for offer in offers}),
    }
    asked = {"provider": _listed(options.providers), "region": _listed(options.regions)}
    mistakes = [
        f"--{kind}s: no offer is of {kind} {name!r}{did_you_mean(name, known[kind])}"
        for kind, names in asked.items()
        for name in names
        if name not in known[kind]
    ]
    if mistakes:
        raise JobError("\n".join(mistakes))
    return OfferFilter(
        providers=asked["provider"], regions=asked["region"], market=markets[options.spot]
    )


def with_overheads(options: argparse.Namespace, workload: Workload) -> Workload:
    """A workload with the overheads that were given in place of its own.

    Raises:
        JobError: one is out of range.
    """
    given = {
        name: value
        for name in Overheads.model_fields
        if (value := getattr(options, name)) is not None
    }
    try:
        overheads = Overheads.model_validate(workload.overheads.model_dump() | given)
    except ValidationError as error:
        raise JobError(
            "\n".join(
                f"--{str(e['loc'][0]).replace('_', '-')} {e['input']:g}: {e['msg']}"
                for e in error.errors()
            )
        ) from None
    return workload.model_copy(update={"overheads": overheads})


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
