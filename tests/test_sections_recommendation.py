"""Sentences and cells that name an offer."""

import datetime as dt
import re
from dataclasses import replace

import pytest
from builders.catalog_offers import offer
from builders.rankings import ranked, two_gpus
from builders.report_pages import MADE
from builders.runs import ONE_CELL, results

from fitting.laws.fit_result import Interval
from orchestrator.estimating.estimate_records import Price
from orchestrator.reporting.html_report import html_report
from orchestrator.reporting.markdown_report import cheapest_section
from orchestrator.reporting.sections.recommendation import offer_text, recommendations, rent_text


def price_in(region: str) -> Price:
    """A job on an instance of eight GPUs in a region."""
    return Price(
        provider="aws",
        instance="p5en.48xlarge",
        region=region,
        market="spot",
        gpus_per_instance=8,
        usd_per_hour=8.66,
        price_as_of=None,
        price_recorded=dt.date(2026, 11, 20),
        hours=1.0,
        hours_interval=Interval(low=1.0, high=1.0),
        usd=8.66,
        usd_interval=Interval(low=8.66, high=8.66),
    )


def test_an_offer_of_a_single_region_names_it() -> None:
    """Elsewhere the price may be several times as high."""
    price = price_in("eu-south-2")
    assert offer_text(price) == "aws p5en.48xlarge (8 GPUs) spot in eu-south-2"
    assert offer_text(price, idle=4) == "aws p5en.48xlarge (8 GPUs, 4 idle) spot in eu-south-2"
    assert "from aws in eu-south-2 (p5en.48xlarge, 8 GPUs, spot)" in rent_text("H200-SXM", price)


@pytest.mark.parametrize("region", ["all regions", "not stated", "own"])
def test_an_offer_of_no_single_region_names_none(region: str) -> None:
    """Nor do prices of a user's file without regions."""
    price = price_in(region)
    assert offer_text(price) == "aws p5en.48xlarge (8 GPUs) spot"
    assert "from aws (p5en.48xlarge, 8 GPUs, spot)" in rent_text("H200-SXM", price)


def test_a_card_of_an_own_instance_says_that_the_price_is_of_the_whole() -> None:
    """As a rented one does; a card by itself is the user's own, and no more."""
    named = {"provider": "own", "instance": "A40", "region": "own", "market": "on-demand"}
    whole = price_in("own").model_copy(update={**named, "gpus_per_instance": 4})
    assert offer_text(whole, idle=3, gpu="A40") == "your own (4 GPUs, 3 idle)"
    assert rent_text("A40", whole).startswith("Use **A40** on your own machine (A40, 4 GPUs) at ")
    single = whole.model_copy(update={"gpus_per_instance": 1})
    assert offer_text(single, gpu="A40") == "your own"
    assert rent_text("A40", single).startswith("Use your **A40** at ")


TWO_LAYOUTS = """\
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [16]
    parallel: [{gpus: 2, strategy: ddp}]
workload:"""
OFFERS = f"catalog:\n  offers:\n{offer(0.02)}{offer(0.05, instance='two')}"
BOTH = ONE_CELL.replace("workload:", TWO_LAYOUTS) + OFFERS.replace(
    "usd_per_hour: 0.05", "gpus_per_instance: 2, usd_per_hour: 0.05"
)


def test_offers_that_train_alike_only_with_an_effective_batch_say_so() -> None:
    """Two GPUs at the batch size of one take twice the examples in a step."""
    run = results(BOTH)
    assert {row.examples_per_step for row in run.ranking.offers} == {40, 80}
    line = "an optimizer step has 40 to 80 examples. `effective_batch: N` in "
    assert line in cheapest_section(run.ranking)
    assert line.replace("`", "") in re.sub("</?code>", "", html_report(run, MADE))
    equal = results(BOTH.replace("fp32}", "fp32, effective_batch: 40}"))
    assert len({row.cell.gpus for row in equal.ranking.offers}) == 2
    assert "do not train alike" not in cheapest_section(equal.ranking)


def test_the_likeliest_cheapest_offer_is_named_where_another_costs_less() -> None:
    """The first offer has the lowest expected cost; what may beat it has its own probability."""
    (advice,) = recommendations(ranked(two_gpus(0.1, 0.5)))
    first, other = advice.rows[0], next(r for r in advice.rows if r.cell != advice.best.cell)
    odds = {id(first): 0.44, id(other): 0.46}
    rows = [
        row.model_copy(update={"probability_cheapest": odds.get(id(row), 0.0), "tied": True})
        for row in advice.rows
    ]
    lead, *others = replace(advice, best=rows[0], rows=rows).sentences()
    assert (
        "It has the lowest expected cost, and is the cheapest with a probability of **44%**" in lead
    )
    assert f"{other.cell.gpus} from {other.provider}" in lead
    assert lead.endswith(" is likelier to be the cheapest (46%).")
    assert any(text.endswith(", may still be the cheapest (46%).") for text in others)
    swapped = [row.model_copy(update={"probability_cheapest": 0.5}) for row in rows]
    assert (
        "It is the cheapest with" in replace(advice, best=swapped[0], rows=swapped).sentences()[0]
    )


def test_odds_of_a_gpu_are_those_of_all_its_offers() -> None:
    """Its cheapest offer may lose to another one of the same GPU; equal costs win together."""
    (advice,) = recommendations(ranked(two_gpus(0.1, 0.5)))
    best = advice.best
    other = next(row for row in advice.rows if row.cell.gpus != best.cell.gpus)
    rows = [
        row.model_copy(update={"probability_cheapest": odds, "usd": usd})
        for row, odds, usd in ((best, 0.6, 1), (best, 0.6, 1), (best, 0.3, 1.1), (other, 0.1, 2))
    ]
    lead = replace(advice, best=rows[0], rows=rows).sentences()[0]
    assert f"with a probability of **60%** (some offer of {best.cell.gpus}: 90%)." in lead
