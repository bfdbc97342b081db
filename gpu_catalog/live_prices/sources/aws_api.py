"""Amazon's prices by its APIs: on demand by the Price List, spot by EC2's price history.

Needs credentials, which boto3 finds where it always does. None of them, and no message of Amazon's,
which may repeat a signed request, goes into what this says.
"""

import datetime as dt
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from gpu_catalog.live_prices.sources.aws_instances import (
    AWS,
    GPU_FAMILY,
    MINIMUM_MINUTES,
    RENTED,
    aws_instances,
    gpus_of,
)
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

PRICES_REGION = "us-east-1"  # one of the few that answer for all
NO_CREDENTIALS = (
    "no credentials: set them up as for Amazon's own tools, or take --source aws-public"
)

Client = Callable[[str, str], Any]


def boto3_client(service: str, region: str) -> Any:
    """A client that gives up in seconds where nobody answers."""
    import boto3  # noqa: PLC0415 - a fifth of a second, for who asks Amazon
    from botocore.config import Config  # noqa: PLC0415 - as above

    retries = {"mode": "standard", "total_max_attempts": 2}
    config = Config(connect_timeout=5, read_timeout=30, retries=retries)
    return boto3.client(service, region_name=region, config=config)


class AwsApi:
    """Amazon's APIs as a source.

    Args:
        now: the moment it is asked.
        regions: those to ask for spot prices; none for every one the account may use. On-demand
            prices come for all regions at once.
        client: makes a client of a service in a region.
    """

    name = "aws"

    def __init__(
        self, now: dt.datetime, regions: Sequence[str] = (), client: Client = boto3_client
    ) -> None:
        self._now = now
        self._regions = tuple(regions)
        self._client = client

    def fetch(self) -> SourceReply:
        """On-demand and spot prices of every instance of the table.

        Raises:
            SourceError: there are no credentials, or the Price List does not answer.
        """
        try:
            offers = list(self._on_demand())
        except (BotoCoreError, ClientError) as error:
            raise SourceError(_said(error)) from None
        warnings = []
        try:
            regions = self._regions or self._enabled_regions()
        except (BotoCoreError, ClientError) as error:
            return SourceReply(offers, [f"no spot prices: {_said(error)}"], regions_apart=True)
        for region in regions:
            try:
                offers += self._spot(region)
            except (BotoCoreError, ClientError) as error:
                warnings.append(f"no spot prices of {region}: {_said(error)}")
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
                yield from self._of_product(json.loads(text))

    def _of_product(self, product: dict[str, Any]) -> Iterator[RawOffer]:
        about = product["product"]["attributes"]
        # Some are sold by reserved block only.
        if about.get("marketoption", "OnDemand") != "OnDemand":
            return
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for rate in term["priceDimensions"].values():
                if rate.get("unit") != "Hrs":
                    continue
                for currency, price in rate["pricePerUnit"].items():
                    yield self._offer(
                        about["instanceType"],
                        about.get("regionCode", ""),
                        price,
                        currency,
                        gpus_of(about["instanceType"], about.get("gpu", "")),
                    )

    def _offer(self, name: str, region: str, price: str, currency: str, gpus: int) -> RawOffer:
        return RawOffer(
            provider=AWS,
            region=region,
            instance=name,
            gpus=gpus,
            price=price,
            currency=currency,
            market="on-demand",
            source="aws: Price List API",
            gpu_name=name,
            minimum_minutes=MINIMUM_MINUTES,
            as_of=self._now.date(),
            first_hand=True,
        )

    def _enabled_regions(self) -> list[str]:
        answer = self._client("ec2", PRICES_REGION).describe_regions()
        return sorted(region["RegionName"] for region in answer["Regions"])

    def _spot(self, region: str) -> Iterator[RawOffer]:
        """The price in force in a region: the lowest of its zones."""
        pages = (
            self._client("ec2", region)
            .get_paginator("describe_spot_price_history")
            .paginate(
                InstanceTypes=sorted(aws_instances()),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=self._now,  # what is in force then, whenever it was set
            )
        )
        zones: dict[str, dict[str, tuple[dt.datetime, float]]] = defaultdict(dict)
        for page in pages:
            for row in page["SpotPriceHistory"]:
                set_at, usd = row["Timestamp"], float(row["SpotPrice"])
                of = zones[row["InstanceType"]]
                if set_at >= of.get(row["AvailabilityZone"], (set_at, usd))[0]:
                    of[row["AvailabilityZone"]] = (set_at, usd)
        for name, of in sorted(zones.items()):
            instance = aws_instances()[name]
            yield RawOffer(
                provider=AWS,
                region=region,
                instance=name,
                gpus=instance.gpus,
                price=min(usd for _, usd in of.values()),
                market="spot",
                source="aws: spot price history",
                gpu_name=name,
                minimum_minutes=MINIMUM_MINUTES,
                as_of=self._now.date(),
                first_hand=True,
                note=None if len(of) == 1 else f"the lowest of {len(of)} zones",
            )


def _said(error: Exception) -> str:
    """An error without what Amazon wrote: that may repeat the request, signature and all."""
    if isinstance(error, NoCredentialsError):
        return NO_CREDENTIALS
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "no code")
        return f"{error.operation_name} was refused ({code})"
    return f"cannot be asked ({type(error).__name__})"
