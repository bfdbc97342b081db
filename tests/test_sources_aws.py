"""Amazon as a source: its APIs by answers as it gives them, its public files by a local server."""

import datetime as dt
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from builders.price_rows import TODAY
from fakes.price_server import PriceServer, price_server

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.live_prices.sources.aws_api import AwsApi, boto3_client
from gpu_catalog.live_prices.sources.aws_instances import aws_instances
from gpu_catalog.live_prices.sources.aws_public import AwsPublic
from gpu_catalog.live_prices.sources.raw_offer import SourceError

NOW = dt.datetime(2026, 11, 23, 12, tzinfo=dt.UTC)
KEY, SECRET, TOKEN = "AKIAQWERTYUIOPASDFGH", "wJalrXUtnFEMI/K7MDENG+EXAMPLE", "FwoGZXIvYXdzEXAMPLE"
COLUMNS = (
    *("SKU", "OfferTermCode", "RateCode", "TermType", "PriceDescription", "EffectiveDate"),
    *("StartingRange", "EndingRange", "Unit", "PricePerUnit", "Currency", "Product Family"),
    *("Location", "Instance Type", "Instance Family", "vCPU", "Memory", "Tenancy"),
    *("Operating System", "CapacityStatus", "GPU", "Pre Installed S/W", "Region Code"),
    "MarketOption",
)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some that are nobody's, and no files of the user's."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", TOKEN),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):
        monkeypatch.setenv(name, value)


def product(instance: str, region: str, usd: str, **changes: Any) -> str:
    """A product of the Price List, as its API writes it."""
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
    """Clients of Amazon's services whose answers are written beforehand."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str], Any] = {}
        self._stubbers: dict[tuple[str, str], Stubber] = {}

    def of(self, service: str, region: str = "us-east-1") -> Stubber:
        """What answers a service in a region."""
        key = (service, region)
        if key not in self._clients:
            self._clients[key] = boto3.client(service, region_name=region)
            self._stubbers[key] = Stubber(self._clients[key])
            self._stubbers[key].activate()
        return self._stubbers[key]

    def client(self, service: str, region: str) -> Any:
        self.of(service, region)
        return self._clients[service, region]

    def all_were_asked(self) -> None:
        for stubber in self._stubbers.values():
            stubber.assert_no_pending_responses()


@pytest.fixture
def stubs() -> Stubs:
    """None of them with an answer yet."""
    return Stubs()


def price_list(stubs: Stubs, *products: str, **page: str) -> None:
    """A page of the Price List, and how it must be asked for."""
    asked: dict[str, Any] = {
        "ServiceCode": "AmazonEC2",
        "FormatVersion": "aws_v1",
        "Filters": [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in (
                ("capacitystatus", "Used"),
                ("instanceFamily", "GPU instance"),
                ("operatingSystem", "Linux"),
                ("preInstalledSw", "NA"),
                ("tenancy", "Shared"),
            )
        ],
    }
    if "after" in page:
        asked["NextToken"] = page["after"]
    answer = {"FormatVersion": "aws_v1", "PriceList": list(products)}
    if "before" in page:
        answer["NextToken"] = page["before"]
    stubs.of("pricing").add_response("get_products", answer, asked)


def spot_history(stubs: Stubs, region: str, *rows: tuple[str, str, str, int]) -> None:
    """The spot prices of a region: instance, zone, price, hours ago."""
    asked = {
        "InstanceTypes": sorted(aws_instances()),
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": NOW,
    }
    history = [
        {
            "InstanceType": instance,
            "AvailabilityZone": zone,
            "SpotPrice": price,
            "ProductDescription": "Linux/UNIX",
            "Timestamp": NOW - dt.timedelta(hours=hours),
        }
        for instance, zone, price, hours in rows
    ]
    answer = {"SpotPriceHistory": history, "NextToken": ""}
    stubs.of("ec2", region).add_response("describe_spot_price_history", answer, asked)


def test_on_demand_and_spot_prices_are_asked_for_page_by_page(stubs: Stubs) -> None:
    """Of whole instances, in every region at once; spot by region, the lowest of the zones now."""
    price_list(
        stubs,
        product("p5.48xlarge", "us-east-1", "55.0400000000"),
        product("p5.48xlarge", "us-east-1", "31.4640000000", marketoption="CapacityBlock"),
        product("g5.xlarge", "cn-north-1", "11.2", currency="CNY"),
        before="page2",
    )
    price_list(
        stubs,
        product("g5.xlarge", "us-west-2", "1.0060000000"),
        product("g5.xlarge", "us-west-2", "0.0000000000"),
        product("g6f.large", "us-west-2", "0.2", gpu="0.125"),
        product("p4d.24xlarge", "us-west-2", "21.9576", gpu=1),
        product("g5.xlarge", "us-west-2", "700", unit="Quantity"),
        after="page2",
    )
    regions = {"Regions": [{"RegionName": "us-west-2"}, {"RegionName": "us-east-1"}]}
    stubs.of("ec2").add_response("describe_regions", regions, {})
    spot_history(stubs, "us-east-1", ("p5.48xlarge", "us-east-1a", "15.1", 3))
    spot_history(
        stubs,
        "us-west-2",
        ("g5.xlarge", "us-west-2a", "0.45", 3),
        ("g5.xlarge", "us-west-2a", "0.30", 9),
        ("g5.xlarge", "us-west-2b", "0.41", 5),
    )
    found = refresh([AwsApi(NOW, client=stubs.client)], load_catalog(), [], TODAY)
    stubs.all_were_asked()
    assert [
        (o.gpu, o.instance, o.region, o.gpus_per_instance, o.usd_per_hour, o.market, o.note)
        for o in found.offers
    ] == [
        ("H100-SXM", "p5.48xlarge", "us-east-1", 8, 55.04, "on-demand", None),
        ("A10G", "g5.xlarge", "us-west-2", 1, 1.006, "on-demand", None),
        ("H100-SXM", "p5.48xlarge", "us-east-1", 8, 15.1, "spot", None),
        ("A10G", "g5.xlarge", "us-west-2", 1, 0.41, "spot", "the lowest of 2 zones"),
    ]
    for offer in found.offers:
        assert (offer.provider, offer.minimum_minutes, offer.as_of) == ("aws", 1, TODAY)
        assert offer.source in {"aws: Price List API", "aws: spot price history"}
    assert [str(doubt).partition(": ")[2] for doubt in found.doubts] == [
        "the price is in CNY, not in US dollars: left out",
        "on demand price 0, which means that it is not known: left out",
        "1 GPUs, where p4d.24xlarge has 8: left out",
    ]
    assert found.missed == ("aws: 1 prices left out, not in the catalog: g6f.large 1",)


def test_only_the_regions_asked_for_are_asked_for_spot(stubs: Stubs) -> None:
    """No list of regions is needed then."""
    price_list(stubs, product("g5.xlarge", "us-west-2", "1.006"))
    spot_history(stubs, "eu-west-1", ("g5.xlarge", "eu-west-1a", "0.4", 1))
    answer = AwsApi(NOW, ["eu-west-1"], stubs.client).fetch()
    stubs.all_were_asked()
    assert {(o.market, o.region) for o in answer.offers} == {
        ("on-demand", "us-west-2"),
        ("spot", "eu-west-1"),
    }


def test_a_region_that_refuses_costs_a_line(stubs: Stubs) -> None:
    """And the list of regions, too: on-demand prices are there all the same."""
    price_list(stubs, product("g5.xlarge", "us-west-2", "1.006"))
    stubs.of("ec2", "me-south-1").add_client_error(
        "describe_spot_price_history", "AuthFailure", f"not for {KEY}"
    )
    answer = AwsApi(NOW, ["me-south-1"], stubs.client).fetch()
    assert list(answer.warnings) == [
        "no spot prices of me-south-1: DescribeSpotPriceHistory was refused (AuthFailure)"
    ]
    price_list(stubs, product("g5.xlarge", "us-west-2", "1.006"))
    stubs.of("ec2").add_client_error("describe_regions", "UnauthorizedOperation")
    answer = AwsApi(NOW, client=stubs.client).fetch()
    assert [o.instance for o in answer.offers] == ["g5.xlarge"]
    assert list(answer.warnings) == [
        "no spot prices: DescribeRegions was refused (UnauthorizedOperation)"
    ]


def test_what_amazon_says_of_a_request_goes_nowhere(stubs: Stubs) -> None:
    """Its words on a signature repeat the request: key, token and all."""
    stubs.of("pricing").add_client_error(
        "get_products",
        "SignatureDoesNotMatch",
        f"The Canonical String should have been 'GET / {KEY} x-amz-security-token:{TOKEN}'",
    )
    with pytest.raises(SourceError) as error:
        AwsApi(NOW, client=stubs.client).fetch()
    assert str(error.value) == "GetProducts was refused (SignatureDoesNotMatch)"
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_without_credentials_it_is_told_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, and nobody is asked."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    boto3.DEFAULT_SESSION = None
    with pytest.raises(SourceError, match=r"^no credentials: .* --source aws-public$"):
        AwsApi(NOW).fetch()


def test_where_nobody_answers_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    boto3.DEFAULT_SESSION = None

    def client(service: str, region: str) -> Any:
        return boto3.client(service, region_name=region, endpoint_url="http://127.0.0.1:9")

    with pytest.raises(SourceError, match=r"^cannot be asked \(EndpointConnectionError\)$"):
        AwsApi(NOW, client=client).fetch()


def test_a_client_gives_up_in_seconds() -> None:
    """Its own defaults are minutes."""
    config = boto3_client("ec2", "us-east-1").meta.config
    assert (config.connect_timeout, config.read_timeout) == (5, 30)
    assert config.retries["total_max_attempts"] == 2


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
    told = [[(usual | row).get(name, "") for name in COLUMNS] for row in rows]
    lines = [",".join(f'"{value}"' if value else "" for value in line) for line in [*head, *told]]
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def server() -> Iterator[PriceServer]:
    """A server on this machine."""
    with price_server() as server:
        yield server


def address(region: str) -> str:
    """Where a region's file is."""
    return f"/offers/v1.0/aws/AmazonEC2/current/{region}/index.csv"


def test_the_public_file_is_read_without_an_account(
    server: PriceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one job can rent, and nothing else that is priced for the same instance."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    rows = [
        {"Instance Type": "p5.48xlarge", "PricePerUnit": "55.0400000000", "GPU": "8"},
        {"Instance Type": "g6e.xlarge", "PricePerUnit": "1.8610000000", "Pre Installed S/W": ""},
        {"Instance Type": "g6e.xlarge", "PricePerUnit": "2.2", "Operating System": "Windows"},
        {"Instance Type": "g6e.xlarge", "PricePerUnit": "1.9", "Tenancy": "Dedicated"},
        {"Instance Type": "g6e.xlarge", "PricePerUnit": "0", "CapacityStatus": "UnusedCapacity"},
        {"Instance Type": "g6e.xlarge", "PricePerUnit": "0.9", "TermType": "Reserved"},
        {"Instance Type": "g6e.xlarge", "PricePerUnit": "2.5", "Pre Installed S/W": "SQL Web"},
        {"Instance Type": "p5.4xlarge", "PricePerUnit": "4.0", "MarketOption": "CapacityBlock"},
        {"Instance Type": "m5.large", "PricePerUnit": "0.096", "Instance Family": "General"},
        {"Instance Type": "g6f.large", "PricePerUnit": "0.202", "GPU": "0.125"},
        {"Instance Type": "g5.xlarge", "PricePerUnit": "1.006", "Currency": "CNY"},
        {"Instance Type": "g4dn.xlarge", "PricePerUnit": "0.526", "GPU": ""},
    ]
    server.pages[address("us-east-1")] = public_file(*rows)
    found = refresh([AwsPublic(["us-east-1"], server.url)], load_catalog(), [], TODAY)
    assert [(o.gpu, o.instance, o.gpus_per_instance, o.usd_per_hour) for o in found.offers] == [
        ("H100-SXM", "p5.48xlarge", 8, 55.04),
        ("L40S", "g6e.xlarge", 1, 1.861),
        ("T4", "g4dn.xlarge", 1, 0.526),
    ]
    assert {(o.as_of, o.source) for o in found.offers} == {
        (dt.date(2026, 11, 20), "aws-public: offer file of 2026-11-20")
    }
    assert found.missed == ("aws-public: 1 prices left out, not in the catalog: g6f.large 1",)
    assert [str(doubt).partition(": ")[2] for doubt in found.doubts] == [
        "the price is in CNY, not in US dollars: left out"
    ]


def test_a_region_whose_file_is_not_there_costs_a_line(server: PriceServer) -> None:
    """As long as another one answers."""
    server.pages[address("us-east-1")] = public_file(
        {"Instance Type": "g5.xlarge", "PricePerUnit": "1.006"}, day="some day"
    )
    answer = AwsPublic(["us-east-1", "atlantis-1"], server.url).fetch()
    assert [(o.instance, o.as_of) for o in answer.offers] == [("g5.xlarge", None)]
    [line] = answer.warnings
    assert line == f"atlantis-1: {server.url}{address('atlantis-1')} is not to be had (HTTP 404)"
    assert answer.regions_apart


def broken_off(server: PriceServer) -> None:
    """A file whose end does not come."""
    row = {"Instance Type": "g5.xlarge", "PricePerUnit": "1.006"}
    server.pages[address("us-east-1")] = public_file(row)
    server.missing_bytes = 1000


def no_offer_file(server: PriceServer) -> None:
    """What a gateway says."""
    server.pages[address("us-east-1")] = b"<html>\nmaintenance\n</html>\n"


def not_text(server: PriceServer) -> None:
    """Bytes."""
    server.pages[address("us-east-1")] = b"\xff\xfe" * 4000


def silent(server: PriceServer) -> None:
    """A server that hangs up."""
    server.hangs_up = True


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (broken_off, "broke off, 1000 bytes were missing"),
        (no_offer_file, "is no offer file: it has no column TermType, Unit, "),
        (not_text, "does not answer ("),
        (silent, "does not answer ("),
    ],
)
def test_a_file_that_cannot_be_read_is_no_answer(
    broken: Callable[[PriceServer], None], words: str, server: PriceServer
) -> None:
    """Half a table would be taken for the whole."""
    broken(server)
    with pytest.raises(SourceError) as error:
        AwsPublic(["us-east-1"], server.url).fetch()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_public_files_are_where_amazon_says() -> None:
    """Two regions unless told otherwise: a file has hundreds of megabytes."""
    source = AwsPublic()
    assert source._base_url == "https://pricing.us-east-1.amazonaws.com"
    assert source._regions == ("us-east-1", "us-west-2")
