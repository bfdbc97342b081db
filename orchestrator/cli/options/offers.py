"""Options that choose offers: providers, regions, markets, deadline and budget."""

import argparse

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from gpu_catalog.offer import Market
from gpu_catalog.suggestions import did_you_mean
from orchestrator.cli.options.value_types import above_zero
from orchestrator.pricing.offer_constraints import Constraints, OfferFilter
from orchestrator.spec.job import Job, Overheads


class JobError(UserError):
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


def with_overheads(options: argparse.Namespace, workload: Job) -> Job:
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


def add_constraints(command: argparse.ArgumentParser) -> None:
    """Which offers are wanted."""
    add = command.add_argument
    add("--deadline", type=above_zero, metavar="HOURS", help="leave out what takes longer")
    add("--budget-usd", type=above_zero, metavar="USD", help="leave out what costs more")
    _add_offers(command, "of these alone", "spot instances alone, or none (default: both)")
    add(
        "--single-gpu-instances",
        action="store_true",
        help="none whose other GPUs would be paid for in vain",
    )


def _add_offers(command: argparse.ArgumentParser, providers: str, spot: str) -> None:
    """Which offers are meant, and what for."""
    add = command.add_argument
    add("--providers", metavar="A,B", help=providers)
    add("--regions", metavar="A,B", help="alike, in the provider's own words")
    add("--spot", action=argparse.BooleanOptionalAction, help=spot)


def add_rented(command: argparse.ArgumentParser) -> None:
    """What the nodes are rented as, on which trials run."""
    _add_offers(
        command,
        "your nodes are rented of these: what the sweep costs is counted by the cheapest of their "
        "offers, unless a node itself says what it is (default: as the run has it, else of any)",
        "your nodes are spot instances, or none is (default: the cheaper of both)",
    )
