"""The commands on the catalog: its GPUs, its prices, and new ones."""

import argparse
import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_catalog.catalog import Catalog, CatalogError
from gpu_catalog.live_prices.price_checks import RejectedOffer
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.live_prices.sources.raw_offer import PriceSource
from gpu_catalog.price_table import age_text, refreshed_path, write_offers, written_offers
from gpu_catalog.suggestions import did_you_mean
from orchestrator.cli.options.inputs import asked_prices
from orchestrator.console import print_result, remark
from orchestrator.markdown_table import table
from orchestrator.pricing.prices_in_use import PricesInUse

# Where two tell the price of one thing, the later is believed: it is nearer to who rents it out.
SOURCES = ("gpuhunt", "aws-public", "aws")
MOST_REJECTED = 20  # shown on the terminal; a file lists all
REJECTED = "rejected.txt"


def catalog_command(options: argparse.Namespace, today: dt.date) -> int:
    """Runs ``catalog gpus``, ``catalog prices`` or ``catalog refresh``."""
    if options.what == "refresh":
        return refresh_prices(options, dt.datetime.now(dt.UTC))
    known = asked_prices(options)
    if options.what == "gpus":
        print_result(gpus_table(known.catalog))
        return 0
    catalog = known.over(known.catalog)
    print_result(f"{prices_table(catalog)}\n\n{in_use_text(known, catalog, today)}")
    return 0


def gpus_table(catalog: Catalog) -> str:
    """The GPUs a catalog knows."""
    headers = (
        "key",
        "reports itself as",
        "usable GiB",
        "GB/s",
        "bf16 TFLOPS",
        "recorded",
        "source",
    )
    rows = [
        (
            gpu.key,
            ", ".join(gpu.device_names),
            "" if gpu.usable_memory_bytes is None else f"{gpu.usable_memory_bytes / 2**30:.2f}",
            gpu.memory_bandwidth_gb_per_second or "",
            gpu.bf16_dense_tflops or "",
            gpu.recorded,
            gpu.source,
        )
        for gpu in catalog.gpus
    ]
    return table(headers, rows)


def prices_table(catalog: Catalog) -> str:
    """The offers a catalog knows, cheapest first for each GPU."""
    headers = (
        "GPU",
        "provider",
        "instance",
        "GPUs",
        "region",
        "market",
        "$/h",
        "$/h per GPU",
        "as of",
        "recorded",
    )
    rows = [
        (
            gpu.key,
            offer.provider,
            offer.instance,
            offer.gpus_per_instance,
            offer.region,
            offer.market,
            f"{offer.usd_per_hour:.4g}",
            f"{offer.usd_per_gpu_hour:.4g}",
            offer.as_of or "not said",
            offer.recorded,
        )
        for gpu in catalog.gpus
        for offer in catalog.offers(gpu.key)
    ]
    return table(headers, rows)


def in_use_text(known: PricesInUse, catalog: Catalog, today: dt.date) -> str:
    """Which prices those are, and how old."""
    return f"In use: {known.age(catalog, today)}"


def refresh_prices(options: argparse.Namespace, now: dt.datetime) -> int:
    """Asks the sources for prices and keeps them for everything from then on.

    Returns:
        0 where a source answered, 1 where none did: the last prices stay in use.
    """
    sources = _sources(options.source, options.regions, now)
    out: Path = options.out or refreshed_path()
    last = written_offers(out)
    known = asked_prices(options)
    for source in sources:
        remark(f"asking {source.name}")
    found = refresh(sources, known.catalog, last, now.date())
    for line in (*found.warnings, *found.unidentified):
        remark(line)
    _show_rejected(found.rejected, out)
    if not found.live:
        kept = age_text(last or known.catalog.all_offers, now.date())
        remark(f"no new prices: {kept} stay in use")
        return 1
    write_offers(out, found.offers)
    gpus = {offer.gpu for offer in found.offers}
    providers = {offer.provider for offer in found.offers}
    print_result(
        f"{out}: {found.live} new prices of {', '.join(found.answered)}, "
        f"{len(found.offers) - found.live} kept; {len(gpus)} GPUs, {len(providers)} providers; "
        f"{age_text(found.offers, now.date())}"
    )
    if options.out is not None:
        print_result(f"give it to other commands as --prices {out}")
    return 0


def _show_rejected(rejected: Sequence[RejectedOffer], out: Path) -> None:
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
    """The sources of these names, those that are believed most last."""
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in SOURCES:
            near = did_you_mean(name, SOURCES) or f": known are {', '.join(SOURCES)}"
            raise CatalogError(f"--source {name!r}: no such source{near}")
    if not asked:
        raise CatalogError(f"--source: names none: known are {', '.join(SOURCES)}")
    in_regions = [name.strip() for name in (regions or "").split(",") if name.strip()]
    makers: dict[str, Callable[[], PriceSource]] = {
        "gpuhunt": lambda: _gpuhunt(now),
        "aws-public": lambda: _aws_public(in_regions),
        "aws": lambda: _aws(now, in_regions),
    }
    return [makers[name]() for name in SOURCES if name in asked]


def _gpuhunt(now: dt.datetime) -> PriceSource:
    from gpu_catalog.live_prices.sources.gpuhunt_catalogs import (  # noqa: PLC0415 - as below
        GpuhuntCatalogs,
    )

    return GpuhuntCatalogs(now.date())


def _aws_public(regions: Sequence[str]) -> PriceSource:
    from gpu_catalog.live_prices.sources.aws_public import AwsPublic  # noqa: PLC0415 - as below

    return AwsPublic(regions)


def _aws(now: dt.datetime, regions: Sequence[str]) -> PriceSource:
    # What a source needs is loaded when it is asked.
    from gpu_catalog.live_prices.sources.aws_api import (  # noqa: PLC0415 - botocore, for who asks Amazon
        AwsApi,
    )

    return AwsApi(now, regions)
