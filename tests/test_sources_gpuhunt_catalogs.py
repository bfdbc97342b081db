"""gpuhunt as a price source: catalogs in a folder, on a server, and from providers' own APIs."""

import datetime as dt
import io
import logging
import os
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.price_rows import TODAY
from fakes.price_server import PriceServer, price_server
from gpuhunt import AcceleratorVendor, CatalogItem, MissingCredsError

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.live_prices.sources import gpuhunt_catalogs
from gpu_catalog.live_prices.sources.gpuhunt_catalogs import GpuhuntCatalogs
from gpu_catalog.live_prices.sources.raw_offer import SourceError

# gpuhunt leaves its files for Python to close.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

COLUMNS = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,"
    "gpu_vendor,flags,cpu_arch,provider_data"
)
RUNPOD = f"""{COLUMNS}
NVIDIA A40,EU-SE-1,0.44,9,50,1,A40,48.0,False,,nvidia,,x86,{{}}
NVIDIA A40,EU-SE-1,0.88,18,100,2,A40,48.0,False,,nvidia,,x86,{{}}
NVIDIA H100 80GB HBM3,US-KS-2,2.99,20,251,1,H100,80.0,False,,nvidia,,x86,{{}}
NVIDIA H100 80GB HBM3,US-KS-2,21.5,160,2008,8,H100,80.0,False,,nvidia,runpod-cluster,x86,{{}}
AMD Instinct MI300X OAM,EU-RO-1,2.49,24,283,1,MI300X,192.0,False,,amd,,x86,{{}}
cpu3g-2-8,EU-RO-1,0.08,2,8,0,,,False,20.0,,runpod-cpu,x86,{{}}
"""
LAMBDA = f"""{COLUMNS}
gpu_1x_h100_pcie,us-west-3,2.49,26,241.6,1,H100,80.0,False,1099.8,nvidia,,x86,{{}}
gpu_2x_a100,us-west-3,2.58,60,429.6,2,A100,40.0,False,1099.8,nvidia,,x86,{{}}
gpu_1x_a10,us-west-3,free,30,214.8,1,A10,24.0,False,1503.6,nvidia,,x86,{{}}
"""
GOOGLE = f"""{COLUMNS}
g2-standard-4,europe-west4-a,0.79,4,16,1,L4,24.0,False,,nvidia,,x86,{{}}
g2-standard-4,europe-west4-c,0.78,4,16,1,L4,24.0,False,,nvidia,,x86,{{}}
g2-standard-4,us-south1-ai1b,0.71,4,16,1,L4,24.0,False,,nvidia,,x86,{{}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with catalogs of 20 November, as gpuhunt writes them."""
    for name, text in (("runpod", RUNPOD), ("lambdalabs", LAMBDA)):
        file = tmp_path / f"{name}.csv"
        file.write_text(text, encoding="utf-8")
        written = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC).timestamp()
        os.utime(file, (written, written))
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PriceServer]:
    """Server of catalogs, as gpuhunt publishes them: a version, and a zip file."""
    monkeypatch.delenv("GPUHUNT_CATALOG_DIR", raising=False)
    with price_server() as server:
        server.hangs_up = True  # gpuhunt would not close a reply that says "not found"
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", f"{server.url}/v3")
        yield server


def publish(server: PriceServer, provider: str, version: str, text: str) -> None:
    """Serve a provider's catalog where gpuhunt looks for it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"{provider}.csv", text)
    server.pages[f"/v3/{provider}/version"] = f"{version}\n".encode()
    server.pages[f"/v3/{provider}/{version}/catalog.zip"] = content.getvalue()


@pytest.mark.usefixtures("folder")
def test_an_offer_has_the_memory_of_its_host() -> None:
    """Lambda's is in 10^9 bytes there: its 225 GiB are 241.6."""
    offers = refresh([GpuhuntCatalogs(TODAY)], load_catalog(), [], TODAY).offers
    memories = {(o.instance, o.gpus_per_instance): o.host_memory_gib for o in offers}
    assert memories["NVIDIA A40", 2] == 100
    assert memories["gpu_1x_h100_pcie", 1] == pytest.approx(225, abs=0.1)


def test_a_folder_of_catalogs_is_read(folder: Path) -> None:
    """Whole instances with a GPU are offers; clusters and instances without a GPU are not."""
    result = refresh([GpuhuntCatalogs(TODAY)], load_catalog(), [], TODAY)
    assert [
        (o.gpu, o.provider, o.instance, o.gpus_per_instance, o.usd_per_hour, o.market, o.as_of)
        for o in result.offers
    ] == [
        *[
            (
                "H100-PCIe",
                "lambda",
                "gpu_1x_h100_pcie",
                1,
                2.49,
                "on-demand",
                dt.date(2026, 11, 20),
            ),
            ("A40", "runpod", "NVIDIA A40", 1, 0.44, "on-demand", dt.date(2026, 11, 20)),
            ("A40", "runpod", "NVIDIA A40", 2, 0.88, "on-demand", dt.date(2026, 11, 20)),
            (
                "H100-SXM",
                "runpod",
                "NVIDIA H100 80GB HBM3",
                1,
                2.99,
                "on-demand",
                dt.date(2026, 11, 20),
            ),
            (
                "MI300X",
                "runpod",
                "AMD Instinct MI300X OAM",
                1,
                2.49,
                "on-demand",
                dt.date(2026, 11, 20),
            ),
        ]
    ]
    assert {o.source for o in result.offers} == {"gpuhunt: lambdalabs.csv", "gpuhunt: runpod.csv"}
    (ambiguous,) = result.unidentified
    assert ambiguous.endswith(": A100 of lambda 1")
    [warning] = result.warnings
    assert "lambdalabs" in warning
    assert "line 4" in warning
    assert "'free'" in warning
    assert folder.exists()


def test_offers_of_google_cloud_are_of_regions(server: PriceServer) -> None:
    """Its catalog lists zones; the cheapest one stands for its region."""
    publish(server, "gcp", "20261119", GOOGLE)
    result = refresh([GpuhuntCatalogs(TODAY, live=False)], load_catalog(), [], TODAY)
    offers = [(o.region, o.usd_per_hour) for o in result.offers]
    assert offers == [("europe-west4", 0.78), ("us-south1", 0.71)]


def test_a_server_of_catalogs_is_read_with_the_date_of_each(server: PriceServer) -> None:
    """Providers without a catalog are named, without a traceback."""
    publish(server, "runpod", "20261119", RUNPOD)
    publish(server, "lambdalabs", "2026-11-18", LAMBDA)
    result = refresh([GpuhuntCatalogs(TODAY, live=False)], load_catalog(), [], TODAY)
    assert {(o.provider, o.as_of) for o in result.offers} == {
        ("runpod", dt.date(2026, 11, 19)),
        ("lambda", dt.date(2026, 11, 18)),
    }
    versions = {"runpod": "20261119", "lambdalabs": "2026-11-18"}
    assert {o.source for o in result.offers} == {
        f"gpuhunt: {provider} catalog {version}" for provider, version in versions.items()
    }
    assert len(result.warnings) == 6
    assert any("Failed" in line for line in result.warnings)
    assert "3 more" in result.warnings[-1]


def test_a_version_that_is_no_date_gives_none(server: PriceServer) -> None:
    """The price is then dated by the day that it was recorded."""
    publish(server, "runpod", "20269999", RUNPOD)
    result = refresh([GpuhuntCatalogs(TODAY, live=False)], load_catalog(), [], TODAY)
    assert {(o.as_of, o.date) for o in result.offers} == {(None, TODAY)}


def test_a_dead_server_is_a_one_line_error(
    server: PriceServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The log of gpuhunt does not reach the terminal; its settings are restored afterwards."""
    assert server.pages == {}
    with pytest.raises(SourceError) as error:
        GpuhuntCatalogs(TODAY, live=False).fetch()
    assert "GPUHUNT_CATALOG_DIR" in str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")
    assert caplog.text == ""
    assert socket.getdefaulttimeout() is None
    assert logging.getLogger("gpuhunt").propagate
    assert logging.getLogger("gpuhunt").handlers == []


def test_a_folder_without_catalogs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not named after a provider gives a warning."""
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    with pytest.raises(SourceError, match=r"has no catalogs \(PROVIDER.csv\)"):
        GpuhuntCatalogs(TODAY).fetch()
    (tmp_path / "acme.csv").write_text(RUNPOD, encoding="utf-8")
    answer = GpuhuntCatalogs(TODAY).fetch()
    assert list(answer.offers) == []
    [warning] = answer.warnings
    assert warning.startswith(f"{tmp_path / 'acme.csv'}: ")


def test_without_gpuhunt_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is an optional extra."""
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(SourceError, match=r"is not installed: pip install '\.\[prices\]'"):
        GpuhuntCatalogs(TODAY).fetch()


class Live:
    """Provider whose API gpuhunt queries."""

    NAME = "vastai"
    fails: Exception | None = None
    needs: str | None = None

    @classmethod
    def from_env(cls) -> "Live":
        if cls.needs is not None:
            raise MissingCredsError(f"Set the {cls.needs} environment variable")
        return cls()

    def get(self, _: object) -> list[CatalogItem]:
        if self.fails is not None:
            raise self.fails
        item = CatalogItem(
            provider=self.NAME,
            instance_name="4711",
            location="is",
            price=0.31,
            cpu=16,
            memory=64.0,
            gpu_count=1,
            gpu_name="RTX4090",
            gpu_memory=24.0,
            spot=False,
            disk_size=100.0,
            gpu_vendor=AcceleratorVendor.NVIDIA,
        )
        return [item]


class Keyless(Live):
    NAME = "seeweb"
    needs = "SEEWEB_API_TOKEN"


class Dead(Live):
    NAME = "lium"
    fails = ConnectionError("https://api.example/?key=SECRET")


def test_providers_that_need_no_key_are_queried_live(
    server: PriceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider without its key is skipped; one that fails is named, without its request."""
    for provider in ("aws", "azure", "cloudrift", "gcp", "lambdalabs", "nebius", "oci", "verda"):
        publish(server, provider, "20261119", COLUMNS)
    publish(server, "runpod", "20261119", RUNPOD)
    monkeypatch.setattr(gpuhunt_catalogs, "_live_providers", lambda: iter([Live, Keyless, Dead]))
    answer = GpuhuntCatalogs(TODAY).fetch()
    [live] = [o for o in answer.offers if "queried live" in o.source]
    assert (live.provider, live.instance, live.price, live.as_of) == ("vast", "4711", 0.31, TODAY)
    assert any("lium" in warning for warning in answer.warnings)
    assert "SECRET" not in " ".join(answer.warnings)


def test_gpuhunts_live_providers_are_listed() -> None:
    """They are those of this version whose libraries are installed."""
    names = {kind.NAME for kind in gpuhunt_catalogs._live_providers()}
    assert {"vultr", "crusoe", "digitalocean"} <= names
    assert not {"aws", "vastai"} & names
