"""Committed table of the paper's largest batches as simulated."""

import pytest
from benchmarks.paper_largest_batches import RECIPES, SURVIVES, PaperRuns

from fitting.paper.published import MIXTRAL, table
from fitting.paper.simulated_batches import simulated_batches
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.simulation.trace_cache import Traces

UNCHECKPOINTED = "without checkpointing"


def test_every_pair_of_assumptions_has_each_published_size() -> None:
    """Twelve sizes of Mixtral and four of BlackMamba."""
    kept = simulated_batches()
    expected = [(m, r, s) for m, recipes in RECIPES.items() for r in recipes for s in SURVIVES]
    assert [(b.model, b.recipe, b.survives) for b in kept] == expected
    assert {len(b.simulated) for b in kept if b.model == MIXTRAL} == {12}
    assert {len(b.simulated) for b in kept if b.model != MIXTRAL} == {4}


def test_mixtrals_sizes_speak_against_checkpointing() -> None:
    """With it no size is within one of the published; without it most are, for one batch."""
    kept = {(b.recipe, b.survives): b for b in simulated_batches() if b.model == MIXTRAL}
    uncheckpointed = kept[UNCHECKPOINTED, "one batch"]
    assert (uncheckpointed.exact, uncheckpointed.within_one) == (5, 8)
    assert uncheckpointed.exact == max(batches.exact for batches in kept.values())
    assert kept["as the text", "one batch"].within_one == 0


def test_drawn_lengths_change_mixtrals_sizes_by_at_most_one_without_checkpointing() -> None:
    """The allocator releases its cache before it fails, so sizes follow the longest batch."""
    kept = {(b.recipe, b.survives): b for b in simulated_batches() if b.model == MIXTRAL}
    drawn = {
        "ten batches": "ten drawn batches",
        "1000 examples": "1000 drawn examples",
        "an epoch": "a drawn epoch",
        "an epoch cut to 256": "a drawn epoch cut to 256",
    }
    for one_length, of_drawn in drawn.items():
        sizes = kept[UNCHECKPOINTED, one_length].simulated
        of_runs = kept[UNCHECKPOINTED, of_drawn].simulated
        assert all(abs(a - b) <= 1 for a, b in zip(sizes, of_runs, strict=True))
    ten = kept[UNCHECKPOINTED, "ten drawn batches"]
    assert (ten.exact, ten.within_one) == (4, 5)


def test_the_uncheckpointed_recipe_is_that_of_the_text_but_for_checkpointing() -> None:
    """Nothing else differs."""
    changes = RECIPES[MIXTRAL][UNCHECKPOINTED]
    uncheckpointed = NAMED_RECIPES["paper-mixtral"].model_copy(update=changes)
    assert NAMED_RECIPES["paper-mixtral-uncheckpointed"] == uncheckpointed


@pytest.mark.long
@pytest.mark.parametrize("survives", ["one batch", "ten drawn batches"])
def test_the_committed_sizes_are_those_of_the_simulation(
    tmp_path_factory: pytest.TempPathFactory, survives: str
) -> None:
    """The twelve sizes of Mixtral without checkpointing are computed again."""
    traces = Traces(tmp_path_factory.mktemp("traces"), workers=1)
    runs = PaperRuns(MIXTRAL, RECIPES[MIXTRAL][UNCHECKPOINTED], traces)
    rows = [row for row in table("largest_batches.csv") if row["model"] == MIXTRAL]
    kept = next(
        b for b in simulated_batches() if (b.recipe, b.survives) == (UNCHECKPOINTED, survives)
    )
    assert kept.simulated == tuple(runs.largest(row, SURVIVES[survives]) for row in rows)
