"""Estimates of a training that keeps its optimizer on the host, on instances with little memory."""

import json
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cli.main import main
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.reporting.notes.host_notes import host_notes
from trials.simulation.simulated_cell import host_bytes

PRICES = """gpu,provider,instance,gpus_per_instance,usd_per_hour,host_memory_gib
A40,acme,small,2,1,0.001
A40,acme,large,2,3,64
A40,acme,unknown,2,2,
A40,other,tiny,2,1,0.0001
"""
JOB: dict[str, Any] = {"gpu": "2xA40", "seq_len": 32, "batch_size": 1, "defaults": "plain"}
JOB |= {"strategy": "deepspeed-zero2", "method": "full"}
LLAMA_TINY = 658_048
"""Weights of the model, all of which are trained."""


def estimated(folder: Path, prices: str = PRICES, **options: Any) -> Estimated:
    """The estimate at these prices of one provider."""
    file = folder / "prices.csv"
    file.write_text(prices, encoding="utf-8")
    (row,) = orchestrator.estimate("llama-tiny", **JOB, prices=file, providers="acme", **options)
    return row


def test_an_instance_with_too_little_host_memory_is_named_and_not_chosen(tmp_path: Path) -> None:
    """The cheapest is too small; of one with an unknown memory it is said. Others are not named."""
    row = estimated(tmp_path, offload="optimizer")
    held, price = row.estimate.host_gib, row.estimate.price
    assert held is not None
    assert 18 * LLAMA_TINY < held * 2**30 < 28 * LLAMA_TINY
    assert [(p.instance, p.host_memory_gib) for p in row.prices] == [
        ("unknown", None),
        ("large", 64),
    ]
    assert price == row.prices[0]
    (small,) = row.estimate.too_little_host_memory
    assert (small.instance, small.needed_gib, small.host_memory_gib) == ("small", held, 0.001)
    said = list(host_notes([row.estimate]))
    assert len(said) == 3
    assert small.text in said[1]
    assert "acme unknown" in said[2]


def test_without_enough_host_memory_anywhere_there_is_no_price(tmp_path: Path) -> None:
    """The reason has both figures."""
    only_small = "".join(PRICES.splitlines(keepends=True)[:2])
    row = estimated(tmp_path, only_small, offload="optimizer")
    assert row.estimate.price is None
    assert row.estimate.too_little_host_memory[0].text in (row.estimate.no_price or "")


@pytest.mark.long
def test_a_training_that_keeps_nothing_on_the_host_takes_any_instance(tmp_path: Path) -> None:
    """As before there were memories of hosts."""
    row = estimated(tmp_path)
    assert (row.estimate.host_gib, row.estimate.too_little_host_memory) == (None, ())
    assert [price.instance for price in row.prices] == ["small", "unknown", "large"]
    assert list(host_notes([row.estimate])) == []


@pytest.mark.long
def test_weights_that_a_gpu_cannot_hold_twice_are_copied_on_the_host() -> None:
    """Each of eight processes has them twice there, which is more than its share of the state."""
    (row,) = orchestrator.estimate("llama-tiny", **JOB | {"gpu": "8xA40"}, offload="optimizer")
    weights = int(row.cell.held.sizes.sum())
    assert weights == pytest.approx(2 * LLAMA_TINY, rel=0.01)
    with_room = host_bytes(row.cell, 1, 2 * weights)
    assert with_room is not None
    assert with_room < 30 * LLAMA_TINY
    assert host_bytes(row.cell, 1, 2 * weights - 1) == 8 * 2 * weights


def test_a_check_says_what_the_host_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """It fits the GPUs, whatever their machine."""
    options = (f"--{name.replace('_', '-')}={value}" for name, value in JOB.items())
    command = ["check", "--model", "llama-tiny", *options, "--offload", "optimizer"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_gib"] * 2**30 > 18 * LLAMA_TINY
