"""Names of GPUs that people use, and the keys that they stand for."""

import gpuhunt
import pytest

import orchestrator
from gpu_catalog.catalog import UnknownGpuError, load_catalog
from gpu_catalog.live_prices.gpu_identification import names
from orchestrator.cli.main import main
from orchestrator.estimating import estimate_job
from orchestrator.estimating.question import EstimateError
from orchestrator.estimating.requested_gpus import (
    check_numbers,
    gpus_named,
    left_out_of_all,
    own_cards,
    requested_gpus,
)

CATALOG = load_catalog()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("A100-80GB-SXM", ["A100-80GB-SXM"]),
        ("a100-80gb-sxm", ["A100-80GB-SXM"]),
        ("A100:80GB", ["A100-80GB-SXM", "A100-80GB-PCIe"]),
        ("H100", ["H100-SXM", "H100-PCIe", "H100-NVL"]),
        ("H100NVL", ["H100-NVL"]),
        ("A10", ["A10"]),
        ("4090", ["RTX-4090"]),
        ("RTX4090", ["RTX-4090"]),
        ("NVIDIA GeForce RTX 4090", ["RTX-4090"]),
        ("RTX6000-Ada", ["RTX-6000-Ada"]),
        ("A6000", ["RTX-A6000"]),
        ("Tesla T4", ["T4"]),
        ("1xL4", ["L4"]),
        ("H100:80GB", ["H100-SXM", "H100-PCIe"]),
        ("nvidia:A40:48GB:1", ["A40"]),
        ("A100-40GB:1", ["A100-40GB-SXM", "A100-40GB-PCIe"]),
        ("RTX 4090 24GB", ["RTX-4090"]),
        ("B300:270GB", ["B300"]),
    ],
)
def test_a_name_stands_for_keys(name: str, keys: list[str]) -> None:
    """Names as in the catalogs of SkyPilot, dstack and gpuhunt, and CUDA's device names."""
    assert [gpu.key for gpu in requested_gpus([name], None, CATALOG)] == keys


@pytest.mark.parametrize(
    "name",
    ["A1", "10", "100", "", "-", "RTX", "RTX-4070", "RTX4070Ti", "5070", "RTX6000", "A40:24GB"],
)
def test_a_part_of_a_name_stands_for_nothing(name: str) -> None:
    """``A1`` is neither the A10 nor the A100; an RTX 4070 is no RTX 4070 Ti SUPER."""
    with pytest.raises(UnknownGpuError):
        gpus_named(name, CATALOG)


def test_gpuhunt_and_a_request_name_the_same_gpus() -> None:
    """A name of gpuhunt, alone or with its memory, stands for a GPU where its prices do."""
    priced = {name.casefold() for name in names()}
    for gpu in gpuhunt.KNOWN_NVIDIA_GPUS:
        for name in (gpu.name, f"{gpu.name}:{gpu.memory:g}GB:1"):
            if gpu.name.casefold() in priced:
                assert requested_gpus([name], None, CATALOG)
            else:
                with pytest.raises(UnknownGpuError):
                    requested_gpus([name], None, CATALOG)


def test_every_key_names_its_gpu_alone() -> None:
    """L4 is not also the L40S."""
    for gpu in CATALOG.gpus:
        if gpu.kind == "cuda":
            assert gpus_named(gpu.key, CATALOG) == [gpu]


@pytest.mark.parametrize("name", ["8xH100", "H100:8", "8 x a100-80gb"])
def test_several_gpus_are_refused_by_their_number(name: str) -> None:
    """The message names the GPU, which is known."""
    with pytest.raises(EstimateError, match="8 GPUs"):
        requested_gpus([name], None, CATALOG)


@pytest.mark.parametrize(
    ("names", "counts", "contradicting"),
    [
        (["8xA40"], [4], "4"),
        (["8xA40", "own:L4:2"], [2, 4, 8], "4"),
        (["8xA40"], [8], None),
        (["8xA40", "L4"], [4], None),
        (["8xA40"], [], None),
    ],
)
def test_a_number_that_no_gpu_takes_is_refused(
    names: list[str], counts: list[int], contradicting: str | None
) -> None:
    """``--gpus`` is for names without a number; where each states another, none would take it."""
    if contradicting is None:
        check_numbers(names, counts)
        return
    with pytest.raises(EstimateError, match=f"contradicts --gpus {contradicting}:"):
        check_numbers(names, counts)


def test_overlapping_names_give_each_gpu_once() -> None:
    """In the order of the names."""
    gpus = requested_gpus(["H100-NVL", "h100"], None, CATALOG)
    assert [gpu.key for gpu in gpus] == ["H100-NVL", "H100-SXM", "H100-PCIe"]


def test_a_card_of_ones_own_is_named_by_a_prefix() -> None:
    """Beside GPUs to rent, or all of them; a name of several cards is refused."""
    names = ["own:a40", "H100-NVL"]
    assert [gpu.key for gpu in requested_gpus(names, None, CATALOG)] == ["A40", "H100-NVL"]
    assert [gpu.key for gpu in own_cards(names, None, CATALOG)] == ["A40"]
    everything = requested_gpus(["own:A40", "all"], None, CATALOG)
    assert {gpu.key for gpu in everything} == {
        g.key for g in requested_gpus(["all"], None, CATALOG)
    }
    with pytest.raises(EstimateError, match="own:A100-40GB-SXM"):
        requested_gpus(["own:A100"], None, CATALOG)
    (changed,) = own_cards(["own:A40"], 24, CATALOG)
    assert changed.key == "A40-24GiB"


def test_an_amd_gpu_is_left_out_and_the_others_are_answered() -> None:
    """Its times are not modelled; alone it is refused with the same reason."""
    options = {"method": "lora", "seq_len": 64, "examples": 1000}
    answered = orchestrator.estimate("llama-tiny", gpu="MI300X,L4", **options)
    assert [row.estimate.gpu for row in answered] == ["L4"]
    (reason,) = answered.skipped
    assert reason.startswith("MI300X: times of AMD GPUs are neither measured nor modelled")
    alone = orchestrator.estimate("llama-tiny", gpu="MI300X", **options)
    assert (list(alone), alone.skipped) == ([], answered.skipped)


@pytest.mark.parametrize("names", [(), ("--gpu", "all")])
def test_all_gpus_name_those_of_amd_that_they_leave_out(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line has them beside text and JSON; named GPUs need none."""
    line = "Left out: MI300X, MI325X, MI355X (times of AMD GPUs are not modelled)."
    monkeypatch.setattr(estimate_job, "best_boxes", lambda *_: ([], ["L4: a reason"]))
    assert main(["estimate", "--model=llama-tiny", "--seq-len=64", "--json", *names]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-2:] == ["L4: a reason", line]
    assert printed.out == "[]\n"
    assert left_out_of_all(["own:A40", "all"], CATALOG) == [line]
    assert left_out_of_all(["L4", "MI300X"], CATALOG) == []
