"""Constraints on offers, and the message where none meets them."""

from builders.rankings import SPEC

from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints, nothing_text


def test_where_nothing_is_wanted_the_least_that_must_give_is_told() -> None:
    """The deadline, the budget, either, or both at once, each by the GPU that is nearest."""
    misses = [
        ("A", MissedConstraints(quickest_hours=2.0, cheapest_usd=3.0)),
        ("B", MissedConstraints(quickest_hours=1.0, cheapest_usd=5.0)),
    ]
    fastest, cheapest = "take 1 h, on B", "cost $3, on A"
    late, expensive = "deadline of 0.5 h", "budget of $2"
    for deadline, budget, parts, absent in (
        (0.5, None, [late, fastest], "$3"),
        (1.5, 2.0, [expensive, cheapest], "1 h"),
        (0.5, 2.0, [late, fastest, expensive, cheapest], "both"),
        (1.5, 4.0, ["both", fastest, cheapest], "of $"),
    ):
        wanted = Constraints(deadline_hours=deadline, budget_usd=budget)
        text = nothing_text(wanted, misses)
        assert all(part in text for part in parts), text
        assert absent not in text


def test_a_limit_that_is_just_met_is_kept() -> None:
    """Hours equal to the deadline and dollars equal to the budget are not too much."""
    wanted = Constraints(deadline_hours=1.0, budget_usd=3.0)
    assert not wanted.refuse(1.0, 3.0)
    assert wanted.refuse(1.01, 3.0)
    assert wanted.refuse(1.0, 3.01)
    best = MissedConstraints(quickest_hours=1.0, cheapest_usd=3.0)
    assert not best.misses_deadline(wanted)
    assert not best.exceeds_budget(wanted)


def test_the_cheapest_is_named_wherever_it_stands() -> None:
    """The GPU with the lowest cost, not the one whose name comes first."""
    misses = [
        ("A", MissedConstraints(quickest_hours=1.0, cheapest_usd=5.0)),
        ("B", MissedConstraints(quickest_hours=2.0, cheapest_usd=3.0)),
    ]
    text = nothing_text(Constraints(budget_usd=2.0), misses)
    assert "$3" in text
    assert text.endswith("on B.")


def test_two_gpus_are_not_a_single_one() -> None:
    """Where an instance with one GPU is asked for, one with two is no offer."""
    offer = SPEC.merged_catalog().offers("desk")[0]
    single = Constraints(single_gpu=True)
    counts = {count: offer.model_copy(update={"gpus_per_instance": count}) for count in (1, 2)}
    assert single.allows(counts[1])
    assert not single.allows(counts[2])
