"""Amazon's public offer files as a price source, read from a local server."""

import datetime as dt
from collections.abc import Callable, Iterator

import pytest
from builders.aws_prices import address, public_file
from builders.price_rows import TODAY
from fakes.price_server import PriceServer, price_server

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.live_prices.sources.aws_public import AwsPublic
from gpu_catalog.live_prices.sources.raw_offer import SourceError

SOURCE = "aws-public: offer file"


@pytest.fixture
def server() -> Iterator[PriceServer]:
    """Server on this machine."""
    with price_server() as server:
        yield server


def test_the_public_file_is_read_without_an_account(
    server: PriceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only prices that a job can rent at are returned, not the instance's other prices."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
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
    result = refresh([AwsPublic(["us-east-1"], server.url)], load_catalog(), [], TODAY)
    assert [(o.gpu, o.instance, o.gpus_per_instance, o.usd_per_hour) for o in result.offers] == [
        ("H100-SXM", "p5.48xlarge", 8, 55.04),
        ("L40S", "g6e.xlarge", 1, 1.861),
        ("T4", "g4dn.xlarge", 1, 0.526),
    ]
    assert {(o.as_of, o.source) for o in result.offers} == {
        (dt.date(2026, 11, 20), f"{SOURCE} of 2026-11-20")
    }
    [unknown] = result.unidentified
    assert unknown.endswith("g6f.large 1")
    [rejected] = result.rejected
    assert "CNY" in rejected.reason


def test_a_region_without_a_file_gives_a_warning(server: PriceServer) -> None:
    """The other regions' prices are returned."""
    server.pages[address("us-east-1")] = public_file(
        {"Instance Type": "g5.xlarge", "PricePerUnit": "1.006"}, day="some day"
    )
    answer = AwsPublic(["us-east-1", "atlantis-1"], server.url).fetch()
    assert [(o.instance, o.as_of) for o in answer.offers] == [("g5.xlarge", None)]
    [line] = answer.warnings
    assert line.startswith(f"atlantis-1: {server.url}{address('atlantis-1')} ")
    assert "404" in line
    assert answer.regions_apart


def broken_off(server: PriceServer) -> None:
    """Serve a file that is cut off."""
    row = {"Instance Type": "g5.xlarge", "PricePerUnit": "1.006"}
    server.pages[address("us-east-1")] = public_file(row)
    server.missing_bytes = 1000


def no_offer_file(server: PriceServer) -> None:
    """Serve a web page instead of a file."""
    server.pages[address("us-east-1")] = b"<html>\nmaintenance\n</html>\n"


def not_text(server: PriceServer) -> None:
    """Serve bytes that are not text."""
    server.pages[address("us-east-1")] = b"\xff\xfe" * 4000


def silent(server: PriceServer) -> None:
    """Have the server hang up."""
    server.hangs_up = True


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (broken_off, "1000 bytes"),
        (no_offer_file, "no column TermType, Unit, "),
        (not_text, "does not answer ("),
        (silent, "does not answer ("),
    ],
)
def test_a_file_that_cannot_be_read_is_no_answer(
    broken: Callable[[PriceServer], None], words: str, server: PriceServer
) -> None:
    """The error is one line; half a table is never used."""
    broken(server)
    with pytest.raises(SourceError) as error:
        AwsPublic(["us-east-1"], server.url).fetch()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_public_files_are_where_amazon_says() -> None:
    """Two regions are read by default, since a file has hundreds of megabytes."""
    source = AwsPublic()
    assert source._base_url == "https://pricing.us-east-1.amazonaws.com"
    assert source._regions == ("us-east-1", "us-west-2")
