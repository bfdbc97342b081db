"""Laws of tables from Python: frames in, frames out."""

import numpy as np
import pandas as pd
import pytest

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
    frame["queries_per_second"] = frame["batch_size"] / seconds
    return frame.assign(model="m", **changed)


@pytest.fixture(scope="module")
def fits() -> FrameFits:
    """Of the made table, one of whose points is wrong by half."""
    frame = made()
    frame.loc[5, "queries_per_second"] *= 1.5
    return fit_frame(frame.rename(index=lambda row: f"r{row}"))


def asked(**changed: object) -> pd.DataFrame:
    """One question that has an answer."""
    row = {"gpu": "A40", "model": "m", "seq_len": 128, "sparsity": 0.25, "batch_size": 4}
    return pd.DataFrame([row | changed])


def mistakes(fits: FrameFits, frame: pd.DataFrame) -> str:
    """What is said of questions that cannot be asked."""
    with pytest.raises(TableError) as told:
        predict_frame(fits.families, frame)
    return str(told.value)


def test_coefficients_come_out_with_units_and_errors(fits: FrameFits) -> None:
    """A row for each parameter of each GPU, and for the exponent that they share."""
    told = fits.coefficients
    assert set(told["form"]) == {Form.POOLED}
    values = told.set_index(["group", "parameter"])
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


def test_candidates_tell_what_each_law_makes_of_points_it_has_not_seen(fits: FrameFits) -> None:
    """The chosen one is marked."""
    told = fits.candidates.set_index("form")
    assert set(told.index) == set(Form)
    assert told.index[told["chosen"]].tolist() == [Form.POOLED]
    assert told.loc[Form.POOLED, "error"] < told.loc[Form.LOGARITHM, "error"]


def test_suspects_are_named_by_the_tables_own_rows(fits: FrameFits) -> None:
    """The point that is wrong."""
    assert fits.suspects["rows"].tolist() == ["r5"]
    assert fits.suspects["seconds"][0] < fits.suspects["expected_seconds"][0]


def test_laws_are_a_row_each(fits: FrameFits) -> None:
    """With what they were chosen for, and how sure they are."""
    (law,) = fits.laws.to_dict("records")
    assert (law["model"], law["points"], law["visits"]) == ("m", 64, 64)
    assert law["level"] == 0.9
    assert law["half_width"] > 0


def test_answers_stand_beside_the_questions(fits: FrameFits) -> None:
    """In their order and under their labels; a second time over, anew."""
    frame = pd.concat([asked(), asked(gpu="l4", batch_size=64), asked(gpu="T4")])
    frame.index = pd.Index(["a", "b", "c"])
    told = predict_frame(fits.families, frame)
    assert told.columns.tolist() == [*frame.columns, *PREDICTED]
    assert told.index.tolist() == ["a", "b", "c"]
    seconds = (1 + (4 * 128 * 0.25**0.6 * 0.001) ** 1.1) ** (1 / 1.1)
    row = told.loc["a"]
    assert row["predicted_step_seconds"] == pytest.approx(seconds, rel=0.01)
    assert row["predicted_queries_per_second"] == pytest.approx(4 / seconds, rel=0.01)
    assert row["predicted_step_seconds_low"] < seconds < row["predicted_step_seconds_high"]
    assert told["extrapolated"].tolist()[:2] == [False, True]
    assert told.loc["c", "note"] == "no observation of T4, but of A40, L4"
    assert np.isnan(told.loc["c", "predicted_step_seconds"])
    again = predict_frame(fits.families, told)
    pd.testing.assert_frame_equal(again, told)


def test_observations_may_be_asked_about(fits: FrameFits) -> None:
    """Their throughput is not looked at; runs on several GPUs have no law."""
    frame = made().assign(queries_per_second="?", number_gpus=[2] + [1] * 63)
    told = predict_frame(fits.families, frame)
    assert told["predicted_step_seconds"].isna().tolist() == [True] + [False] * 63
    assert told["note"][0] == "several GPUs: laws are of one"


def test_a_data_set_is_asked_about_by_its_lengths(fits: FrameFits) -> None:
    """Another length than was seen, and so extrapolated."""
    lengths = {"d": Lengths(tokens=np.array([256.0]), examples=np.array([1.0]))}
    frame = asked(dataset="d").drop(columns="seq_len")
    told = predict_frame(fits.families, frame, lengths=lengths).iloc[0]
    seconds = (1 + (4 * 256 * 0.25**0.6 * 0.001) ** 1.1) ** (1 / 1.1)
    assert told["predicted_step_seconds"] == pytest.approx(seconds, rel=0.01)
    assert told["extrapolated"]


def test_a_question_names_no_more_than_tells_families_apart() -> None:
    """What it leaves open is asked for; what nobody fitted is told with what was."""
    frame = pd.concat(
        [made(recipe="lora"), made(recipe="full"), made(recipe="full", basis="simulated")]
    )
    fits = fit_frame(frame)
    assert len(fits.families) == 3
    assert mistakes(fits, asked()) == (
        "row 0: model: 3 laws are of 'm': say also recipe ('full' or 'lora'), "
        "basis ('measured' or 'simulated')"
    )
    assert mistakes(fits, asked(method="full")).endswith(
        "2 laws are of 'm': say also basis ('measured' or 'simulated')"
    )
    frame = pd.concat([asked(recipe="lora"), asked(recipe="qlora"), asked(model="mm")])
    told = predict_frame(fits.families, frame)
    assert told["predicted_step_seconds"].notna().tolist() == [True, False, False]
    assert told["note"].tolist()[1:] == [
        "nothing of m was fitted with 'qlora', but with 'full' or 'lora'",
        "nothing was fitted to 'mm': did you mean 'm'?",
    ]


def test_a_gpu_seen_under_one_stack_need_not_be_told_with_it() -> None:
    """Under two it must."""
    one = fit_frame(made(software="s", stack="one"))
    assert predict_frame(one.families, asked())["extrapolated"].tolist() == [False]
    two = fit_frame(pd.concat([made(software="s", stack=stack) for stack in ("one", "two")]))
    assert mistakes(two, asked()) == ("row 0: gpu: was seen with stack 'one' or 'two': say which")
    told = predict_frame(two.families, asked(software="s", stack="two"))
    assert told["extrapolated"].tolist() == [False]


def test_a_family_without_a_law_says_what_to_measure() -> None:
    """In its row and in the note of every question to it."""
    fits = fit_frame(made().iloc[:2])
    (law,) = fits.laws.to_dict("records")
    assert law["form"] is None
    assert "measure at least" in law["remedy"]
    assert fits.coefficients.empty
    assert "measure at least" in predict_frame(fits.families, asked())["note"][0]
