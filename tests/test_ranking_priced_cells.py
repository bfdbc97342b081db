"""Jobs of cells on the offers of their GPUs: the epochs of each cell, and the draws they share."""

import pytest
from builders.observations import measurement
from builders.rankings import (
    ATTIC,
    DESK,
    LAP,
    TEXT,
    exclusion_reason,
    on_desk,
    ranked,
    timed,
    two_gpus,
)
from builders.runs import spec_of

from orchestrator.ranking.epochs_needed import LearnedEpochs
from trials.records.observation import Basis

LEARNED = LearnedEpochs(
    model=DESK.model,
    recipe=DESK.recipe.key,
    active_experts=None,
    weights=DESK.weights,
    epochs=5,
    by="loss",
    data="chats",
    held_out_examples=10,
    batch_size=8,
    learning_rate=1e-4,
)


def test_each_cell_is_priced_for_its_own_number_of_epochs() -> None:
    """1,000 examples at batch size 8 are 125 steps; a cell without a curve is excluded."""
    more = LEARNED.model_copy(update={"epochs": 7})
    ranking = ranked(two_gpus(0.1, 0.2), epochs={DESK: LEARNED, LAP: more, ATTIC: "no curve"})
    assert on_desk(ranking).epochs == 5
    assert on_desk(ranking).hours * 3600 == pytest.approx(5 * 125 * 0.1)
    (lap,) = (row for row in ranking.offers if row.cell == LAP)
    assert lap.hours * 3600 == pytest.approx(7 * 125 * 0.2)
    assert (ranking.workload.epochs, ranking.learned) == (7, (LEARNED, more))
    unknown = ranked(two_gpus(0.1, 0.2), epochs={DESK: LEARNED, LAP: "no curve", ATTIC: "none"})
    assert exclusion_reason(unknown, LAP) == "no curve"
    assert unknown.workload.epochs == 5


def test_a_ranking_is_the_same_every_time() -> None:
    """Errors that all simulated times share are drawn from the seed of the specification."""
    uncertain = measurement(step_seconds=(0.1,)).model_copy(
        update={"relative_error": 0.3, "relative_error_above": 2.0}
    )
    simulated = [timed(8, basis=Basis.SIMULATED, measurement=uncertain), timed(8, 0.4, cell=LAP)]
    assert ranked(simulated) == ranked(simulated)


def test_an_offer_within_the_indifference_of_the_cheapest_is_tied() -> None:
    """Half a percent is no reason to choose one of two offers of a GPU; two percent are."""
    text = TEXT.replace("3.6, market: spot", "3.6")
    near = text.replace("usd_per_hour: 7.2", "usd_per_hour: 3.618")
    far = text.replace("usd_per_hour: 7.2", "usd_per_hour: 3.672")
    for prices, tied in ((near, [True, True]), (far, [True, False])):
        rows = ranked(two_gpus(0.1, 10.0), spec=spec_of(prices)).offers
        assert [row.tied for row in rows if row.cell == DESK] == tied
