"""Laws fitted to frames, and their results as frames."""

import numpy as np
import pandas as pd
import pytest
from builders.messages import assert_lines

from fitting.laws.forms import Form
from fitting.points.batch_lengths import Lengths
from fitting.tables.frames import PREDICTED, FrameFits, fit_frame, predict_frame
from fitting.tables.table_error import TableError

BATCHES = np.arange(1, 9)


def made(**changed: object) -> pd.DataFrame:
    """Two GPUs, two lengths and two sparsities of one law, without noise."""
    axes = [["A40", "L4"], [128, 512], [0.25, 1.0], BATCHES.tolist()]
    columns = ["gpu", "seq_len", "sparsity", "batch_size"]
    frame = pd.MultiIndex.from_product(axes, names=columns).to_frame(index=False)
    floor = frame["gpu"].map({"A40": 1.0, "L4": 2.0})
    slope = frame["gpu"].map({"A40": 0.001, "L4": 0.004})
    work = frame["batch_size"] * frame["seq_len"] * frame["sparsity"] ** 0.6
    seconds = (floor**1.1 + (work * slope) ** 1.1) ** (1 / 1.1)
    frame["examples_per_second"] = frame["batch_size"] / seconds
    return frame.assign(model="m", **changed)


@pytest.fixture(scope="module")
def fits() -> FrameFits:
    """Laws of the made table, in which one point is wrong by half."""
    frame = made()
    frame.loc[5, "examples_per_second"] *= 1.5
    return fit_frame(frame.rename(index=lambda row: f"r{row}"))


def step(**changed: object) -> pd.DataFrame:
    """A step to predict, of a GPU and length that were fitted."""
    row = {"gpu": "A40", "model": "m", "seq_len": 128, "sparsity": 0.25, "batch_size": 4}
    return pd.DataFrame([row | changed])


def mistakes(fits: FrameFits, frame: pd.DataFrame) -> str:
    """Error of steps to predict that have mistakes."""
    with pytest.raises(TableError) as error:
        predict_frame(fits.families, frame)
    return str(error.value)


def test_coefficients_have_units_and_standard_errors(fits: FrameFits) -> None:
    """There is a row per parameter of each GPU, and one for the shared exponent."""
    assert set(fits.coefficients["form"]) == {Form.POOLED}
    values = fits.coefficients.set_index(["group", "parameter"])
    assert values["value"].to_dict() == pytest.approx(
        {
            ("all", "g"): 0.6,
            ("A40", "t0"): 1.0,
            ("A40", "k"): 0.001,
            ("L4", "t0"): 2.0,
            ("L4", "k"): 0.004,
        },
        rel=0.01,
    )
    assert values["unit"].to_dict()["L4", "k"] == "s/token"
    assert (values["standard_error"] > 0).all()


def test_candidates_have_their_errors_on_held_out_points(fits: FrameFits) -> None:
    """The chosen candidate is marked."""
    candidates = fits.candidates.set_index("form")
    assert set(candidates.index) == set(Form)
    assert candidates.index[candidates["chosen"]].tolist() == [Form.POOLED]
    assert candidates.loc[Form.POOLED, "error"] < candidates.loc[Form.LOGARITHM, "error"]


def test_suspects_are_named_by_the_tables_own_rows(fits: FrameFits) -> None:
    """The wrong point is the only suspect."""
    assert fits.suspects["rows"].tolist() == ["r5"]
    assert fits.suspects["seconds"][0] < fits.suspects["expected_seconds"][0]


def test_each_law_is_a_row(fits: FrameFits) -> None:
    """The row has the number of points and the width of the intervals."""
    (law,) = fits.laws.to_dict("records")
    assert (law["model"], law["points"], law["visits"]) == ("m", 64, 64)
    assert law["level"] == 0.9
    assert law["half_width"] > 0


def test_predictions_are_added_to_the_frame(fits: FrameFits) -> None:
    """Rows keep their order and labels; earlier predictions in the frame are replaced."""
    frame = pd.concat([step(), step(gpu="l4", batch_size=64), step(gpu="T4")])
    frame.index = pd.Index(["a", "b", "c"])
    predicted = predict_frame(fits.families, frame)
    assert predicted.columns.tolist() == [*frame.columns, *PREDICTED]
    assert predicted.index.tolist() == ["a", "b", "c"]
    seconds = (1 + (4 * 128 * 0.25**0.6 * 0.001) ** 1.1) ** (1 / 1.1)
    row = predicted.loc["a"]
    assert row["predicted_step_seconds"] == pytest.approx(seconds, rel=0.01)
    assert row["predicted_examples_per_second"] == pytest.approx(4 / seconds, rel=0.01)
    assert row["predicted_step_seconds_low"] < seconds < row["predicted_step_seconds_high"]
    assert predicted["extrapolated"].tolist()[:2] == [False, True]
    assert "T4, but of A40, L4" in str(predicted.loc["c", "note"])
    assert np.isnan(predicted.loc["c", "predicted_step_seconds"])
    again = predict_frame(fits.families, predicted)
    pd.testing.assert_frame_equal(again, predicted)


def test_observations_can_be_predicted(fits: FrameFits) -> None:
    """Their throughput is not read; runs on several GPUs have no prediction."""
    frame = made().assign(examples_per_second="?", number_gpus=[2] + [1] * 63)
    predicted = predict_frame(fits.families, frame)
    assert predicted["predicted_step_seconds"].isna().tolist() == [True] + [False] * 63
    assert "several GPUs" in predicted["note"][0]


def test_a_step_can_name_a_data_set_with_its_lengths(fits: FrameFits) -> None:
    """The length was not observed, so the prediction is extrapolated."""
    lengths = {"d": Lengths(tokens=np.array([256.0]), examples=np.array([1.0]))}
    frame = step(dataset="d").drop(columns="seq_len")
    predicted = predict_frame(fits.families, frame, lengths=lengths).iloc[0]
    seconds = (1 + (4 * 256 * 0.25**0.6 * 0.001) ** 1.1) ** (1 / 1.1)
    assert predicted["predicted_step_seconds"] == pytest.approx(seconds, rel=0.01)
    assert predicted["extrapolated"]


def test_a_step_needs_only_what_distinguishes_families() -> None:
    """An ambiguous step is a mistake; a step of a family that was not fitted gets a note."""
    frame = pd.concat(
        [made(recipe="lora"), made(recipe="full"), made(recipe="full", basis="simulated")]
    )
    fits = fit_frame(frame)
    assert len(fits.families) == 3
    basis = "basis ('measured' or 'simulated')"
    both = ("row 0: model: ", "3 laws", "recipe ('full' or 'lora')", basis)
    assert_lines(mistakes(fits, step()), both)
    assert_lines(mistakes(fits, step(method="full")), ("2 laws", f"give {basis}"))
    frame = pd.concat([step(recipe="lora"), step(recipe="qlora"), step(model="mm")])
    predicted = predict_frame(fits.families, frame)
    assert predicted["predicted_step_seconds"].notna().tolist() == [True, False, False]
    notes = "\n".join(predicted["note"].tolist()[1:])
    assert_lines(notes, ("'qlora'", "'full' or 'lora'"), ("'mm'", "'m'"))


def test_a_step_on_a_gpu_with_one_stack_needs_no_stack() -> None:
    """On a GPU that was observed with two stacks, it needs one."""
    one = fit_frame(made(software="s", stack="one"))
    assert predict_frame(one.families, step())["extrapolated"].tolist() == [False]
    two = fit_frame(pd.concat([made(software="s", stack=stack) for stack in ("one", "two")]))
    assert_lines(mistakes(two, step()), ("row 0: gpu: ", "'one' or 'two'"))
    predicted = predict_frame(two.families, step(software="s", stack="two"))
    assert predicted["extrapolated"].tolist() == [False]


def test_a_family_without_a_law_says_what_to_measure() -> None:
    """Its row says so, and so do the notes of its predictions."""
    fits = fit_frame(made().iloc[:2])
    (law,) = fits.laws.to_dict("records")
    assert law["form"] is None
    assert "measure at least" in law["remedy"]
    assert fits.coefficients.empty
    assert "measure at least" in predict_frame(fits.families, step())["note"][0]
