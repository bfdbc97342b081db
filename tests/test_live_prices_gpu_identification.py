"""A price is matched to one exact GPU or to none; the tables behind this are consistent."""

import csv
import gzip
import importlib.util
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders.price_rows import raw
from gpuhunt._internal.constraints import KNOWN_NVIDIA_GPUS

from gpu_catalog.catalog import load_catalog, shipped_offers, shipped_text
from gpu_catalog.gpu import Gpu
from gpu_catalog.live_prices.gpu_identification import (
    MEMORY_TOLERANCE,
    OTHERS,
    IdentificationFailure,
    UnidentifiedPrice,
    folded,
    forms,
    identify,
    left_out,
    names,
)
from gpu_catalog.live_prices.sources.aws_instances import AwsInstance, aws_instances
from gpu_catalog.live_prices.sources.raw_offer import RawOffer

CATALOG = load_catalog()
# Of what Amazon rents, what the catalog has.
AMAZON = {
    ("T4", 16384): "T4",
    ("A10G", 22888): "A10G",
    ("L4", 22888): "L4",
    ("L40S", 45776): "L40S",
    ("V100", 32768): "V100-32GB-SXM",
    ("A100", 40960): "A100-40GB-SXM",
    ("A100", 81920): "A100-80GB-SXM",
    ("H100", 81920): "H100-SXM",
    ("H200", 144384): "H200-SXM",
    ("B200", 183359): "B200",
    ("B300", 275040): "B300",
    ("RTX PRO Server 6000", 98304): "RTX-PRO-6000-Server",
}


def stated(provider: str, instance: str, name: str | None, memory_gib: float | None) -> RawOffer:
    """A price of one GPU so called."""
    return raw(provider=provider, instance=instance, gpu_name=name, gpu_memory_gib=memory_gib)


@pytest.mark.parametrize(
    ("offer", "key"),
    [
        (stated("runpod", "NVIDIA A100 80GB PCIe", "A100", 80), "A100-80GB-PCIe"),
        (stated("runpod", "NVIDIA A100-SXM4-80GB", "A100", 80), "A100-80GB-SXM"),
        (stated("runpod", "NVIDIA H100 80GB HBM3", "H100", 80), "H100-SXM"),
        (stated("runpod", "NVIDIA H100 PCIe", "H100", 80), "H100-PCIe"),
        (stated("runpod", "NVIDIA H100 NVL", "H100NVL", 94), "H100-NVL"),
        (stated("lambda", "gpu_1x_a100", "A100", 40), "A100-40GB-PCIe"),
        (stated("lambda", "gpu_1x_a100_sxm4", "A100", 40), "A100-40GB-SXM"),
        (stated("lambda", "gpu_8x_a100_80gb_sxm4", "A100", 80), "A100-80GB-SXM"),
        (stated("lambda", "gpu_1x_h100_pcie", "H100", 80), "H100-PCIe"),
        (stated("azure", "Standard_NC24ads_A100_v4", "A100", 80), "A100-80GB-PCIe"),
        (stated("azure", "Standard_ND96amsr_A100_v4", "A100", 80), "A100-80GB-SXM"),
        (stated("azure", "Standard_ND96asr_v4", "A100", 40), "A100-40GB-SXM"),
        (stated("gcp", "a2-ultragpu-1g", "A100", 80), "A100-80GB-SXM"),
        (stated("gcp", "a3-highgpu-8g", "H100", 80), "H100-SXM"),
        (stated("verda", "1A100.22V", "A100", 80), "A100-80GB-SXM"),
        (stated("verda", "1A100.40S.22V", "A100", 40), "A100-40GB-SXM"),
        (stated("nebius", "gpu-h100-sxm 1gpu-16vcpu-200gb", "H100", 80), "H100-SXM"),
        (stated("aws", "p5.4xlarge", "H100", 80), "H100-SXM"),
        (stated("aws", "g6.xlarge", "L4", 22.35), "L4"),
        (stated("anybody", "x", "RTX4090", 24), "RTX-4090"),
        (stated("anybody", "x", "rtx6000ada", None), "RTX-6000-Ada"),
        (stated("anybody", "x", "GH200", 96), "GH200-96GB"),
        (stated("anybody", "x", "H200", 141), "H200-SXM"),
        (stated("vultr", "x", "B200", 192), "B200"),
        (stated("anybody", "x", "B300", 270), "B300"),
        (stated("anybody", "x", "L40", 48), "L40"),
        (stated("anybody", "x", "H200NVL", 141), "H200-NVL"),
        (stated("runpod", "AMD Instinct MI300X OAM", "MI300X", 192), "MI300X"),
        (stated("gcp", "g4-standard-48", "RTXPRO6000", 96), "RTX-PRO-6000-Server"),
    ],
    ids=lambda value: value.instance if isinstance(value, RawOffer) else value,
)
def test_a_gpu_is_identified_by_instance_device_name_or_name_and_memory(
    offer: RawOffer, key: str
) -> None:
    """40 and 80 GB, PCIe, SXM and NVL are different GPUs."""
    match = identify(offer, CATALOG)
    assert isinstance(match, Gpu), match
    assert match.key == key


@pytest.mark.parametrize(
    ("offer", "failure"),
    [
        (stated("vast", "123", "A100", 80), "may be more than one GPU of the catalog"),
        (stated("vast", "123", "H100", 80), "may be more than one GPU of the catalog"),
        (stated("vultr", "vcg-a100", "A100", 80), "may be more than one GPU of the catalog"),
        (stated("lambda", "gpu_2x_a100", "A100", 40), "may be more than one GPU of the catalog"),
        (stated("anybody", "x", "A100", None), "may be more than one GPU of the catalog"),
        (
            stated("azure", "Standard_NC6s_v3", "V100", 16),
            "may be more than one GPU of the catalog",
        ),
        (stated("anybody", "x", "RTXPRO6000", 96), "may be more than one GPU of the catalog"),
        (stated("anybody", "x", "L20", 48), "not in the catalog"),
        (stated("lambda", "gpu_1x_rtx6000", "RTX6000", 24), "not in the catalog"),
        (stated("anybody", "x", "MI250X", 128), "not in the catalog"),
        (stated("aws", "g6f.large", "L4", 2.8), "a slice of a GPU"),
        (stated("azure", "Standard_NV6ads_A10_v5", "A10", 4), "a slice of a GPU"),
        (stated("anybody", "x", "A100", 16), "a slice of a GPU"),
        (stated("anybody", "x", None, None), "not in the catalog"),
    ],
    ids=lambda value: value.instance if isinstance(value, RawOffer) else value,
)
def test_an_ambiguous_or_unknown_price_has_no_gpu(offer: RawOffer, failure: str) -> None:
    """Neither the likeliest GPU nor a similar name is taken: an L40 is no L4 and no L40S."""
    match = identify(offer, CATALOG)
    assert isinstance(match, UnidentifiedPrice), match
    assert match.failure == failure


def test_an_instance_with_a_wrong_number_of_gpus_is_inconsistent() -> None:
    """Its price is then not that of the instance."""
    offer = raw(provider="aws", instance="p5.48xlarge", gpus=1, gpu_name="H100", gpu_memory_gib=80)
    match = identify(offer, CATALOG)
    assert isinstance(match, UnidentifiedPrice)
    assert match.failure is IdentificationFailure.INCONSISTENT
    assert {"1", "8", "p5.48xlarge"} <= set(match.detail.split())


def test_a_users_own_gpu_is_identified_by_the_name_it_reports() -> None:
    """A file given as --catalog is enough to match prices of its GPUs."""
    own_gpu = CATALOG.gpu("L40S").model_copy(
        update={"key": "L20", "device_names": ("NVIDIA L20",), "marketed_memory_gb": None}
    )
    match = identify(stated("runpod", "NVIDIA L20", "L20", 48), CATALOG.merged([own_gpu]))
    assert match == own_gpu


@dataclass(frozen=True)
class Real:
    """An instance type as Amazon describes it."""

    name: str
    gpu: str
    memory_mib: int
    gpus: int


def real_instances() -> Iterator[Real]:
    """Amazon's own descriptions, as moto has them; none of moto's code is run."""
    spec = importlib.util.find_spec("moto")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "ec2" / "resources"
    described = json.loads(gzip.decompress((folder / "instance_types.json.gz").read_bytes()))
    for name, about in described.items():
        for gpu in about.get("GpuInfo", {}).get("Gpus", []):
            if gpu["Manufacturer"] == "NVIDIA":
                yield Real(name, gpu["Name"], gpu["MemoryInfo"]["SizeInMiB"], gpu["Count"])


def test_amazons_instances_are_as_amazon_describes_them() -> None:
    """The table has every instance of a catalog GPU, with any number of GPUs, and no other."""
    real = {
        r.name: AwsInstance(AMAZON[r.gpu, r.memory_mib], r.gpus)
        for r in real_instances()
        if (r.gpu, r.memory_mib) in AMAZON
    }
    table = aws_instances()
    assert len(real) > 40
    assert {name: table.get(name) for name in real} == real
    # Of what is retired, Amazon describes nothing any more, and still has prices.
    assert {name.partition(".")[0] for name in table.keys() - real.keys()} == {"p3"}
    assert {i.gpus for i in table.values()} == {1, 2, 4, 8}


def test_amazons_other_gpus_are_not_taken_for_ours() -> None:
    """Slices of an L4, a T4g and GPUs outside the catalog have no GPU."""
    others = [r for r in real_instances() if (r.gpu, r.memory_mib) not in AMAZON]
    assert {r.gpu for r in others} == {
        *("L4", "T4g", "RTX PRO 4500"),
    }
    for r in others:
        match = identify(raw_of(r), CATALOG)
        assert isinstance(match, UnidentifiedPrice), r


def raw_of(real: Real) -> RawOffer:
    """Raw offer as a catalog would state it."""
    return raw(
        provider="aws",
        instance=real.name,
        gpus=max(real.gpus, 1),
        gpu_name=real.gpu,
        gpu_memory_gib=real.memory_mib / 1024,
    )


def test_memory_as_amazon_counts_it_is_that_of_the_gpu() -> None:
    """22888 MiB are 24 GB, and no wrong unit."""
    for real in real_instances():
        if (real.gpu, real.memory_mib) in AMAZON:
            match = identify(raw_of(real), CATALOG)
            assert isinstance(match, Gpu), real
            assert match.key == AMAZON[real.gpu, real.memory_mib]


def test_shipped_offers_are_identified_as_the_gpus_they_are_listed_for() -> None:
    """The identification of a catalog's row agrees with the GPU that was looked up by hand."""
    of_key = {key: name for name, keys in names().items() for key in keys}
    identified = 0
    for offer in CATALOG.all_offers:
        if offer.gpu == "cpu":
            continue
        memory = CATALOG.gpu(offer.gpu).marketed_memory_gb
        match = identify(
            raw(
                provider=offer.provider,
                instance=offer.instance,
                gpus=offer.gpus_per_instance,
                gpu_name=of_key[offer.gpu],
                gpu_memory_gib=memory,
            ),
            CATALOG,
        )
        assert isinstance(match, UnidentifiedPrice) or match.key == offer.gpu, offer
        identified += isinstance(match, Gpu)
    assert identified >= 60


def test_names_and_forms_are_of_gpus_that_the_catalog_has() -> None:
    """Each form names its GPU's size, has a source, and stands for one of its name's GPUs."""
    keys_of_catalog = {gpu.key for gpu in CATALOG.gpus}
    assert {key for keys in names().values() for key in keys} <= keys_of_catalog | {OTHERS}
    assert {form.gpu for form in forms()} <= keys_of_catalog
    rows = list(
        csv.DictReader(shipped_text("gpu_forms.csv", "gpu_catalog.live_prices").splitlines())
    )
    assert all(row["source"] for row in rows)
    for row in rows:
        assert float(row["memory_gb"]) == CATALOG.gpu(row["gpu"]).marketed_memory_gb
        assert row["gpu"] in names()[folded(row["gpu_name"])]
    patterns = [(f.provider, f.instance, f.gpu_name, f.gpu) for f in forms()]
    assert len(set(patterns)) == len(patterns)


def test_each_nvidia_name_of_gpuhunt_with_16_gb_is_mapped_or_left_out_for_a_reason() -> None:
    """A new name in gpuhunt is looked at, not skipped for ever."""
    large = {g.name for g in KNOWN_NVIDIA_GPUS if g.memory >= 16}
    assert len(large) > 30
    assert {name for name in large if name.casefold() not in names()} == set(left_out())
    assert not {name.casefold() for name in left_out()} & set(names())
    assert all(left_out().values())


def test_memory_distinguishes_the_sizes_of_one_name() -> None:
    """The sizes of one name differ by more than the tolerance."""
    for keys in names().values():
        sizes = sorted(
            {CATALOG.gpu(key).marketed_memory_gb or 0.0 for key in keys if key != OTHERS}
        )
        for smaller, larger in itertools.pairwise(sizes):
            assert smaller * (1 + MEMORY_TOLERANCE) < larger * (1 - MEMORY_TOLERANCE)


def test_the_papers_prices_are_its_table_iv() -> None:
    """CUDO Compute's prices hold for either form where the paper names none."""
    prices = {(o.gpu, o.usd_per_hour) for o in shipped_offers("paper_prices.csv")}
    assert prices == {
        ("A40", 0.79),
        ("A100-80GB-SXM", 1.67),
        ("A100-80GB-PCIe", 1.67),
        ("H100-SXM", 2.10),
        ("H100-PCIe", 2.10),
    }
    for offer in shipped_offers("paper_prices.csv"):
        assert "2408.04693" in offer.source
        assert offer.gpus_per_instance == 1
        assert offer.provider == "cudo"
