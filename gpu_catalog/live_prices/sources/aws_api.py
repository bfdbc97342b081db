"""Prices from Amazon's APIs: on demand from the Price List, spot from EC2's price history.

boto3 looks up the credentials in its usual places. Messages never include them, nor Amazon's own
error text, which may repeat a signed request.
"""

import datetime as dt
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from gpu_catalog.live_prices.sources.aws_instances import (
    GPU_FAMILY,
    RENTED,
    aws_instances,
    aws_offer,
    gpus_of,
)
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

PRICES_REGION = "us-east-1"  # one of the few regions whose Price List covers all
NO_CREDENTIALS = "no credentials: set them up as for Amazon's own tools, or use --source aws-public"

Client = Callable[[str, str], Any]


def boto3_client(service: str, region: str) -> Any:
    """Client of a service with timeouts of seconds."""
    import boto3  # noqa: PLC0415 - takes a fifth of a second
    from botocore.config import Config  # noqa: PLC0415 - as above

    retries = {"mode": "standard", "total_max_attempts": 2}
    config = Config(connect_timeout=5, read_timeout=30, retries=retries)
    return boto3.client(service, region_name=region, config=config)


class AwsApi:
    """Amazon's APIs as a source.

    Spot prices are those of ``regions``, by default of all that the account may use. On-demand
    prices come for all regions at once.
    """

    name = "aws"

    def __init__(
        self, now: dt.datetime, regions: Sequence[str] = (), client: Client = boto3_client
    ) -> None:
        self._now = now
        self._regions = tuple(regions)
        self._client = client

    def fetch(self) -> SourceReply:
        """Fetch on-demand and spot prices of all instances in the table.

        Raises:
            SourceError: there are no credentials, or the Price List does not answer.
        """
        try:
            offers = list(self._on_demand())
        except (BotoCoreError, ClientError) as error:
            raise SourceError(_error_text(error)) from None
        warnings = []
        regions = list(self._regions)
        try:
            if not regions:
                enabled = self._client("ec2", PRICES_REGION).describe_regions()["Regions"]
                regions = sorted(region["RegionName"] for region in enabled)
        except (BotoCoreError, ClientError) as error:
            warnings.append(f"no spot prices: {_error_text(error)}")
        for region in regions:
            try:
                offers += self._spot(region)
            except (BotoCoreError, ClientError) as error:
                warnings.append(f"no spot prices of {region}: {_error_text(error)}")
        return SourceReply(offers, warnings, regions_apart=True)

    def _on_demand(self) -> Iterator[RawOffer]:
        rented = RENTED | {"instanceFamily": GPU_FAMILY}
        pages = (
            self._client("pricing", PRICES_REGION)
            .get_paginator("get_products")
            .paginate(
                ServiceCode="AmazonEC2",
                FormatVersion="aws_v1",
                Filters=[
                    {"Type": "TERM_MATCH", "Field": field, "Value": value}
                    for field, value in sorted(rented.items())
                ],
            )
        )
        for page in pages:
            for text in page["PriceList"]:
                yield from self._product_offers(json.loads(text))

    def _product_offers(self, product: dict[str, Any]) -> Iterator[RawOffer]:
        attributes = product["product"]["attributes"]
        # Some instances are sold as reserved blocks only.
        if attributes.get("marketoption", "OnDemand") != "OnDemand":
            return
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for rate in term["priceDimensions"].values():
                if rate.get("unit") != "Hrs":
                    continue
                for currency, price in rate["pricePerUnit"].items():
                    yield aws_offer(
                        attributes["instanceType"],
                        region=attributes.get("regionCode", ""),
                        gpus=gpus_of(attributes["instanceType"], attributes.get("gpu", "")),
                        price=price,
                        currency=currency,
                        market="on-demand",
                        source="aws: Price List API",
                        as_of=self._now.date(),
                    )

    def _spot(self, region: str) -> Iterator[RawOffer]:
        """Current prices in a region: the lowest of its zones."""
        pages = (
            self._client("ec2", region)
            .get_paginator("describe_spot_price_history")
            .paginate(
                InstanceTypes=sorted(aws_instances()),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=self._now,  # gives the current price, whenever it was set
            )
        )
        zones: dict[str, dict[str, tuple[dt.datetime, float]]] = defaultdict(dict)
        for page in pages:
            for row in page["SpotPriceHistory"]:
                set_at, usd = row["Timestamp"], float(row["SpotPrice"])
                latest = zones[row["InstanceType"]]
                if set_at >= latest.get(row["AvailabilityZone"], (set_at, usd))[0]:
                    latest[row["AvailabilityZone"]] = (set_at, usd)
        for name, prices in sorted(zones.items()):
            yield aws_offer(
                name,
                region=region,
                gpus=aws_instances()[name].gpus,
                price=min(usd for _, usd in prices.values()),
                market="spot",
                source="aws: spot price history",
                as_of=self._now.date(),
                note=None if len(prices) == 1 else f"the lowest of {len(prices)} zones",
            )


def _error_text(error: Exception) -> str:
    """Text of an error without Amazon's message, which may repeat the request and its signature."""
    if isinstance(error, NoCredentialsError):
        return NO_CREDENTIALS
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "no code")
        return f"{error.operation_name} was refused ({code})"
    return f"cannot be asked ({type(error).__name__})"
