import datetime as dt
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, CatalogError, UnknownGpuError, load_catalog, parse_rows
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from gpu_catalog.suggestions import did_you_mean, near_matches

GPU = {
    "key": "X1",
    "kind": "cuda",
    "device_names": ["Acme X1"],
    "source": "a test",
    "recorded": "2026-11-20",
}
OFFER = {
    "gpu": "X1",
    "provider": "acme",
    "region": "moon",
    "instance": "x1.small",
    "usd_per_hour": 1.5,
    "recorded": "2026-11-20",
    "source": "a test",
}


def gpu(**fields: Any) -> Gpu:
    """A GPU like ``GPU`` but for these fields."""
    return Gpu.model_validate(GPU | fields)


def offer(**fields: Any) -> Offer:
    """An offer like ``OFFER`` but for these fields."""
    return Offer.model_validate(OFFER | fields)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    """The shipped catalog; immutable in use, so loaded once."""
    return load_catalog()


def test_every_gpu_is_found_by_its_key_and_by_each_name_it_reports(catalog: Catalog) -> None:
    """Both exact look-ups lead to the same GPU."""
    for gpu in catalog.gpus:
        assert catalog.gpu(gpu.key) is gpu
        for name in gpu.device_names:
            assert catalog.gpu_by_device_name(name) is gpu


@pytest.mark.parametrize("key", ["a40", "A40 ", "A100", "L4 0S", "", "NVIDIA A40"])
def test_only_the_exact_key_finds_a_gpu(catalog: Catalog, key: str) -> None:
    """Nothing is looked up by substring, case or device name: an L40 must not become an L4."""
    with pytest.raises(UnknownGpuError):
        catalog.gpu(key)


@pytest.mark.parametrize("name", ["A40", "nvidia a40", "NVIDIA A100", "NVIDIA L20"])
def test_only_the_exact_device_name_finds_a_gpu(catalog: Catalog, name: str) -> None:
    """A device that reports an unlisted name is unknown, never its neighbour."""
    with pytest.raises(UnknownGpuError):
        catalog.gpu_by_device_name(name)


def test_an_unknown_key_is_answered_with_near_ones_and_what_to_do(catalog: Catalog) -> None:
    """The message quotes the key, suggests near ones and names the command that lists all."""
    with pytest.raises(UnknownGpuError) as error:
        catalog.gpu("A100-80")
    for part in ("'A100-80'", "'A100-80GB-SXM' or 'A100-80GB-PCIe'", "catalog gpus"):
        assert part in str(error.value)


def test_a_key_near_nothing_is_answered_without_a_guess(catalog: Catalog) -> None:
    """No suggestion is made rather than an unrelated one."""
    with pytest.raises(
        UnknownGpuError, match=r"^unknown GPU 'zzz' \('finetune-cost catalog gpus' lists"
    ):
        catalog.gpu("zzz")


def test_an_unknown_device_name_is_answered_with_near_ones(catalog: Catalog) -> None:
    """A part of a reported name is enough for a suggestion."""
    with pytest.raises(UnknownGpuError, match=r"did you mean .*'NVIDIA H100 NVL'"):
        catalog.gpu_by_device_name("H100")


@pytest.mark.parametrize("error", [UnknownGpuError("no X1"), CatalogError("two X1")])
def test_the_errors_survive_pickling(error: Exception) -> None:
    """They cross Ray's process borders, which needs a constructor with one argument."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    assert type(again) is type(error)
    assert again.args == error.args


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("A100", ["A100-40GB-SXM", "A100-40GB-PCIe", "A100-80GB-SXM", "A100-80GB-PCIe"]),
        ("h100", ["H100-SXM", "H100-PCIe", "H100-NVL"]),
        ("a40", ["A40"]),
        ("A40X", ["A40"]),
        ("4090", ["RTX-4090"]),
        ("RTX A6000", ["RTX-A6000", "RTX-A5000", "RTX-A4000", "RTX-A4500"]),
        ("L40", ["L40S", "L40"]),
        ("NVIDIA A100", []),
        ("", []),
    ],
)
def test_near_keys_are_those_a_person_may_have_meant(
    catalog: Catalog, word: str, near: list[str]
) -> None:
    """Beginning, spelling or part count, in any case; no match is better than a wrong GPU."""
    assert near_matches(word, [gpu.key for gpu in catalog.gpus]) == near


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("zzz", ""),
        ("gpu", ": did you mean 'gpus'?"),
        ("x", ": did you mean 'x1' or 'x2'?"),
        ("y", ": did you mean 'y1', 'y2' or 'y3'?"),
    ],
)
def test_near_words_read_as_a_question(word: str, text: str) -> None:
    """One, two and three words are joined in plain English; without a match the text is empty."""
    assert did_you_mean(word, ["gpus", "x1", "x2", "y1", "y2", "y3"]) == text


def test_offers_come_cheapest_first_whatever_their_order() -> None:
    """The order is by the price of the whole instance, which is what a job pays."""
    offers = [
        offer(instance="b", usd_per_hour=2),
        offer(instance="c", usd_per_hour=8, gpus_per_instance=8),
        offer(instance="a", usd_per_hour=2),
        offer(instance="d", usd_per_hour=1),
        offer(gpu="X2", instance="e", usd_per_hour=0.5),
    ]
    catalog = Catalog([gpu(), gpu(key="X2", device_names=["Acme X2"])], offers)
    assert [o.instance for o in catalog.offers("X1")] == ["d", "a", "b", "c"]


def test_a_users_rows_join_the_shipped_ones(catalog: Catalog) -> None:
    """Own hardware and own prices, also of a shipped GPU; nothing shipped is lost."""
    merged = load_catalog([gpu()], [offer(), offer(gpu="A40", usd_per_hour=0.01)])
    assert merged.gpus == (*catalog.gpus, gpu())
    assert merged.gpu_by_device_name("Acme X1").key == "X1"
    assert merged.offers("X1") == [offer()]
    assert merged.offers("A40") == [offer(gpu="A40", usd_per_hour=0.01), *catalog.offers("A40")]


def test_a_users_gpu_cannot_replace_a_shipped_one() -> None:
    """Two facts under one key would make results depend on the order of loading."""
    with pytest.raises(CatalogError, match="GPU 'A40' is in the catalog already"):
        load_catalog([gpu(key="A40")])


def test_two_gpus_cannot_report_the_same_name() -> None:
    """The reported name identifies the GPU of a node, so it must be unique."""
    with pytest.raises(CatalogError, match="device name 'NVIDIA A40' is that of 'A40' already"):
        load_catalog([gpu(device_names=["NVIDIA A40"])])


def test_an_offer_for_an_unknown_gpu_is_an_error_with_near_keys() -> None:
    """A price that belongs to nothing is a mistake, not an unused row."""
    with pytest.raises(CatalogError, match=r"offer acme x1.small: unknown GPU 'a40': .* 'A40'\?"):
        load_catalog(extra_offers=[offer(gpu="a40")])


def test_all_contradictions_between_rows_are_reported_at_once() -> None:
    """The message has one line for each, with the key or name at fault."""
    with pytest.raises(CatalogError) as error:
        load_catalog([gpu(key="A40"), gpu(key="X2")], [offer(), offer(gpu="nothing")])
    text = str(error.value)
    assert len(text.splitlines()) == 4
    for part in ("'A40' is in", "'Acme X1' is that of", "unknown GPU 'X1'", "'nothing'"):
        assert part in text


def test_all_mistakes_of_a_file_are_reported_at_once_with_file_and_row() -> None:
    """Each line names the place, the column and the value; valid rows are returned."""
    rows = [OFFER, OFFER | {"usd_per_hour": "0.00"}, OFFER | {"market": "sale", "prise": "1"}]
    offers, mistakes = parse_rows(Offer, rows, "prices.csv:{}".format)
    assert offers == [offer()]
    price, market, extra = mistakes
    assert price.startswith("prices.csv:2: usd")
    assert price.endswith("not '0.00'")
    assert market.startswith("prices.csv:3: market: ")
    assert extra.startswith("prices.csv:3: prise: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_names": []}, "needs device_names"),
        ({"kind": "cpu", "device_names": []}, "needs usable_memory_bytes"),
        ({"kind": "tpu"}, "'cuda', 'cpu' or 'rocm'"),
        ({"key": "A 100"}, "pattern"),
        ({"key": ""}, "pattern"),
        ({"usable_memory_bytes": 0}, "greater than 0"),
        ({"usable_memory_bytes": 44.35}, "valid integer"),
        ({"marketed_memory_gb": -1}, "greater than 0"),
        ({"memory_bandwidth_gb_per_second": 0}, "greater than 0"),
        ({"bf16_dense_tflops": float("inf")}, "finite"),
        ({"tdp_watts": float("nan")}, "finite"),
        ({"source": ""}, "at least 1 character"),
        ({"memory_gb": 48}, "not permitted"),
    ],
)
def test_impossible_facts_of_a_gpu_are_rejected(fields: dict[str, Any], message: str) -> None:
    """An unknown fact is None, never zero, infinite, or under another name."""
    with pytest.raises(ValidationError, match=message):
        gpu(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"usd_per_hour": 0}, "greater than 0"),
        ({"usd_per_hour": -1}, "greater than 0"),
        ({"usd_per_hour": float("nan")}, "finite"),
        ({"gpus_per_instance": 0}, "greater than or equal to 1"),
        ({"market": "reserved"}, "'on-demand' or 'spot'"),
        ({"source": ""}, "at least 1 character"),
        ({"usd_per_gpu_hour": 1}, "not permitted"),
    ],
)
def test_an_impossible_offer_is_rejected(fields: dict[str, Any], message: str) -> None:
    """A price of 0.00 means unknown in public catalogs: it must not win a ranking."""
    with pytest.raises(ValidationError, match=message):
        offer(**fields)


def test_facts_cannot_be_changed_once_loaded() -> None:
    """The inputs of a result stay as they were."""
    with pytest.raises(ValidationError, match="frozen"):
        gpu().recorded = dt.date(2027, 1, 1)  # type: ignore[misc]
