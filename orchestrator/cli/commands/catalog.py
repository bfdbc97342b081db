"""Command ``catalog``: GPUs, prices, their refresh and their history."""

import argparse
import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_catalog.catalog import Catalog, CatalogError
from gpu_catalog.live_prices.gpu_identification import left_out
from gpu_catalog.live_prices.price_checks import RejectedOffer
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.live_prices.sources.aws_api import AwsApi
from gpu_catalog.live_prices.sources.aws_public import AwsPublic
from gpu_catalog.live_prices.sources.gpuhunt_catalogs import GpuhuntCatalogs
from gpu_catalog.live_prices.sources.hugging_face_jobs import HuggingFaceJobs
from gpu_catalog.live_prices.sources.modal import Modal
from gpu_catalog.live_prices.sources.raw_offer import PriceSource
from gpu_catalog.live_prices.sources.runpod_community import RunpodCommunity
from gpu_catalog.live_prices.sources.vast import Vast
from gpu_catalog.number_text import short
from gpu_catalog.price_table import age_text, refreshed_path, write_offers, written_offers
from gpu_catalog.suggestions import did_you_mean
from orchestrator.cli.options.clock import now, today
from orchestrator.console import print_result, remark
from orchestrator.markdown_table import records_table, table
from orchestrator.pricing.billing_terms import billing_text
from orchestrator.pricing.price_history import (
    PriceCourse,
    price_courses,
    sparkline,
    write_snapshot,
)
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.request import names_in, request_of
from orchestrator.storage.run_storage import run_path

# Where two sources price the same offer, the later wins: it is nearer to the provider.
SOURCES = ("gpuhunt", "runpod-community", "vast", "hf-jobs", "modal", "aws-public", "aws")
MOST_REJECTED = 20  # lines on the terminal; a file has all of them
REJECTED = "rejected.txt"


def run_gpus(options: argparse.Namespace) -> int:
    """Print the GPUs of the catalog."""
    catalog = request_of(PriceOptions, vars(options)).in_use().catalog
    gpus = gpus_table(catalog, with_sources=options.sources)
    reasons = "; ".join(f"{name} ({reason})" for name, reason in left_out().items())
    print_result(f"{gpus}\n\nLeft out: {reasons}")
    return 0


def run_prices(options: argparse.Namespace) -> int:
    """Print the prices in use."""
    prices = request_of(PriceOptions, vars(options)).in_use()
    catalog = prices.over(prices.catalog)
    print_result(f"{prices_table(catalog)}\n\nPrices: {prices.age(catalog, today())}")
    return 0


def gpus_table(catalog: Catalog, *, with_sources: bool = False) -> str:
    """A table of the GPUs of a catalog, with or without the sources of their figures."""
    return records_table(
        {
            "key": gpu.key,
            "device name": ", ".join(gpu.device_names),
            "usable GiB": (
                "" if gpu.usable_memory_bytes is None else f"{gpu.usable_memory_bytes / 2**30:.2f}"
            ),
            "GB/s": gpu.memory_bandwidth_gb_per_second or "",
            "bf16 TFLOPS": gpu.bf16_dense_tflops or "",
            "recorded": gpu.recorded,
        }
        | ({"source": gpu.source} if with_sources else {})
        for gpu in catalog.gpus
    )


def prices_table(catalog: Catalog) -> str:
    """A table of the offers of a catalog, the cheapest first for each GPU."""
    headers = (
        *("GPU", "provider", "instance", "GPUs", "region", "market", "$/h", "$/h per GPU"),
        *("billed", "as of", "recorded"),
    )
    rows = [
        (
            *(gpu.key, offer.provider, offer.instance, offer.gpus_per_instance, offer.region),
            *(
                offer.market,
                short(offer.usd_per_hour, 4),
                short(offer.usd_per_gpu_hour, 4),
            ),
            *(billing_text(offer), offer.as_of or "not stated", offer.recorded),
        )
        for gpu in catalog.gpus
        for offer in catalog.offers(gpu.key)
    ]
    return table(headers, rows)


def run_refresh(options: argparse.Namespace) -> int:
    """Download prices from the sources and keep them for every command.

    Returns:
        0 where a source answered; 1 where none did, so that the last prices stay in use.
    """
    time = now()
    sources = _sources(options.source, options.regions, time)
    out: Path = options.out or refreshed_path()
    last = written_offers(out)
    catalog = request_of(PriceOptions, vars(options)).in_use().catalog
    for source in sources:
        remark(f"asking {source.name}")
    refreshed = refresh(sources, catalog, last, time.date())
    for line in (*refreshed.warnings, *refreshed.unidentified):
        remark(line)
    _remark_rejected(refreshed.rejected, out)
    if not refreshed.live:
        kept = age_text(last or catalog.all_offers, time.date())
        remark(f"no new prices. Still in use: those of {kept}")
        return 1
    write_offers(out, refreshed.offers)
    gpus = {offer.gpu for offer in refreshed.offers}
    providers = {offer.provider for offer in refreshed.offers}
    print_result(
        f"{out}: {refreshed.live} new prices of {', '.join(refreshed.answered)}, "
        f"{len(refreshed.offers) - refreshed.live} kept; {len(gpus)} GPUs, {len(providers)} "
        f"providers; prices of {age_text(refreshed.offers, time.date())}"
    )
    if options.out is not None:
        print_result(f"give it to other commands as --prices {out}")
    return 0


def run_snapshot(options: argparse.Namespace) -> int:
    """Write the prices in use to a dated file."""
    prices = request_of(PriceOptions, vars(options)).in_use()
    offers = prices.over(prices.catalog).all_offers
    out = write_snapshot(run_path(options.out), offers, today())
    print_result(f"{out}: {len(offers)} prices of {age_text(offers, today())}")
    return 0


def run_history(options: argparse.Namespace) -> int:
    """Print what each GPU has cost.

    Raises:
        CatalogError: no snapshot has a price of any of the GPUs.
    """
    courses = price_courses(run_path(options.folder), names_in(options.gpu or ""))
    if not courses:
        raise CatalogError(f"{options.folder}: no snapshot has a price of {options.gpu}")
    print_result(records_table(map(_course_row, courses)))
    print_result("\nThe lowest price of each snapshot, in dollars per GPU and hour.")
    return 0


def _course_row(course: PriceCourse) -> dict[str, object]:
    dates, usd = zip(*course.points, strict=True)
    return {
        "GPU": course.gpu,
        "market": course.market,
        "first": f"{short(usd[0], 4)} on {dates[0]}",
        "last": f"{short(usd[-1], 4)} on {dates[-1]}",
        "change": f"{course.change:+.0%}",
        "lowest": short(min(usd), 4),
        "snapshots": len(usd),
        "course": sparkline(usd),
    }


def _remark_rejected(rejected: Sequence[RejectedOffer], out: Path) -> None:
    for offer in rejected[:MOST_REJECTED]:
        remark(str(offer))
    more = len(rejected) - MOST_REJECTED
    if more <= 0:
        return
    path = out.with_name(f"{out.stem}-{REJECTED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{offer}\n" for offer in rejected), encoding="utf-8")
    except OSError as error:
        raise CatalogError(f"{path}: cannot be written: {error.strerror}") from None
    remark(f"{more} more are rejected: {path} lists all {len(rejected)} with their reasons")


def _sources(names: str, regions: str | None, now: dt.datetime) -> list[PriceSource]:
    """The sources of these names, in order of rising trust."""
    chosen = names_in(names)
    for name in chosen:
        if name not in SOURCES:
            near = did_you_mean(name, SOURCES) or f"; take one of {', '.join(SOURCES)}"
            raise CatalogError(f"--source {name!r}: no such source{near}")
    if not chosen:
        raise CatalogError(f"--source names no source: take {', '.join(SOURCES)}")
    in_regions = names_in(regions or "")
    makers: dict[str, Callable[[], PriceSource]] = {
        "gpuhunt": lambda: GpuhuntCatalogs(now.date()),
        "runpod-community": lambda: RunpodCommunity(now.date()),
        "vast": lambda: Vast(now.date()),
        "hf-jobs": lambda: HuggingFaceJobs(now.date()),
        "modal": lambda: Modal(now.date()),
        "aws-public": lambda: AwsPublic(in_regions),
        "aws": lambda: AwsApi(now, in_regions),
    }
    return [makers[name]() for name in SOURCES if name in chosen]
