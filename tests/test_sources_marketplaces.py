"""Marketplaces and serverless GPUs as price sources: recorded replies from a local server."""

import json
from collections.abc import Callable, Iterator

import pytest
from builders.price_rows import TODAY
from fakes.price_server import PriceServer, price_server

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.refresh import Refreshed, refresh
from gpu_catalog.live_prices.sources.hugging_face_jobs import HuggingFaceJobs
from gpu_catalog.live_prices.sources.modal import Modal
from gpu_catalog.live_prices.sources.raw_offer import PriceSource, SourceError
from gpu_catalog.live_prices.sources.runpod_community import RunpodCommunity
from gpu_catalog.live_prices.sources.vast import Vast

# Fields of replies that the sources read, as their servers gave them in the autumn of 2026.
RUNPOD = {
    "data": {
        "gpuTypes": [
            {
                "id": "NVIDIA GeForce RTX 4080 SUPER",
                "memoryInGb": 16,
                "communityCloud": True,
                "communityPrice": 0.28,
                "maxGpuCountCommunityCloud": 3,
            },
            {
                "id": "NVIDIA H100 80GB HBM3",
                "memoryInGb": 80,
                "communityCloud": True,
                "communityPrice": 2.69,
                "maxGpuCountCommunityCloud": 8,
            },
            {
                "id": "NVIDIA H200 NVL",
                "memoryInGb": 143,
                "communityCloud": False,
                "communityPrice": 0.5,
                "maxGpuCountCommunityCloud": 0,
            },
            {
                "id": "unknown",
                "memoryInGb": 0,
                "communityCloud": False,
                "communityPrice": 0,
                "maxGpuCountCommunityCloud": 0,
            },
        ]
    }
}


def ask(name: str, memory_mib: int, gpus: int, usd: float, **fields: object) -> dict[str, object]:
    """An ask of Vast.ai, of which the disk costs one cent."""
    return {
        "id": 4711,
        "gpu_name": name,
        "gpu_ram": memory_mib,
        "num_gpus": gpus,
        "dph_base": usd - 0.01,
        "dph_total": usd,
        "min_bid": None,
        "geolocation": "Bulgaria, BG",
        **fields,
    }


VAST = {
    "offers": [
        ask("H100 NVL", 95830, 1, 2.0681, min_bid=1.2),
        ask("H100 SXM", 81559, 2, 4.5348),
        ask("A100 SXM4", 40960, 4, 2.3756),
        ask("A100 PCIE", 81920, 1, 0.9356),
        ask("RTX 4090", 24564, 1, 0.3881),
        ask("RTX 4080S", 16376, 1, 0.2689),
        ask("RTX 4070S Ti", 16376, 1, 0.1756),
        ask("RTX 6000Ada", 49140, 1, 0.5393),
        ask("RTX PRO 6000 WS", 97887, 1, 1.3089),
        ask("RTX PRO 6000 S", 97887, 1, 1.4037),
        ask("H200 NVL", 143771, 1, 3.9138),
        ask("RTX 4090", 24564, 1, 0.4),
        ask("RTX 4090", 49140, 1, 0.297),
        ask("Tesla V100", 32768, 1, 0.2129),
        ask("Titan Xp", 12288, 1, 0.0489),
    ]
}
JOBS = [
    {
        "name": "cpu-basic",
        "prettyName": "CPU Basic",
        "cpu": "2 vCPU",
        "ram": "16 GB",
        "accelerator": None,
        "unitCostMicroUSD": 167,
        "unitCostUSD": 0.000167,
        "unitLabel": "minute",
    },
    *(
        {
            "name": name,
            "prettyName": name,
            "cpu": "12 vCPU",
            "ram": "142 GB",
            "accelerator": {
                "type": "gpu",
                "model": model,
                "quantity": str(gpus),
                "vram": f"{gigabytes} GB",
                "manufacturer": "Nvidia",
            },
            "unitCostMicroUSD": micro_usd,
            "unitCostUSD": micro_usd / 1e6,
            "unitLabel": "minute",
        }
        for name, model, gpus, gigabytes, micro_usd in (
            ("t4-small", "T4", 1, 16, 6667),
            ("a10g-largex2", "A10G", 2, 48, 50000),
            ("a100-large", "A100", 1, 80, 41667),
            ("h200x8", "H200", 8, 1128, 666667),
            ("rtx-pro-6000", "RTX PRO 6000", 1, 96, 45833),
        )
    ),
]
MODAL = """<html><head><style>.a { price: $ }</style></head><body><h2>GPU Tasks</h2>
<div><p>Nvidia B200</p><p>$0.001736 <span>/ sec</span></p></div>
<div><p>Nvidia H100</p><p>$0.001097 <span>/ sec</span></p></div>
<div><p>Nvidia RTX PRO 6000</p><p>$0.000842 / sec</p></div>
<div><p>Nvidia A100, 80&nbsp;GB</p><p>$0.000694 / sec</p></div>
<div><p>Nvidia A100, 40 GB</p><p>$0.000583 / sec</p></div>
<div><p>Nvidia A10</p><p>$0.000306 / sec</p></div>
<h2>CPU</h2><p>Physical core (2 vCPU equivalent)</p><p>$0.0000131 / core / sec</p>
<h2>Memory</h2><p>$0.00000222 / GiB / sec</p></body></html>"""


@pytest.fixture
def server() -> Iterator[PriceServer]:
    """Server on this machine."""
    with price_server() as server:
        yield server


def prices(refreshed: Refreshed) -> list[tuple[str, str, int, str, float]]:
    """What was accepted: key, instance, GPUs, market and dollars per hour."""
    assert {offer.as_of for offer in refreshed.offers} == {TODAY}
    return [
        (o.gpu, o.instance, o.gpus_per_instance, o.market, round(o.usd_per_hour, 4))
        for o in refreshed.offers
    ]


def test_runpods_community_is_a_provider_of_its_own(server: PriceServer) -> None:
    """A price of a GPU that the community does not have is a placeholder, and left out."""
    server.pages["/graphql"] = json.dumps(RUNPOD).encode()
    refreshed = refresh([RunpodCommunity(TODAY, server.url)], load_catalog(), [], TODAY)
    assert prices(refreshed) == [
        ("RTX-4080-SUPER", "1x NVIDIA GeForce RTX 4080 SUPER", 1, "on-demand", 0.28),
        ("RTX-4080-SUPER", "2x NVIDIA GeForce RTX 4080 SUPER", 2, "on-demand", 0.56),
        *(
            ("H100-SXM", f"{gpus}x NVIDIA H100 80GB HBM3", gpus, "on-demand", 2.69 * gpus)
            for gpus in (1, 2, 4, 8)
        ),
    ]
    assert {offer.provider for offer in refreshed.offers} == {"runpod-community"}
    assert "communityPrice" in json.loads(server.bodies[0])["query"]


def test_vast_tells_the_form_of_a_gpu(server: PriceServer) -> None:
    """The lowest ask of each GPU, number of GPUs, place and market; 48 GB are no RTX 4090."""
    server.pages["/api/v0/bundles/"] = json.dumps(VAST).encode()
    refreshed = refresh([Vast(TODAY, server.url)], load_catalog(), [], TODAY)
    assert prices(refreshed) == [
        ("H100-NVL", "1x H100 NVL", 1, "on-demand", 2.0681),
        ("H100-NVL", "1x H100 NVL", 1, "spot", 1.21),
        ("H100-SXM", "2x H100 SXM", 2, "on-demand", 4.5348),
        ("A100-40GB-SXM", "4x A100 SXM4", 4, "on-demand", 2.3756),
        ("A100-80GB-PCIe", "1x A100 PCIE", 1, "on-demand", 0.9356),
        ("RTX-4090", "1x RTX 4090", 1, "on-demand", 0.3881),
        ("RTX-4080-SUPER", "1x RTX 4080S", 1, "on-demand", 0.2689),
        ("RTX-4070-Ti-SUPER", "1x RTX 4070S Ti", 1, "on-demand", 0.1756),
        ("RTX-6000-Ada", "1x RTX 6000Ada", 1, "on-demand", 0.5393),
        ("RTX-PRO-6000-Workstation", "1x RTX PRO 6000 WS", 1, "on-demand", 1.3089),
        ("RTX-PRO-6000-Server", "1x RTX PRO 6000 S", 1, "on-demand", 1.4037),
        ("H200-NVL", "1x H200 NVL", 1, "on-demand", 3.9138),
    ]
    assert len(refreshed.unidentified) == 2
    assert "Tesla V100 of vast 1" in refreshed.unidentified[1]
    [rejected] = refreshed.rejected
    assert "memory 47.9" in rejected.reason
    assert json.loads(server.bodies[0])["rentable"] == {"eq": True}


def test_hugging_face_jobs_are_priced_by_the_hour(server: PriceServer) -> None:
    """Its price is by the minute, its memory that of all GPUs; flavors without a GPU are none."""
    server.pages["/api/jobs/hardware"] = json.dumps(JOBS).encode()
    refreshed = refresh([HuggingFaceJobs(TODAY, server.url)], load_catalog(), [], TODAY)
    assert prices(refreshed) == [
        ("T4", "t4-small", 1, "on-demand", 0.4),
        ("A10G", "a10g-largex2", 2, "on-demand", 3.0),
        ("A100-80GB-SXM", "a100-large", 1, "on-demand", 2.5),
        ("H200-SXM", "h200x8", 8, "on-demand", 40.0),
        ("RTX-PRO-6000-Server", "rtx-pro-6000", 1, "on-demand", 2.75),
    ]


def test_a_price_of_modal_has_a_container(server: PriceServer) -> None:
    """Four cores and 32 GiB for each GPU, which Modal bills apart: 0.44 dollars an hour."""
    server.pages["/pricing"] = MODAL.encode()
    refreshed = refresh([Modal(TODAY, server.url)], load_catalog(), [], TODAY)
    container = 3600 * (4 * 0.0000131 + 32 * 0.00000222)
    assert container == pytest.approx(0.4444, abs=1e-4)
    singles = [price for price in prices(refreshed) if price[2] == 1]
    assert [(key, instance) for key, instance, *_ in singles] == [
        ("B200", "B200:1"),
        ("H100-SXM", "H100:1"),
        ("RTX-PRO-6000-Server", "RTX-PRO-6000:1"),
        ("A100-80GB-SXM", "A100-80-GB:1"),
        ("A100-40GB-SXM", "A100-40-GB:1"),
        ("A10", "A10:1"),
    ]
    assert singles[1][-1] == round(3600 * 0.001097 + container, 4)
    assert {gpus for key, _, gpus, *_ in prices(refreshed) if key == "A10"} == {1, 2, 4}
    assert {gpus for key, _, gpus, *_ in prices(refreshed) if key == "B200"} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (RunpodCommunity, "/graphql"),
        (Vast, "/api/v0/bundles/"),
        (HuggingFaceJobs, "/api/jobs/hardware"),
        (Modal, "/pricing"),
    ],
)
@pytest.mark.parametrize("page", [None, b"<html>moved</html>", b"[]", b'[{"a": 1}]', b"[" * 10**5])
def test_a_reply_in_another_form_is_a_line(
    server: PriceServer,
    source: Callable[..., PriceSource],
    path: str,
    page: bytes | None,
) -> None:
    """The source's last prices stay in use then."""
    if page is not None:
        server.pages[path] = page
    if source is HuggingFaceJobs and page == b"[]":
        assert source(TODAY, server.url).fetch().offers == []
        return
    with pytest.raises(SourceError) as error:
        source(TODAY, server.url).fetch()
    assert f"{server.url}{path} " in str(error.value)
    assert "\n" not in str(error.value)
