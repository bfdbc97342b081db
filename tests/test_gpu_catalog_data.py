"""The shipped figures themselves: public catalogs lie, so ours is checked against itself."""

import datetime as dt
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import median

import pytest

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from orchestrator.clouds.node_types import instances
from orchestrator.pricing.billing_terms import billing_terms, billing_text

CATALOG = load_catalog()
CUDA = [gpu for gpu in CATALOG.gpus if gpu.kind == "cuda"]
OFFERS = [offer for gpu in CATALOG.gpus for offer in CATALOG.offers(gpu.key)]
GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent


each_gpu = pytest.mark.parametrize("gpu", CUDA, ids=lambda gpu: gpu.key)


def test_the_catalog_has_the_gpus_it_promises() -> None:
    """Exact forms: sizes and sockets of one name are different GPUs."""
    assert {gpu.key for gpu in CATALOG.gpus} == {
        *("A40", "A10", "A10G", "L4", "L40S", "T4", "H200-SXM", "B200", "GH200-96GB", "cpu"),
        *("A100-40GB-SXM", "A100-40GB-PCIe", "A100-80GB-SXM", "A100-80GB-PCIe"),
        *("H100-SXM", "H100-PCIe", "H100-NVL", "V100-16GB-SXM", "V100-32GB-SXM"),
        *("RTX-3090", "RTX-4090", "RTX-5090", "RTX-A6000", "RTX-6000-Ada"),
        *("B300", "GB200", "GB300", "H200-NVL", "L40", "MI300X", "MI325X", "MI355X"),
        *("RTX-PRO-6000-Server", "RTX-PRO-6000-Workstation"),
        *("RTX-A4000", "RTX-A4500", "RTX-A5000", "RTX-4000-Ada", "RTX-4500-Ada", "RTX-5000-Ada"),
        *("RTX-3090-Ti", "RTX-4070-Ti-SUPER", "RTX-4080", "RTX-4080-SUPER"),
        *("RTX-5070-Ti", "RTX-5080"),
    }


@pytest.mark.parametrize("row", [*CATALOG.gpus, *OFFERS], ids=lambda row: row.source[:20])
def test_every_row_has_a_public_source_and_a_date(row: Gpu | Offer) -> None:
    """A figure without either cannot be checked or go stale."""
    assert row.source.strip()
    assert row.recorded.year >= 2026
    assert "/work" not in row.model_dump_json()
    if isinstance(row, Offer) and row.as_of is not None:
        assert row.as_of <= row.recorded


@each_gpu
def test_usable_memory_is_a_little_less_than_the_number_on_the_box(gpu: Gpu) -> None:
    """The box says GB and means nearly GiB: the total never exceeds it counted in GiB.

    ECC on GDDR6 takes a sixteenth and the driver about a hundredth, so a tenth is the most missing.
    """
    if gpu.usable_memory_bytes is None:
        return
    assert gpu.marketed_memory_gb is not None
    assert 0.9 < gpu.usable_memory_bytes / (gpu.marketed_memory_gb * GIB) < 1.0


def test_usable_memory_is_what_cuda_reported_and_not_filled_in_from_a_neighbour() -> None:
    """The A40 has its ECC total; where no total was ever seen, there is none."""
    assert CATALOG.gpu("A40").usable_memory_bytes == 45416 * 2**20
    assert CATALOG.gpu("A100-40GB-SXM").usable_memory_bytes == 42405855232
    assert [gpu.key for gpu in CUDA if gpu.usable_memory_bytes is None] == [
        *("A100-40GB-PCIe", "H100-NVL", "A10", "V100-32GB-SXM", "GH200-96GB"),
        *("H200-NVL", "B300", "GB200", "GB300", "RTX-PRO-6000-Workstation", "L40"),
        *("RTX-A4000", "RTX-A4500", "RTX-4000-Ada", "RTX-4500-Ada", "RTX-5000-Ada"),
        *("RTX-3090-Ti", "RTX-4080-SUPER", "RTX-5070-Ti"),
    ]


@each_gpu
def test_rates_are_dense_and_in_the_units_their_names_say(gpu: Gpu) -> None:
    """Half precision is as fast in both forms, faster than fp32, and within what exists."""
    assert gpu.fp16_dense_tflops is not None
    assert gpu.fp32_tflops is not None
    assert gpu.fp32_tflops < gpu.fp16_dense_tflops <= 2500
    assert gpu.bf16_dense_tflops in (None, gpu.fp16_dense_tflops)
    assert 300 <= (gpu.memory_bandwidth_gb_per_second or 0) <= 8000
    assert gpu.tdp_watts is None or 70 <= gpu.tdp_watts <= 1400


# Operations of a multiprocessor in a cycle: half precision on its tensor cores, dense and summed in
# fp32; and fp32 without them. NVIDIA's architecture whitepapers.
PER_CYCLE = {
    "7.0": (1024, 128),
    "7.5": (1024, 128),
    "8.0": (2048, 128),
    "8.6": (1024, 256),
    "8.9": (1024, 256),
    "9.0": (4096, 256),
    "10.0": (8192, 256),
    "10.3": (8192, 256),
    "12.0": (1024, 256),
}
# Sold with half the rate where sums are in fp32.
HALVED = {
    *("RTX-3090", "RTX-4090", "RTX-5090", "A10G", "L40"),
    *("RTX-3090-Ti", "RTX-4070-Ti-SUPER", "RTX-4080", "RTX-4080-SUPER", "RTX-5070-Ti", "RTX-5080"),
}


@each_gpu
def test_rates_are_those_of_a_clock_that_exists(gpu: Gpu) -> None:
    """With structured sparsity, or summed in fp16, they would need twice the clock of any GPU."""
    assert gpu.multiprocessors is not None
    half, single = PER_CYCLE[gpu.compute_capability or ""]
    half //= 2 if gpu.key in HALVED else 1
    for tflops, per_cycle in ((gpu.fp16_dense_tflops, half), (gpu.fp32_tflops, single)):
        assert tflops is not None
        ghz = tflops * 1e3 / (gpu.multiprocessors * per_cycle)
        assert 1.4 < ghz < 2.7, (gpu.key, ghz)


@each_gpu
def test_the_generation_and_the_compute_capability_agree(gpu: Gpu) -> None:
    """bf16 tensor cores exist from 8.0 on: an older GPU must not have a bf16 rate."""
    capabilities = {
        "Volta": {"7.0"},
        "Turing": {"7.5"},
        "Ampere": {"8.0", "8.6"},
        "Ada": {"8.9"},
        "Hopper": {"9.0"},
        "Blackwell": {"10.0", "10.3", "12.0"},
    }
    assert gpu.compute_capability in capabilities[gpu.architecture or ""]
    assert (gpu.bf16_dense_tflops is None) == (gpu.architecture in {"Volta", "Turing"})


@pytest.mark.parametrize(("key", "gigabytes"), [("MI300X", 192), ("MI325X", 256), ("MI355X", 288)])
def test_an_amd_gpu_has_memory_and_says_that_its_times_are_not_modelled(
    key: str, gigabytes: float
) -> None:
    """Nobody takes its peak rates for an estimate."""
    gpu = CATALOG.gpu(key)
    assert (gpu.kind, gpu.marketed_memory_gb) == ("rocm", gigabytes)
    assert "not modelled" in (gpu.note or "")


def test_the_cpu_has_a_stated_budget_and_no_invented_rates() -> None:
    """It is a budget the trials count tensors against, and its row says so."""
    cpu = CATALOG.gpu("cpu")
    assert cpu.kind == "cpu"
    assert cpu.usable_memory_bytes is not None
    assert cpu.usable_memory_bytes % 2**20 == 0
    assert f"{cpu.usable_memory_bytes // 2**20} MiB" in (cpu.note or "")
    assert cpu.bf16_dense_tflops is None
    assert cpu.device_names == ()


def test_every_gpu_has_an_offer_and_the_guide_counts_them() -> None:
    """No GPU is without a dated price."""
    assert [gpu.key for gpu in CATALOG.gpus if not CATALOG.offers(gpu.key)] == []
    text = (ROOT / "docs/how-to/prices.md").read_text(encoding="utf-8")
    assert f"The catalog ships {len(OFFERS)} prices" in text


def test_marketplaces_and_serverless_offers_have_their_terms() -> None:
    """RunPod and Vast.ai bill by the second, Modal too, Hugging Face Jobs by the minute."""
    texts = {offer.provider: billing_text(offer) for offer in OFFERS}
    assert {name: texts[name] for name in ("vast", "runpod-community", "modal", "hf-jobs")} == {
        **dict.fromkeys(("vast", "runpod-community", "modal"), "by the second"),
        "hf-jobs": "by the minute",
    }
    assert all(terms.source for terms in billing_terms().values())
    assert set(billing_terms()) <= set(texts) | {"hyperstack"}


@pytest.mark.parametrize("key", ["A40", "A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM", "cpu"])
def test_the_gpus_of_the_paper_can_be_rented_on_demand(key: str) -> None:
    """The paper's cost tables can be redone at each of them, and the demonstration costed."""
    assert any(offer.market == "on-demand" for offer in CATALOG.offers(key))


def test_no_offer_is_listed_twice() -> None:
    """An instance has one price in a region and market."""
    offers = [(o.gpu, o.provider, o.region, o.instance, o.market) for o in OFFERS]
    assert len(set(offers)) == len(offers)


def test_a_spot_price_is_below_every_on_demand_price_of_its_instance() -> None:
    """Equal ones mean that there is no spot market; higher ones that a row is wrong."""
    on_demand = {(o.provider, o.instance): o for o in OFFERS if o.market == "on-demand"}
    pairs = [
        (offer, on_demand[offer.provider, offer.instance])
        for offer in OFFERS
        if offer.market == "spot" and (offer.provider, offer.instance) in on_demand
    ]
    assert pairs
    for spot, full in pairs:
        assert spot.gpus_per_instance == full.gpus_per_instance
        # A tenth is where AWS puts a floor under spot: nothing is to be had there.
        assert 0.11 * full.usd_per_hour < spot.usd_per_hour < full.usd_per_hour


def test_a_spot_price_per_gpu_is_below_what_the_provider_asks_on_demand() -> None:
    """This holds where the two are listed for instances of different size, too.

    DigitalOcean sells its B300 and MI355X as spot instances alone.
    """
    only_spot = {("do", "B300"), ("do", "MI355X")}
    for spot in (offer for offer in OFFERS if offer.market == "spot"):
        if (spot.provider, spot.gpu) in only_spot:
            continue
        same = [
            offer.usd_per_gpu_hour
            for offer in CATALOG.offers(spot.gpu)
            if offer.provider == spot.provider and offer.market == "on-demand"
        ]
        assert same, spot.instance
        assert spot.usd_per_gpu_hour < min(same)


def test_a_price_far_under_those_elsewhere_carries_a_note() -> None:
    """The known trap: 8 GPUs for the price of one, or a GPU without its host."""
    markets: dict[tuple[str, str], dict[str, list[Offer]]] = defaultdict(lambda: defaultdict(list))
    for offer in OFFERS:
        markets[offer.gpu, offer.market][offer.provider].append(offer)
    suspects = [
        f"{offer.gpu} {offer.provider} {offer.instance}"
        for providers in markets.values()
        # One value per provider: one with many sizes of instances must not dominate.
        for usual in [
            median(median(o.usd_per_gpu_hour for o in group) for group in providers.values())
        ]
        for offers in providers.values()
        for offer in offers
        if offer.usd_per_gpu_hour < 0.6 * usual and not offer.note
    ]
    assert suspects == []


def test_a_gpu_costs_between_cents_and_a_score_of_dollars_an_hour() -> None:
    """Per GPU: a price of the whole instance listed as that of one GPU would leave this."""
    assert all(0.1 < offer.usd_per_gpu_hour < 20 for offer in OFFERS)
    assert all(1 <= offer.gpus_per_instance <= 8 for offer in OFFERS)


def test_bigger_instances_of_a_provider_cost_about_the_same_for_each_gpu() -> None:
    """The price is of the whole instance: one GPU's price on an 8-GPU row would be 8 times off.

    Four GPUs are sold with hosts of several sizes, which cost up to as much again. Spot prices also
    differ between regions, so they are compared in each region and, with more room, in all.
    """
    several_hosts = {("A10G", "aws"), ("L4", "aws"), ("L40S", "aws"), ("T4", "azure")}

    def of_provider(offer: Offer) -> tuple[str, str, str]:
        return offer.gpu, offer.provider, offer.market

    def spread(offers: Iterable[Offer]) -> float:
        prices = [offer.usd_per_gpu_hour for offer in offers]
        return max(prices) / min(prices)

    for key, group in groupby(sorted(OFFERS, key=of_provider), key=of_provider):
        offers = list(group)
        most, most_of_regions = (3, 5) if key[:2] in several_hosts else (2, 2.5)
        if key[2] == "on-demand":
            assert spread(offers) < most, key
            continue
        assert spread(offers) < most_of_regions, key
        for region in {offer.region for offer in offers}:
            there = [offer for offer in offers if offer.region == region]
            assert spread(there) < most, (*key, region)


def test_each_instance_with_several_gpus_that_a_cluster_file_may_have_has_a_price() -> None:
    """Without one, no answer would name a box that can be rented by ``launch``."""
    offered = {(o.provider, o.instance): (o.gpu, o.gpus_per_instance) for o in OFFERS}
    several = [
        (provider, instance)
        for provider in ("aws", "gcp", "azure")
        for instance in instances(provider)
        if instance.gpus > 1
    ]
    assert len(several) == 35
    for provider, instance in several:
        assert offered[provider, instance.name] == (instance.gpu, instance.gpus)


def test_machines_that_cudo_sizes_by_request_can_load_a_model() -> None:
    """Its smallest ones have 4 GB; the price of one holds for the size in its name alone."""
    names = [offer.instance for offer in OFFERS if offer.provider == "cudo"]
    sizes = [re.search(r"_(\d+)x\d+v(\d+)gb$", name) for name in names]
    assert len(sizes) == 5
    assert all(size and int(size[2]) >= 24 * int(size[1]) for size in sizes)


def test_a_price_whose_date_is_inferred_is_as_old_as_it_may_be() -> None:
    """Catalogs of SkyPilot are undated: where a note has an inferred date, the price is of it."""
    for offer in OFFERS:
        inferred = re.match(r"at or after (\d{4})-(\d{2}) \(inferred\)", offer.note or "")
        if inferred:
            assert offer.as_of == dt.date(int(inferred[1]), int(inferred[2]), 1)
        elif "skypilot-catalog" in offer.source:
            assert offer.as_of is None
    assert {o.as_of for o in OFFERS if "gpu-price-feed" in o.source} == {
        dt.date(2026, 10, 4),
        dt.date(2026, 10, 1),
        dt.date(2026, 8, 23),
    }
    assert all(
        "(inferred)" in (o.note or "") for o in OFFERS if o.provider in {"aws", "hyperstack"}
    )


def test_a_stand_in_for_the_cpu_says_that_it_is_one() -> None:
    """Nothing was measured on the instance whose price is used."""
    for offer in CATALOG.offers("cpu"):
        assert "stands in" in (offer.note or "")
