"""Curves, where they stop, and how often a job's examples are seen by them."""

import json
import random
from collections.abc import Sequence

import pytest
from builders.curves import DENSE, SPARSE, epochs, scores_of
from builders.observations import recipe, tiny_cell
from builders.runs import ROUTED, spec_of, whole_trial

from fitting.families.cell_step_time import StepTimeSource
from fitting.learning_curves import LearningCurve, best, curves, gain, standard_error
from orchestrator.planning.plan import Plan
from orchestrator.ranking.epochs_needed import EpochsError, LearnedEpochs, learned_epochs
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.ranking.ranking import rank
from orchestrator.reporting.markdown_report import headline
from orchestrator.reporting.sections.learning_section import (
    learning_json,
    learning_section,
    sparse_against_dense,
)
from trials.records.learning import HeldOutScores


@pytest.mark.parametrize(
    ("scores", "epoch", "by", "has_stopped"),
    [
        ([(0, 3.0), (50, 1.0), (90, 0.5), (91, 0.5), (90, 0.5)], 2, "accuracy", True),
        ([(0, 3.0), (50, 1.0), (90, 0.5), (91, 0.5)], 2, "accuracy", False),
        # Nothing right yet: the loss tells that it learns.
        ([(0, 3.0), (0, 2.0), (0, 1.5), (0, 1.5), (0, 1.5)], 2, "loss", True),
        ([(0, 3.0), (20, 2.0), (20, 1.0), (20, 1.0), (60, 0.9)], 4, "accuracy", False),
        # All right: the loss falls on, and nobody wants it.
        ([(0, 3.0), (100, 0.1), (100, 0.01), (100, 0.001)], 1, "accuracy", True),
        # Surer, and wrong more often.
        ([(0, 3.0), (80, 1.0), (60, 0.5), (60, 0.4)], 1, "accuracy", True),
        ([(50, 1.0), (50, 1.0), (49, 1.0)], 0, "loss", True),
        ([(50, 1.0)], 0, "loss", False),
    ],
)
def test_learning_stops_where_nothing_later_is_better_beyond_noise(
    scores: list[tuple[int, float]], epoch: int, by: str, *, has_stopped: bool
) -> None:
    """By right answers, by the loss while some are wrong, two epochs after the best."""
    (curve,) = curves(epochs(scores))
    found = best(curve)
    assert (found.epoch, found.by, found.has_stopped) == (epoch, by, has_stopped)


def test_one_right_answer_more_is_noise_and_three_more_are_not() -> None:
    """Example by example, where no other changed; and as many as went wrong tell nothing."""
    before = scores_of(50, 1.0)
    assert not gain(before, scores_of(51, 1.0), "accuracy").is_beyond_noise
    three = gain(before, scores_of(53, 1.0), "accuracy")
    assert three.is_beyond_noise
    assert three.mean == pytest.approx(0.03)
    swapped = before.model_copy(update={"correct": before.correct[::-1]})
    assert gain(before, swapped, "accuracy").mean == 0
    assert not gain(before, swapped, "accuracy").is_beyond_noise


def test_the_error_of_a_loss_is_what_resampling_the_examples_gives() -> None:
    """Answers of different lengths, and two tests of the same examples."""
    draw = random.Random(1)
    tokens = tuple(draw.randint(1, 9) for _ in range(400))
    one = tuple(n * draw.uniform(0.5, 1.5) for n in tokens)
    other = tuple(nats * draw.uniform(0.7, 1.1) for nats in one)
    right = (True,) * 400
    before = HeldOutScores(nats=one, tokens=tokens, correct=right)
    after = HeldOutScores(nats=other, tokens=tokens, correct=right)
    means, gains = [], []
    for _ in range(800):
        places = draw.choices(range(400), k=400)
        total = sum(tokens[place] for place in places)
        means.append(sum(one[place] for place in places) / total)
        gains.append(sum(one[place] - other[place] for place in places) / total)
    assert standard_error(before, "loss") == pytest.approx(spread(means), rel=0.1)
    assert gain(before, after, "loss").error == pytest.approx(spread(gains), rel=0.1)


def spread(values: Sequence[float]) -> float:
    """Standard deviation."""
    mean = sum(values) / len(values)
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5)


def test_a_curve_is_its_longest_attempt_without_a_gap() -> None:
    """One that had to begin anew, and has not come as far yet, is not mixed with it."""
    first = epochs([(0, 3.0), (50, 1.0), (60, 0.9)])
    second = epochs([(0, 3.0), (40, 1.1)], attempt=2)
    (curve,) = curves([*first, *second])
    assert curve.epochs == tuple(first)
    third = epochs([(0, 3.0), (50, 1.0), (61, 0.9)], attempt=3)
    (curve,) = curves([*first, *second, *third])
    assert curve.epochs == tuple(third)
    (curve,) = curves([first[0], first[2]])
    assert len(curve.epochs) == 1


LEARNT = [(0, 3.0), (50, 1.0), (90, 0.5), (90, 0.5), (90, 0.5)]
SLOWER = [(0, 3.0), (30, 2.0), (50, 1.0), (70, 0.8), (91, 0.5), (91, 0.5), (91, 0.5)]


def test_sparse_is_held_against_dense_at_the_best_of_each() -> None:
    """With an interval; as good where that holds zero, worse where it does not."""
    alike = curves([*epochs(LEARNT), *epochs(SLOWER, DENSE)])
    (pair,) = sparse_against_dense(alike)
    assert not pair.is_significant
    (row,) = json.loads(learning_json(alike))["sparse_against_dense"]
    assert (row["sparse_experts"], row["dense_experts"], row["significant"]) == (2, 8, False)
    assert row["accuracy_gain"] == pytest.approx(-0.01)
    assert pair.accuracy.interval == (row["accuracy_gain_low"], row["accuracy_gain_high"])
    assert pair.accuracy.interval[0] < -0.01 < 0 < pair.accuracy.interval[1]
    assert "not distinguishable" in learning_section(alike)
    worse = curves([*epochs([(0, 3.0), (20, 1), (20, 1), (20, 1)]), *epochs(SLOWER, DENSE)])
    (pair,) = sparse_against_dense(worse)
    assert pair.is_significant
    assert "worse than dense: -71.0 points" in learning_section(worse)
    # Another learning rate, or other data, is nothing to hold it against.
    other = epochs(SLOWER, DENSE, learning_rate=2e-3)
    assert sparse_against_dense(curves([*epochs(LEARNT), *other])) == []
    assert sparse_against_dense(curves([*epochs(LEARNT), *epochs(SLOWER, DENSE, data="b")])) == []


def test_rows_tell_each_epoch_and_where_it_stops() -> None:
    """As charts take them."""
    found = curves(epochs(LEARNT))
    for_programs = json.loads(learning_json(found))
    rows = for_programs["curves"]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["epoch"] for row in rows if row["is_best"]] == [2]
    assert rows[0]["train_loss"] is None
    assert rows[2]["accuracy"] == 0.9
    assert rows[2]["accuracy_error"] == pytest.approx(0.03, rel=0.05)
    assert rows[0]["accuracy_error"] > 0  # none right of a hundred is not none for ever
    (stop,) = for_programs["stops"]
    assert (stop["epoch"], stop["epochs"], stop["has_stopped"]) == (2, 4, True)
    text = learning_section(found)
    assert "| 2     | 0.5                        |" in text
    assert "90.0 ± 3.0 % *" in text
    assert "stops improving at epoch 2" in text
    assert learning_section([]) == ""
    unsure = learning_section(curves(epochs(LEARNT[:3])))
    assert "the best epoch is 2 (by accuracy)" in unsure


def test_a_job_is_priced_at_the_epochs_that_each_cell_took_to_learn() -> None:
    """Sparse and dense alone; what was not learned, or not to its end, is left out with why."""
    spec = spec_of(ROUTED.replace("[2]", "[2, 8, 4]"))
    sparse, dense, unknown = cells = spec.all_cells()
    observations = [o for cell in cells for o in whole_trial(cell, spec)]
    plan = Plan(complete=tuple(cells), pending=(), skipped=())
    known = curves([*epochs(LEARNT), *epochs(SLOWER, DENSE)])
    found = learned_epochs(cells, known, "run")
    catalog, step_times = spec.merged_catalog(), StepTimeSource(observations, ())
    ranking = rank(RankingInputs(spec.workload, catalog, plan, step_times, epochs=found))
    of = {row.cell: row for row in ranking.offers if row.rank == 1}
    assert (of[sparse].epochs, of[dense].epochs) == (2, 4)
    two_epochs = spec.workload.model_copy(update={"epochs": 2})
    again = rank(RankingInputs(two_epochs, catalog, plan, step_times))
    assert of[sparse].hours == next(r.hours for r in again.offers if r.cell == sparse)
    (excluded,) = ranking.excluded
    assert excluded.cell == unknown
    assert "nothing was learned by mixtral-tiny, full, sparse, 4 of 8" in excluded.reason
    text = headline(ranking)
    assert "2 to 4 epochs" in text
    assert "full-fp32-grouped: 4 epochs" in text
    last = {line.split(",")[5]: line.split(",")[-1] for line in ranking_csv(ranking).splitlines()}
    assert (last["2"], last["8"]) == ("2", "4")


def test_epochs_come_from_what_learns_alike_pretrained_and_latest_first() -> None:
    """Another GPU or kernel learns alike; another method does not."""
    elsewhere = SPARSE.model_copy(
        update={
            "gpu": "A40",
            "seq_len": 512,
            "recipe": SPARSE.recipe.model_copy(
                update={"gradient_checkpointing": True, "attention": "eager", "experts": "looped"}
            ),
        }
    )
    known = curves([*epochs(SLOWER), *epochs(LEARNT, data="later")])
    told = learned_epochs([elsewhere], known, "run")[elsewhere]
    assert isinstance(told, LearnedEpochs)
    assert (told.epochs, told.data) == (2, "later")
    pretrained = SPARSE.model_copy(update={"weights": "pretrained"})
    known = curves([*epochs(SLOWER, pretrained), *epochs(LEARNT)])
    told = learned_epochs([elsewhere], known, "run")[elsewhere]
    assert isinstance(told, LearnedEpochs)
    assert (told.epochs, told.weights) == (4, "pretrained")
    lora = tiny_cell("mixtral-tiny", recipe("lora"), active=2)
    with pytest.raises(EpochsError, match="nothing was learned by mixtral-tiny, lora, sparse"):
        learned_epochs([lora], known, "run")


@pytest.mark.parametrize(
    ("known", "said"),
    [
        # Whatever was given, a file or a bucket too: 'learn' writes to a local folder alone.
        (
            [],
            "run 'learn DATA --model NAME --out DIR', then give --learned DIR, or give a number",
        ),
        (
            curves(epochs(LEARNT[:3])),
            "2 of 8, on data.jsonl: may be improving still at epoch 2: continue with --epochs 4",
        ),
        (
            curves(epochs([(50, 1.0)] * 4)),
            "on data.jsonl: none of 3 epochs was better than the untrained model: give a number",
        ),
    ],
)
def test_epochs_that_are_not_known_are_one_line(known: list[LearningCurve], said: str) -> None:
    """With what to do."""
    with pytest.raises(EpochsError) as error:
        learned_epochs([SPARSE], known, "run")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
