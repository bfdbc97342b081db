"""Memory of instances' hosts, and offers that have too little of it."""

from pathlib import Path

from builders.price_rows import offer

from gpu_catalog.catalog import load_catalog, shipped_rows
from orchestrator.pricing.catalog_file import read_price_file
from orchestrator.pricing.host_memory import (
    TABLE,
    InstanceMemory,
    allowed_instances,
    by_host_memory,
    host_memory_gib,
    none_has_enough,
)
from orchestrator.pricing.offer_constraints import OfferFilter

CATALOG = load_catalog()
ROWS = shipped_rows(InstanceMemory, TABLE)
SMALL = offer(provider="modal", instance="H100:8", gpus_per_instance=8)
LARGE = offer(provider="lambda", instance="gpu_8x_h100_sxm5", gpus_per_instance=8)
UNKNOWN = offer(provider="lambda", instance="another", gpus_per_instance=8)


def test_the_table_has_each_instance_of_the_catalog_once() -> None:
    """Most instances with several GPUs are among them."""
    names = [(row.provider, row.instance) for row in ROWS]
    offered = {(o.provider, o.instance): o.gpus_per_instance for o in CATALOG.all_offers}
    assert len(set(names)) == len(names)
    assert set(names) <= set(offered)
    several = {name for name, gpus in offered.items() if gpus > 1}
    assert len(several & set(names)) >= 122
    assert len(several) == 132


def test_an_offer_has_the_memory_of_its_own_row_before_the_tables() -> None:
    """A user's price list knows its machines."""
    assert host_memory_gib(SMALL) == 256
    assert host_memory_gib(UNKNOWN) is None
    assert host_memory_gib(SMALL.model_copy(update={"host_memory_gib": 512.0})) == 512


def test_instances_with_too_little_memory_are_named_once() -> None:
    """Those of unknown memory stay; without a need all do."""
    cheaper = SMALL.model_copy(update={"region": "another"})
    enough, too_small = by_host_memory([SMALL, cheaper, LARGE, UNKNOWN], 310.4)
    assert enough == [LARGE, UNKNOWN]
    (small,) = allowed_instances(too_small, lambda _: True)
    assert allowed_instances(too_small, OfferFilter(providers=("lambda",)).allows) == ()
    assert (small.instance, small.needed_gib, small.host_memory_gib) == ("H100:8", 310.4, 256)
    assert small.text == "H100:8 (modal): the host holds 310.4 GiB, the instance has 256 GiB"
    assert by_host_memory([SMALL, LARGE], None) == ([SMALL, LARGE], {})
    assert by_host_memory([SMALL], 256) == ([SMALL], {})


def test_the_largest_of_the_instances_that_are_too_small_is_the_reason() -> None:
    """A smaller one says less."""
    _, too_small = by_host_memory([SMALL, LARGE], 2000)
    instances = allowed_instances(too_small, lambda _: True)
    assert [one.host_memory_gib for one in instances] == [256, 1800]
    assert "gpu_8x_h100_sxm5" in none_has_enough(instances)


def test_a_price_list_states_the_memory_of_its_machines(tmp_path: Path) -> None:
    """It is compared as that of a rented instance."""
    file = tmp_path / "mine.csv"
    file.write_text("gpu,usd_per_hour,host_memory_gib\nA40,1,64\n", encoding="utf-8")
    (mine,) = read_price_file(file, CATALOG)
    assert host_memory_gib(mine) == 64
