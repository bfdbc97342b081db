"""What a report says of the overheads that its offers were priced with."""

import pytest
from builders.observations import measurement
from builders.rankings import JOB, LAP, ranked, timed

from orchestrator.reporting.sections.cost_text import overheads_text, ranked_overheads_text
from orchestrator.spec.job import NO_OVERHEADS, Overheads
from trials.records.built import ParameterCounts
from trials.records.observation import Measurement

COUNTS = ParameterCounts(total=10**10, trainable=10**10, four_bit=0)
UNSIZED = measurement(step_seconds=(0.1,)).model_copy(update={"built": None})
SIZED = UNSIZED.model_copy(update={"parameters": COUNTS})
SMALL = measurement(step_seconds=(0.1,))
MIXED = (
    "9.5 min of start-up by the model's bytes (10 min where they are unknown), 245 s per "
    "checkpoint by its bytes (30 s where they are unknown)"
)


@pytest.mark.parametrize(
    ("desk", "lap", "given", "text"),
    [
        (UNSIZED, UNSIZED, Overheads(), "10 min of start-up, 30 s per checkpoint"),
        (
            SIZED,
            SMALL,
            Overheads(),
            "8 to 9.5 min of start-up by the model's bytes, 5 to 245 s per checkpoint by its bytes",
        ),
        (
            SIZED,
            UNSIZED,
            Overheads(),
            MIXED,
        ),
        (
            SIZED,
            SIZED,
            Overheads(startup_minutes=3),
            "3 min of start-up, 245 s per checkpoint by its bytes",
        ),
    ],
    ids=["table", "sized", "mixed", "given"],
)
def test_a_ranking_states_the_overheads_that_it_priced(
    desk: Measurement, lap: Measurement, given: Overheads, text: str
) -> None:
    """Flat times of a table, whose models are names alone; those by size elsewhere."""
    probes = [timed(8, measurement=desk), timed(8, cell=LAP, measurement=lap)]
    ranking = ranked(probes, JOB.model_copy(update={"overheads": given}))
    assert ranked_overheads_text(ranking).startswith(f". Assumed, not measured: {text}, 0.1 ")


def test_without_an_offer_the_formulas_are_stated() -> None:
    """Nothing was priced, so no time is known."""
    text = ranked_overheads_text(ranked([], JOB.model_copy(update={"overheads": Overheads()})))
    assert "8 min of start-up plus the weights, downloaded at 400 MB/s and read at 500 MB/s" in text
    assert "5 s per checkpoint plus its bytes, written at 500 MB/s, " in text


def test_a_job_without_overheads_has_no_assumption() -> None:
    """An interval between checkpoints that take no time is none."""
    assert overheads_text(NO_OVERHEADS.model_copy(update={"checkpoint_minutes": 60.0})) == ""
