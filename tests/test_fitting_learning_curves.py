"""Learning curves: where they stop, and the number of epochs that a job needs."""

import json
import random
import re
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
        # Nothing right yet: the loss shows that it learns.
        ([(0, 3.0), (0, 2.0), (0, 1.5), (0, 1.5), (0, 1.5)], 2, "loss", True),
        ([(0, 3.0), (20, 2.0), (20, 1.0), (20, 1.0), (60, 0.9)], 4, "accuracy", False),
        # All right: a lower loss does not matter.
        ([(0, 3.0), (100, 0.1), (100, 0.01), (100, 0.001)], 1, "accuracy", True),
        # A lower loss, but more wrong answers.
        ([(0, 3.0), (80, 1.0), (60, 0.5), (60, 0.4)], 1, "accuracy", True),
        ([(50, 1.0), (50, 1.0), (49, 1.0)], 0, "loss", True),
        ([(50, 1.0)], 0, "loss", False),
    ],
)
def test_learning_stops_where_nothing_later_is_better_beyond_noise(
    scores: list[tuple[int, float]], epoch: int, by: str, *, has_stopped: bool
) -> None:
    """Accuracy decides, or the loss where accuracy stays; patience is two epochs."""
    (curve,) = curves(epochs(scores))
    stop = best(curve)
    assert (stop.epoch, stop.by, stop.has_stopped) == (epoch, by, has_stopped)


def test_one_right_answer_more_is_noise_and_three_more_are_not() -> None:
    """Gains are compared example by example; equal numbers of gains and losses cancel."""
    before = scores_of(50, 1.0)
    assert not gain(before, scores_of(51, 1.0), "accuracy").is_beyond_noise
    three = gain(before, scores_of(53, 1.0), "accuracy")
    assert three.is_beyond_noise
    assert three.mean == pytest.approx(0.03)
    swapped = before.model_copy(update={"correct": before.correct[::-1]})
    assert gain(before, swapped, "accuracy").mean == 0
    assert not gain(before, swapped, "accuracy").is_beyond_noise


def test_the_standard_error_of_a_loss_agrees_with_resampling() -> None:
    """Answers have different lengths, and both tests use the same examples."""
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
    assert standard_error(before, "loss") == pytest.approx(standard_deviation(means), rel=0.1)
    assert gain(before, after, "loss").error == pytest.approx(standard_deviation(gains), rel=0.1)


def standard_deviation(values: Sequence[float]) -> float:
    """Standard deviation of values."""
    mean = sum(values) / len(values)
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5)


def test_a_curve_is_its_longest_attempt_without_a_gap() -> None:
    """A later attempt that is still shorter is not mixed with the longest one."""
    first = epochs([(0, 3.0), (50, 1.0), (60, 0.9)])
    second = epochs([(0, 3.0), (40, 1.1)], attempt=2)
    (curve,) = curves([*first, *second])
    assert curve.epochs == tuple(first)
    third = epochs([(0, 3.0), (50, 1.0), (61, 0.9)], attempt=3)
    (curve,) = curves([*first, *second, *third])
    assert curve.epochs == tuple(third)
    (curve,) = curves([first[0], first[2]])
    assert len(curve.epochs) == 1


FASTER = [(0, 3.0), (50, 1.0), (90, 0.5), (90, 0.5), (90, 0.5)]
SLOWER = [(0, 3.0), (30, 2.0), (50, 1.0), (70, 0.8), (91, 0.5), (91, 0.5), (91, 0.5)]


def test_sparse_and_dense_are_compared_at_their_best_epochs() -> None:
    """The difference is significant where its interval excludes zero."""
    alike = curves([*epochs(FASTER), *epochs(SLOWER, DENSE)])
    (pair,) = sparse_against_dense(alike)
    assert not pair.is_significant
    (row,) = json.loads(learning_json(alike))["sparse_against_dense"]
    assert (row["sparse_experts"], row["dense_experts"], row["significant"]) == (2, 8, False)
    assert row["accuracy_gain"] == pytest.approx(-0.01)
    assert pair.accuracy.interval == (row["accuracy_gain_low"], row["accuracy_gain_high"])
    assert pair.accuracy.interval[0] < -0.01 < 0 < pair.accuracy.interval[1]
    assert "do not differ significantly" in learning_section(alike)
    worse = curves([*epochs([(0, 3.0), (20, 1), (20, 1), (20, 1)]), *epochs(SLOWER, DENSE)])
    (pair,) = sparse_against_dense(worse)
    assert pair.is_significant
    assert "worse than dense: -71.0" in learning_section(worse)
    # Curves of another learning rate or other data are not comparable.
    other = epochs(SLOWER, DENSE, learning_rate=2e-3)
    assert sparse_against_dense(curves([*epochs(FASTER), *other])) == []
    assert sparse_against_dense(curves([*epochs(FASTER), *epochs(SLOWER, DENSE, data="b")])) == []


def test_rows_have_every_epoch_and_the_best_one() -> None:
    """JSON and the report list each epoch and mark the best one."""
    learned = curves(epochs(FASTER))
    for_programs = json.loads(learning_json(learned))
    rows = for_programs["curves"]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["epoch"] for row in rows if row["is_best"]] == [2]
    assert rows[0]["train_loss"] is None
    assert rows[2]["accuracy"] == 0.9
    assert rows[2]["accuracy_error"] == pytest.approx(0.03, rel=0.05)
    assert rows[0]["accuracy_error"] > 0  # no right answer in a hundred is no certainty
    (stop,) = for_programs["stops"]
    assert (stop["epoch"], stop["epochs"], stop["has_stopped"]) == (2, 4, True)
    text = learning_section(learned)
    assert re.search(r"\| 2 +\| 0\.5 +\|", text)
    assert "90.0 ± 3.0 % *" in text
    assert "improving at epoch 2" in text
    assert learning_section([]) == ""
    unsure = learning_section(curves(epochs(FASTER[:3])))
    assert "epoch is 2 (by accuracy)" in unsure


def test_a_job_is_priced_at_the_epochs_that_each_cell_took_to_learn() -> None:
    """Sparse and dense cells have their own epochs; a cell without a curve is excluded."""
    spec = spec_of(ROUTED.replace("[2]", "[2, 8, 4]"))
    sparse, dense, unknown = cells = spec.all_cells()
    observations = [o for cell in cells for o in whole_trial(cell, spec)]
    plan = Plan(complete=tuple(cells), pending=(), skipped=())
    measured_curves = curves([*epochs(FASTER), *epochs(SLOWER, DENSE)])
    epochs_by_cell = learned_epochs(cells, measured_curves, "run")
    catalog, step_times = spec.merged_catalog(), StepTimeSource(observations, ())
    ranking = rank(RankingInputs(spec.workload, catalog, plan, step_times, epochs=epochs_by_cell))
    cheapest = {row.cell: row for row in ranking.offers if row.rank == 1}
    assert (cheapest[sparse].epochs, cheapest[dense].epochs) == (2, 4)
    two_epochs = spec.workload.model_copy(update={"epochs": 2})
    again = rank(RankingInputs(two_epochs, catalog, plan, step_times))
    assert cheapest[sparse].hours == next(r.hours for r in again.offers if r.cell == sparse)
    (excluded,) = ranking.excluded
    assert excluded.cell == unknown
    assert "mixtral-tiny, full" in excluded.reason
    assert "4 of 8" in excluded.reason
    text = headline(ranking)
    assert "2 to 4 epochs, as learned (see below)" in text
    assert "fp32-grouped: 4 epochs" in text
    last = {line.split(",")[5]: line.split(",")[-1] for line in ranking_csv(ranking).splitlines()}
    assert (last["2"], last["8"]) == ("2", "4")


def test_epochs_come_from_a_curve_of_the_same_method_pretrained_and_latest_first() -> None:
    """Another GPU or kernel does not change learning; another method does."""
    elsewhere = SPARSE.model_copy(
        update={
            "gpu": "A40",
            "seq_len": 512,
            "recipe": SPARSE.recipe.model_copy(
                update={"gradient_checkpointing": True, "attention": "eager", "experts": "looped"}
            ),
        }
    )
    measured_curves = curves([*epochs(SLOWER), *epochs(FASTER, data="later")])
    choice = learned_epochs([elsewhere], measured_curves, "run")[elsewhere]
    assert isinstance(choice, LearnedEpochs)
    assert (choice.epochs, choice.data) == (2, "later")
    pretrained = SPARSE.model_copy(update={"weights": "pretrained"})
    measured_curves = curves([*epochs(SLOWER, pretrained), *epochs(FASTER)])
    choice = learned_epochs([elsewhere], measured_curves, "run")[elsewhere]
    assert isinstance(choice, LearnedEpochs)
    assert (choice.epochs, choice.weights) == (4, "pretrained")
    lora = tiny_cell("mixtral-tiny", recipe("lora"), active=2)
    with pytest.raises(EpochsError, match="nothing was learned by mixtral-tiny, lora, sparse"):
        learned_epochs([lora], measured_curves, "run")


@pytest.mark.parametrize(
    ("measured_curves", "said"),
    [
        # Whatever was given, a file or a bucket too: 'learn' writes to a local folder alone.
        (
            [],
            "run 'learn DATA --model NAME --out DIR', then give --learned DIR, or give a number",
        ),
        (
            curves(epochs(FASTER[:3])),
            "2 of 8, on data.jsonl: may be improving still at epoch 2: continue with --epochs 4",
        ),
        (
            curves(epochs([(50, 1.0)] * 4)),
            "on data.jsonl: none of 3 epochs was better than the untrained model: give a number",
        ),
    ],
)
def test_unknown_epochs_are_an_error_of_one_line(
    measured_curves: list[LearningCurve], said: str
) -> None:
    """The error gives a remedy."""
    with pytest.raises(EpochsError) as error:
        learned_epochs([SPARSE], measured_curves, "run")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
