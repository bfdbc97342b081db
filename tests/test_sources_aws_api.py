"""Amazon's APIs as a price source, with replies written as Amazon writes them."""

import datetime as dt
from pathlib import Path
from typing import Any

import boto3
import pytest
from builders.aws_prices import KEY, SECRET, TOKEN, Stubs, product
from builders.price_rows import TODAY

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.live_prices.sources.aws_api import AwsApi, boto3_client
from gpu_catalog.live_prices.sources.aws_instances import aws_instances
from gpu_catalog.live_prices.sources.raw_offer import SourceError
from orchestrator.pricing.billing_terms import billing_text

NOW = dt.datetime(2026, 11, 23, 12, tzinfo=dt.UTC)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set made-up credentials and hide the user's files."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", TOKEN),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):
        monkeypatch.setenv(name, value)


@pytest.fixture
def stubs() -> Stubs:
    """Clients without a reply yet."""
    return Stubs()


def price_list(stubs: Stubs, *products: str, **page: str) -> None:
    """Prepare a page of the Price List, and the request that it answers."""
    request: dict[str, Any] = {
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
        request["NextToken"] = page["after"]
    answer = {"FormatVersion": "aws_v1", "PriceList": list(products)}
    if "before" in page:
        answer["NextToken"] = page["before"]
    stubs.stubber("pricing").add_response("get_products", answer, request)


def spot_history(stubs: Stubs, region: str, *rows: tuple[str, str, str, int]) -> None:
    """Prepare spot prices of a region: instance, zone, price, hours ago."""
    request = {
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
    stubs.stubber("ec2", region).add_response("describe_spot_price_history", answer, request)


def test_on_demand_and_spot_prices_are_fetched_page_by_page(stubs: Stubs) -> None:
    """On-demand prices come for all regions, spot prices by region: the lowest of the zones."""
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
    stubs.stubber("ec2").add_response("describe_regions", regions, {})
    spot_history(stubs, "us-east-1", ("p5.48xlarge", "us-east-1a", "15.1", 3))
    spot_history(
        stubs,
        "us-west-2",
        ("g5.xlarge", "us-west-2a", "0.45", 3),
        ("g5.xlarge", "us-west-2a", "0.30", 9),
        ("g5.xlarge", "us-west-2b", "0.41", 5),
    )
    result = refresh([AwsApi(NOW, client=stubs.client)], load_catalog(), [], TODAY)
    stubs.all_were_asked()
    assert [
        (o.gpu, o.instance, o.region, o.gpus_per_instance, o.usd_per_hour, o.market, o.note)
        for o in result.offers
    ] == [
        ("H100-SXM", "p5.48xlarge", "us-east-1", 8, 55.04, "on-demand", None),
        ("A10G", "g5.xlarge", "us-west-2", 1, 1.006, "on-demand", None),
        ("H100-SXM", "p5.48xlarge", "us-east-1", 8, 15.1, "spot", None),
        ("A10G", "g5.xlarge", "us-west-2", 1, 0.41, "spot", "the lowest of 2 zones"),
    ]
    for offer in result.offers:
        assert (offer.provider, billing_text(offer), offer.as_of) == (
            "aws",
            "by the second, at least 1 min",
            TODAY,
        )
        assert offer.source in {"aws: Price List API", "aws: spot price history"}
    currency, zero, count = (rejected.reason for rejected in result.rejected)
    assert "CNY" in currency
    assert "price 0" in zero
    assert count.startswith("1 GPUs, where")
    [unknown] = result.unidentified
    assert unknown.endswith("g6f.large 1")


def test_spot_prices_are_requested_only_for_the_given_regions(stubs: Stubs) -> None:
    """The list of regions is not requested then."""
    price_list(stubs, product("g5.xlarge", "us-west-2", "1.006"))
    spot_history(stubs, "eu-west-1", ("g5.xlarge", "eu-west-1a", "0.4", 1))
    answer = AwsApi(NOW, ["eu-west-1"], stubs.client).fetch()
    stubs.all_were_asked()
    assert {(o.market, o.region) for o in answer.offers} == {
        ("on-demand", "us-west-2"),
        ("spot", "eu-west-1"),
    }


def test_a_region_that_refuses_gives_a_warning(stubs: Stubs) -> None:
    """On-demand prices are still returned, even if the list of regions is refused."""
    price_list(stubs, product("g5.xlarge", "us-west-2", "1.006"))
    stubs.stubber("ec2", "me-south-1").add_client_error(
        "describe_spot_price_history", "AuthFailure", f"not for {KEY}"
    )
    answer = AwsApi(NOW, ["me-south-1"], stubs.client).fetch()
    [warning] = answer.warnings
    assert "me-south-1" in warning
    assert "AuthFailure" in warning
    assert KEY not in warning
    price_list(stubs, product("g5.xlarge", "us-west-2", "1.006"))
    stubs.stubber("ec2").add_client_error("describe_regions", "UnauthorizedOperation")
    answer = AwsApi(NOW, client=stubs.client).fetch()
    assert [o.instance for o in answer.offers] == ["g5.xlarge"]
    [warning] = answer.warnings
    assert "UnauthorizedOperation" in warning


def test_amazons_text_about_a_request_is_never_shown(stubs: Stubs) -> None:
    """A text about a signature repeats the request, with key and token."""
    stubs.stubber("pricing").add_client_error(
        "get_products",
        "SignatureDoesNotMatch",
        f"The Canonical String should have been 'GET / {KEY} x-amz-security-token:{TOKEN}'",
    )
    with pytest.raises(SourceError) as error:
        AwsApi(NOW, client=stubs.client).fetch()
    assert "SignatureDoesNotMatch" in str(error.value)
    assert KEY not in str(error.value)
    assert TOKEN not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_without_credentials_the_error_names_a_source_that_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    boto3.DEFAULT_SESSION = None
    with pytest.raises(SourceError, match=r"^no credentials: .* --source aws-public$"):
        AwsApi(NOW).fetch()


def test_an_unreachable_api_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the cause."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    boto3.DEFAULT_SESSION = None

    def client(service: str, region: str) -> Any:
        return boto3.client(service, region_name=region, endpoint_url="http://127.0.0.1:9")

    with pytest.raises(SourceError, match=r"^cannot be asked \(EndpointConnectionError\)$"):
        AwsApi(NOW, client=client).fetch()


def test_a_client_gives_up_in_seconds() -> None:
    """With boto3's defaults it would take minutes."""
    config = boto3_client("ec2", "us-east-1").meta.config
    assert (config.connect_timeout, config.read_timeout) == (5, 30)
    assert config.retries["total_max_attempts"] == 2
