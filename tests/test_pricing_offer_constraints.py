"""Constraints on offers, and the message when no offer meets them."""

from builders.rankings import SPEC

from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints, nothing_text


def test_the_smallest_relaxation_is_named_when_no_offer_qualifies() -> None:
    """Deadline, budget, either or both, each by the GPU that is nearest to it."""
    misses = [
        ("A", MissedConstraints(quickest_hours=2.0, cheapest_usd=3.0)),
        ("B", MissedConstraints(quickest_hours=1.0, cheapest_usd=5.0)),
    ]
    fastest, cheapest = "take 1 h, on B", "cost $3.00, on A"
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


def test_a_limit_that_is_exactly_met_holds() -> None:
    """Hours equal to the deadline and dollars equal to the budget are allowed."""
    wanted = Constraints(deadline_hours=1.0, budget_usd=3.0)
    assert not wanted.refuse(1.0, 3.0)
    assert wanted.refuse(1.01, 3.0)
    assert wanted.refuse(1.0, 3.01)
    best = MissedConstraints(quickest_hours=1.0, cheapest_usd=3.0)
    assert not best.misses_deadline(wanted)
    assert not best.exceeds_budget(wanted)


def test_the_cheapest_gpu_is_named_regardless_of_order() -> None:
    """The lowest cost decides, not the first name in the alphabet."""
    misses = [
        ("A", MissedConstraints(quickest_hours=1.0, cheapest_usd=5.0)),
        ("B", MissedConstraints(quickest_hours=2.0, cheapest_usd=3.0)),
    ]
    text = nothing_text(Constraints(budget_usd=2.0), misses)
    assert "$3" in text
    assert ", on B." in text


def test_an_instance_with_two_gpus_is_excluded_where_one_is_wanted() -> None:
    """A limit of one GPU excludes every larger instance."""
    offer = SPEC.merged_catalog().offers("desk")[0]
    single = Constraints(single_gpu=True)
    counts = {count: offer.model_copy(update={"gpus_per_instance": count}) for count in (1, 2)}
    assert single.allows(counts[1])
    assert not single.allows(counts[2])
