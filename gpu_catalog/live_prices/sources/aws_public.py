"""Amazon's on-demand prices from its public offer files, one per region; no account is needed.

A file has hundreds of megabytes, so it is streamed, and only rows of GPUs are kept.
"""

import contextlib
import csv
import datetime as dt
import itertools
from collections.abc import Iterable, Iterator, Sequence

from gpu_catalog.live_prices.sources.aws_instances import GPU_FAMILY, aws_offer, gpus_of
from gpu_catalog.live_prices.sources.http_reply import reply_lines
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

BASE_URL = "https://pricing.us-east-1.amazonaws.com"
REGIONS = ("us-east-1", "us-west-2")
HEAD_LINES = 5  # of metadata, before the column names
RENTED = {
    "TermType": {"OnDemand"},
    "Unit": {"Hrs"},
    "Tenancy": {"Shared"},
    "Operating System": {"Linux"},
    "CapacityStatus": {"Used"},
    "Pre Installed S/W": {"", "NA"},
    "Instance Family": {GPU_FAMILY},
}
NEEDED = (*RENTED, "PricePerUnit", "Currency", "Instance Type", "Region Code", "GPU")


class AwsPublic:
    """The public offer files as a source."""

    name = "aws-public"

    def __init__(self, regions: Sequence[str] = (), base_url: str | None = None) -> None:
        self._regions = tuple(regions) or REGIONS
        self._base_url = base_url or BASE_URL

    def fetch(self) -> SourceReply:
        """Fetch on-demand prices of the regions.

        Raises:
            SourceError: no file can be read.
        """
        offers: list[RawOffer] = []
        warnings: list[str] = []
        for region in self._regions:
            try:
                offers += self._region_offers(region)
            except SourceError as error:
                warnings.append(f"{region}: {error}")
        if len(warnings) == len(self._regions):
            raise SourceError("; ".join(warnings))
        return SourceReply(offers, warnings, regions_apart=True)

    def _region_offers(self, region: str) -> list[RawOffer]:
        url = f"{self._base_url}/offers/v1.0/aws/AmazonEC2/current/{region}/index.csv"
        with reply_lines(url) as lines:
            return list(_rented(lines))


def _rented(lines: Iterable[str]) -> Iterator[RawOffer]:
    """Prices in an offer file that a job can rent at.

    Raises:
        SourceError: this is not an offer file.
    """
    lines = iter(lines)
    metadata = dict(
        row[:2] for row in csv.reader(itertools.islice(lines, HEAD_LINES)) if len(row) > 1
    )
    columns = next(csv.reader(itertools.islice(lines, 1)), [])
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise SourceError(f"is not an offer file: it has no column {', '.join(missing)}")
    as_of = None
    with contextlib.suppress(ValueError):
        as_of = dt.date.fromisoformat(metadata.get("Publication Date", "")[:10])
    market = columns.index("MarketOption") if "MarketOption" in columns else None
    at = {name: columns.index(name) for name in NEEDED}
    # Searching a line for the family is many times faster than parsing it.
    for row in csv.reader(line for line in lines if GPU_FAMILY in line):
        if len(row) != len(columns) or any(
            row[at[n]] not in values for n, values in RENTED.items()
        ):
            continue
        if market is not None and row[market] not in {"", "OnDemand"}:
            continue
        name = row[at["Instance Type"]]
        yield aws_offer(
            name,
            region=row[at["Region Code"]],
            gpus=gpus_of(name, row[at["GPU"]]),
            price=row[at["PricePerUnit"]],
            currency=row[at["Currency"]],
            market="on-demand",
            source="aws-public: offer file" + ("" if as_of is None else f" of {as_of}"),
            as_of=as_of,
        )
