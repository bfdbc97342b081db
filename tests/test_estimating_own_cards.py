"""Estimates on cards that the user owns, beside rented ones."""

import json
from typing import Any

import pytest

import orchestrator
from orchestrator.reporting.estimate_tables import as_json, as_table
from orchestrator.request import OptionError

STATED: dict[str, Any] = {"method": "lora", "gradient_checkpointing": "off"}


def test_a_card_of_ones_own_is_ranked_beside_rented_ones() -> None:
    """It costs its electricity, whatever the limits on providers, and is used, not rented."""
    estimates = orchestrator.estimate(
        "llama-tiny",
        **STATED,
        gpu="A100-40GB-SXM,own:A40",
        usd_per_kwh=0.5,
        seq_len=512,
        spot=True,
        providers="gcp",
        startup_minutes=3,
    )
    prices = {row.estimate.gpu: row.estimate.price for row in estimates}
    own = prices["A40"]
    assert own is not None
    assert (own.provider, own.usd) == ("own", pytest.approx(0.15 * own.hours))
    assert (prices["A100-40GB-SXM"] or own).provider == "gcp"
    shown = as_table(estimates.estimated, estimates.question)
    assert "Use your **A40**" in shown
    assert "300 W" in shown
    assert " 3 min of start-up, 5 s per checkpoint, " in shown
    assert "; checkpoints by the model's bytes, here of the first row." in shown


def test_electricity_needs_a_price() -> None:
    """No price is guessed."""
    with pytest.raises(OptionError, match="--usd-per-kwh"):
        orchestrator.estimate("llama-tiny", gpu="own:A40", seq_len=32)


def test_what_is_owned_is_ranked_apart_from_what_is_rented() -> None:
    """Two L40S are owned, not one nor eight; the same two are also priced as if rented."""
    estimates = orchestrator.estimate(
        "llama-tiny",
        **STATED,
        gpu="own:2xL40S,2xL40S,L40S",
        gpus=(1, 8),
        usd_per_kwh=0.5,
        strategy="ddp",
        seq_len=32,
    )
    offers = {(row.estimate.gpus, row.question.is_own): row.estimate.price for row in estimates}
    assert len(estimates) == len(offers) == 4
    owned = {key for key, price in offers.items() if price and price.provider == "own"}
    assert owned == {(2, True)}
    assert offers[2, False] is not None


def test_a_card_that_is_owned_and_rented_has_two_rows_that_can_be_told_apart() -> None:
    """By a field, for programs; a list of GPUs in a note has the name once."""
    estimates = orchestrator.estimate(
        "llama-tiny", gpu="own:A40,A40,T4", usd_per_kwh=0.5, seq_len=32
    )
    rows = json.loads(as_json(estimates.estimated, one=False))
    notes = {row["is_own"]: row["price"]["note"] for row in rows if row["gpu"] == "A40"}
    assert notes[True] == "electricity of the card alone"
    assert notes[False] != notes[True]
    shown = as_table(estimates.estimated, estimates.question)
    assert "Its cheapest GPU is your A40: " in shown
    assert "A40, A40" not in shown
    assert "A40, T4, A40" not in shown
    assert "own A40: electricity" not in shown


@pytest.mark.long
def test_a_card_that_the_job_does_not_fit_has_one_row() -> None:
    """Rented ones are as small."""
    estimates = orchestrator.estimate(
        "llama-tiny", **STATED, gpu="own:A40,A40", memory_gib=0.52, usd_per_kwh=0.5, seq_len=32
    )
    (row,) = estimates
    assert row.question.is_own
    assert estimates.skipped == (
        "A40-0.52GiB, rented: not priced, because the job has no step time on it",
    )


@pytest.mark.parametrize("asked", [{"gpu": "own:2xA40"}, {"gpu": "own:A40", "gpus": (2,)}])
def test_several_cards_of_ones_own_cost_the_electricity_of_all(asked: dict[str, Any]) -> None:
    """Two of 300 W at $0.50 per kWh, whichever way their number is given."""
    estimates = orchestrator.estimate(
        "llama-tiny", **STATED, **asked, usd_per_kwh=0.5, strategy="ddp", seq_len=32
    )
    (row,) = estimates
    price = row.estimate.price
    assert price is not None
    assert (row.estimate.gpus, price.provider, price.gpus_per_instance) == (2, "own", 2)
    assert price.usd_per_hour == pytest.approx(0.3)
    shown = as_table(estimates.estimated, estimates.question)
    assert (
        "Use your **2xA40** at $0.30 an hour (electricity of the cards alone): the job costs"
    ) in shown
