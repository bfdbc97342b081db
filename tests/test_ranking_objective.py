"""The best offer by cost, by time, or by both."""

import json
from dataclasses import replace

import pytest
from builders.rankings import ranked, two_gpus

import orchestrator
from orchestrator.estimating.estimate_records import Estimates
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.exporting.chosen_offers import estimated_training
from orchestrator.exporting.training import ExportError
from orchestrator.pricing.offer_constraints import Constraints, Objective
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.reporting.estimate_tables import as_json, as_table
from orchestrator.reporting.sections.recommendation import recommendations
from orchestrator.request import request_of


def ranking(objective: Objective, **limits: float) -> Ranking:
    """The desk is faster at twice the speed, the lap costs half as much."""
    constraints = Constraints(objective=objective, **limits)
    return ranked(two_gpus(0.1, 0.2), constraints=constraints)


@pytest.mark.parametrize(
    ("objective", "instances"),
    [
        ("cost", ["slow", "single", "whole"]),
        ("time", ["single", "whole", "slow"]),
        ("both", ["slow", "single", "whole"]),
    ],
)
def test_offers_are_numbered_by_the_objective(objective: Objective, instances: list[str]) -> None:
    """Of equally fast offers the cheaper comes first; odds and front do not depend on it."""
    rows = ranking(objective).offers
    assert [row.instance for row in rows] == instances
    assert [row.rank for row in rows] == [1, 2, 3]
    assert {row.instance for row in rows if row.pareto} == {"slow", "single"}


def test_the_fastest_within_a_budget_is_recommended() -> None:
    """The headline names the limit, and the cheaper offer beside it."""
    (advice,) = recommendations(ranking("time", budget_usd=100))
    first, second = advice.sentences()
    assert "fastest within the budget of $100" in first
    assert "**desk**" in first
    assert "lap" in second


def test_both_objectives_have_an_answer_each() -> None:
    """The cheapest leads; the fastest is named, however little faster it is."""
    (advice,) = recommendations(ranking("both", deadline_hours=100))
    sentences = advice.sentences()
    assert "**lap**" in sentences[0]
    assert any("desk" in text for text in sentences[1:])


def estimates(objective: Objective, **limits: float) -> Estimates:
    """A tiny job on two GPUs, whose steps alone take time."""
    return orchestrator.estimate(
        "llama-tiny",
        gpu="L4,H100-SXM",
        seq_len=512,
        examples=1_000_000,
        objective=objective,
        startup_minutes=0,
        **limits,
    )


def test_an_estimate_answers_the_objective() -> None:
    """The H100 is faster than the L4, and more expensive for a tiny model."""
    cheapest, fastest = estimates("cost"), estimates("time")
    usd = [row.estimate.price.usd for row in cheapest if row.estimate.price]
    hours = [row.estimate.price.hours for row in fastest if row.estimate.price]
    assert usd == sorted(usd)
    assert hours == sorted(hours)
    assert (fastest.estimated[0].estimate.hours or 0) <= (cheapest.estimated[0].estimate.hours or 0)
    both = estimates("both", budget_usd=1000)
    shown = as_table(both.estimated, both.question)
    assert "The cheapest within the budget of $1,000" in shown
    assert "fastest" in shown
    rows = json.loads(as_json(both.estimated, one=False))
    assert [row["gpu"] for row in rows if "cost" in row["best_by"]] == [rows[0]["gpu"]]
    (quickest,) = (row for row in rows if "time" in row["best_by"])
    assert quickest["fastest"]["hours"] == pytest.approx(min(hours))
    assert f"**{quickest['fastest']['hours']:.3g} h**" in shown


def test_the_exported_offer_is_the_best_by_the_objective() -> None:
    """Fallbacks follow in the same order."""
    options = {"model": "llama-tiny", "gpu": ("L4", "H100-SXM"), "seq_len": 512}
    request = request_of(EstimateRequest, options)
    training = estimated_training(estimates("time"), request)
    hours = [place.hours for place in training.placements]
    assert hours == sorted(hours)


def test_an_export_without_an_offer_refers_to_a_table_only_where_there_is_one() -> None:
    """GPUs that cannot be estimated have a line each, and no table."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "gpu": ("L4",), "seq_len": 512})
    none = estimates("cost", budget_usd=1e-6)
    for shown, place in ((none, "in the table above"), (replace(none, estimated=()), "above")):
        with pytest.raises(ExportError, match=f"the reason is {place}"):
            estimated_training(shown, request)


def test_where_nothing_qualifies_one_line_has_the_nearest() -> None:
    """Whatever the objective."""
    for objective in ("time", "both"):
        none = estimates(objective, budget_usd=1e-6)
        shown = as_table(none.estimated, none.question)
        assert "No offer is within the budget of $0.000001: the cheapest" in shown
        assert "Give a higher --budget-usd." in shown
