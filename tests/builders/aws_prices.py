"""Builders of Amazon's price lists, its public offer files, and stubbed clients."""

import json
from typing import Any

import boto3
from botocore.stub import Stubber

KEY, SECRET, TOKEN = "AKIAQWERTYUIOPASDFGH", "wJalrXUtnFEMI/K7MDENG+EXAMPLE", "FwoGZXIvYXdzEXAMPLE"
COLUMNS = (
    *("SKU", "OfferTermCode", "RateCode", "TermType", "PriceDescription", "EffectiveDate"),
    *("StartingRange", "EndingRange", "Unit", "PricePerUnit", "Currency", "Product Family"),
    *("Location", "Instance Type", "Instance Family", "vCPU", "Memory", "Tenancy"),
    *("Operating System", "CapacityStatus", "GPU", "Pre Installed S/W", "Region Code"),
    "MarketOption",
)


def product(instance: str, region: str, usd: str, **changes: Any) -> str:
    """Product of the Price List, as its API writes it."""
    about = {
        "instanceType": instance,
        "instanceFamily": "GPU instance",
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
        "marketoption": changes.get("marketoption", "OnDemand"),
        "gpu": str(changes.get("gpu", 8 if "48x" in instance else 1)),
    }
    rate = {
        "unit": changes.get("unit", "Hrs"),
        "pricePerUnit": {changes.get("currency", "USD"): usd},
        "description": f"${usd} per On Demand Linux {instance} Instance Hour",
    }
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": about, "sku": "S"},
            "serviceCode": "AmazonEC2",
            "terms": {"OnDemand": {"S.T": {"priceDimensions": {"S.T.R": rate}, "sku": "S"}}},
            "version": "20261120000000",
            "publicationDate": "2026-11-20T00:00:00Z",
        }
    )


class Stubs:
    """Clients of Amazon's services with prepared replies."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str], Any] = {}
        self._stubbers: dict[tuple[str, str], Stubber] = {}

    def stubber(self, service: str, region: str = "us-east-1") -> Stubber:
        """Stubber of a service in a region."""
        key = (service, region)
        if key not in self._clients:
            self._clients[key] = boto3.client(service, region_name=region)
            self._stubbers[key] = Stubber(self._clients[key])
            self._stubbers[key].activate()
        return self._stubbers[key]

    def client(self, service: str, region: str) -> Any:
        self.stubber(service, region)
        return self._clients[service, region]

    def all_were_asked(self) -> None:
        for stubber in self._stubbers.values():
            stubber.assert_no_pending_responses()


def public_file(*rows: dict[str, str], day: str = "2026-11-20T10:00:00Z") -> bytes:
    """A region's offer file, as Amazon writes it."""
    usual = {
        "TermType": "OnDemand",
        "Unit": "Hrs",
        "Currency": "USD",
        "Product Family": "Compute Instance",
        "Instance Family": "GPU instance",
        "Tenancy": "Shared",
        "Operating System": "Linux",
        "CapacityStatus": "Used",
        "Pre Installed S/W": "NA",
        "GPU": "1",
        "Region Code": "us-east-1",
        "MarketOption": "OnDemand",
    }
    head = [
        ["FormatVersion", "v1.0"],
        ["Disclaimer", "This pricing list is for informational purposes only, says Amazon"],
        ["Publication Date", day],
        ["Version", "20261120100000"],
        ["OfferCode", "AmazonEC2"],
        list(COLUMNS),
    ]
    filled = [[(usual | row).get(name, "") for name in COLUMNS] for row in rows]
    lines = [",".join(f'"{value}"' if value else "" for value in line) for line in [*head, *filled]]
    return ("\n".join(lines) + "\n").encode()


def address(region: str) -> str:
    """Path of a region's file."""
    return f"/offers/v1.0/aws/AmazonEC2/current/{region}/index.csv"
