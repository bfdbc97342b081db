"""Observations from tables: columns, units, excluded rows, and all mistakes at once."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from builders.messages import assert_lines

from fitting.families.records import FamilyName
from fitting.paper.published import DATA, dataset_lengths, throughput_points
from fitting.points.batch_lengths import Lengths
from fitting.tables.csv_rows import (
    LEFT_CAPPED,
    LEFT_INVALID,
    LEFT_SEVERAL_GPUS,
    LEFT_UNTIMED,
    UNKNOWN_RECIPE,
    gpu_key,
)
from fitting.tables.csv_table import CsvFile, UnusedRows, read_csv
from fitting.tables.observations_table import read_frame, read_lengths
from fitting.tables.table_error import TableError
from trials.records.observation import Basis

PLAIN = {
    "gpu": ["A40", "A40"],
    "model": "m",
    "sparsity": 0.25,
    "seq_len": 128,
    "batch_size": [2, 8],
    "examples_per_second": [4.0, 8.0],
}


def plain(**changed: object) -> pd.DataFrame:
    """Two valid rows."""
    return pd.DataFrame(PLAIN | changed)


def mistakes(frame: pd.DataFrame, **others: object) -> str:
    """Error of a frame with mistakes."""
    with pytest.raises(TableError) as error:
        read_frame(frame, **others)  # type: ignore[arg-type]
    return str(error.value)


def test_step_time_and_tokens_follow_from_batch_rate_and_length() -> None:
    """The step time is batch size over rate; its tokens are batch size times length."""
    read = read_frame(plain())
    assert read.rows.seconds.tolist() == [0.5, 1.0]
    assert read.rows.tokens.tolist() == [256.0, 1024.0]
    assert read.rows.sparsity.tolist() == [0.25, 0.25]
    assert set(read.rows.series) == {"A40/seq128"}
    (family,) = read.by_family()
    assert family == FamilyName(
        model="m", weights=None, recipe=UNKNOWN_RECIPE, basis=Basis.MEASURED, software=None
    )
    assert read.left_out == ()
    assert read.remarks == ()


@pytest.mark.parametrize("rate", ["Examples/s", "queries_per_second", "Queries / s"])
def test_columns_are_recognised_by_obvious_names(rate: str) -> None:
    """The paper's word for an example, query, is recognised, too."""
    names = ["GPU", "Model name", "Sparsity", "Sequence length", "Batch size", rate]
    frame = plain().set_axis(names, axis=1)
    assert read_frame(frame).rows.seconds.tolist() == [0.5, 1.0]


def test_sparsity_may_be_left_out_with_a_remark() -> None:
    """A blank value means a model without experts."""
    read = read_frame(plain().drop(columns="sparsity"))
    assert read.rows.sparsity.tolist() == [1.0, 1.0]
    assert "no column sparsity" in read.remarks[0]
    assert read_frame(plain(sparsity=[None, 0.5])).rows.sparsity.tolist() == [1.0, 0.5]


def test_padded_tokens_override_the_length() -> None:
    """A row without padded tokens uses its length."""
    read = read_frame(plain(padded_tokens=[160, None]))
    assert read.rows.tokens.tolist() == [320.0, 1024.0]


def test_a_batch_of_a_data_set_is_padded_by_its_lengths() -> None:
    """The length is that of the expected longest example, rounded up to a multiple of 8."""
    lengths = {"d": Lengths(tokens=np.array([16.0, 64.0]), examples=np.array([3.0, 1.0]))}
    read = read_frame(plain(dataset="d").drop(columns="seq_len"), lengths=lengths)
    longest = [16 * 0.75**size + 64 * (1 - 0.75**size) for size in (2, 8)]
    assert read.rows.tokens.tolist() == pytest.approx([2 * longest[0], 8 * longest[1]])
    assert set(read.rows.series) == {"A40/d"}


def test_the_papers_own_points_are_read_exactly() -> None:
    """With their lengths, they equal the points of the reproduction bit for bit."""
    path, lengths = DATA / "throughput.csv", read_lengths(DATA / "lengths.csv")
    frame, _ = read_csv(path)
    read = read_frame(frame, lengths=lengths)
    expected = throughput_points().rows
    for name in ("batch_size", "tokens", "sparsity", "seconds"):
        assert getattr(read.rows, name).tolist() == getattr(expected, name).tolist()
    assert [family.model for family in read.by_family()] == ["blackmamba-2.8b", "mixtral-8x7b"]
    assert [len(rows) for rows in read.by_family().values()] == [39, 57]
    own = dataset_lengths()
    assert all((lengths[name].examples == own[name].examples).all() for name in own)


def test_missing_lengths_are_one_mistake_that_names_the_ways_to_give_them() -> None:
    """A mistyped data set is a mistake of its row."""
    frame, _ = read_csv(DATA / "throughput.csv")
    text = mistakes(frame, file=CsvFile("throughput.csv"))
    assert_lines(text, ("throughput.csv:1: ", "seq_len", "padded_tokens", "--lengths"))
    frame = plain(dataset=["maths", "math"]).drop(columns="seq_len")
    lengths = {"math": Lengths(tokens=np.ones(1), examples=np.ones(1))}
    assert_lines(mistakes(frame, lengths=lengths), ("row 0: dataset: ", "'maths'", "'math'"))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA-A100-80GB-PCIe", "A100-80GB-PCIe"),
        ("NVIDIA-H100-PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("h100-sxm", "H100-SXM"),
        ("L40S", "L40S"),
        ("A100-80GB", "A100-80GB"),
        ("Tesla-V100-PCIE-16GB", "Tesla-V100-PCIE-16GB"),
        ("A100/40GB @ 300 W", "A100-40GB - 300 W"),
    ],
)
def test_gpus_are_recognised_by_key_or_device_name(name: str, key: str) -> None:
    """Punctuation does not matter; a name that the catalog lacks, or has twice, is kept."""
    assert gpu_key(name) == key


def test_recipe_software_and_basis_distinguish_families() -> None:
    """Without a recipe, the method takes its place; weights distinguish families, too."""
    frame = pd.DataFrame(
        {
            **PLAIN,
            "gpu": ["A40"] * 4,
            "batch_size": [1, 2, 3, 4],
            "examples_per_second": 1.0,
            "method": ["lora", "lora", "full", "lora"],
            "stack": ["a", "b", "a", "a"],
            "basis": ["measured", "measured", "measured", "simulated"],
        }
    )
    assert [family.key for family in read_frame(frame).by_family()] == [
        "m/full/measured/a",
        "m/lora/measured/a",
        "m/lora/measured/b",
        "m/lora/simulated/a",
    ]
    frame = plain(weights=["random", "pretrained"], recipe="r", stack="a")
    assert [family.key for family in read_frame(frame).by_family()] == [
        "m+pretrained/r/measured/a",
        "m/r/measured/a",
    ]


def test_a_stack_beside_the_software_distinguishes_gpus() -> None:
    """The rows are one family, with one GPU per stack."""
    read = read_frame(plain(software="s", stack=["one", "two"]))
    assert [family.software for family in read.by_family()] == ["s"]
    assert read.rows.gpu.tolist() == ["A40@one", "A40@two"]
    assert read.rows.series.tolist() == ["A40@one/seq128", "A40@two/seq128"]


def test_rows_without_the_speed_of_one_gpu_are_excluded_and_counted() -> None:
    """These are runs on several GPUs, failed runs, capped runs, and runs without a rate."""
    frame = pd.DataFrame(
        {
            "gpu": "A40",
            "model": "m",
            "seq_len": 8,
            "batch_size": [1, 2, 4, 8, 16],
            "examples_per_second": [1.0, "?", None, 3.0, None],
            "number_gpus": [1, 2, 1, 1, 1],
            "is_valid": [1, 1, 0, 1, 1],
            "basis": ["measured", "measured", "measured", "capped", "measured"],
        }
    )
    read = read_frame(frame)
    assert read.rows.batch_size.tolist() == [1.0]
    assert list(read.index) == [0]
    reasons = (LEFT_SEVERAL_GPUS, LEFT_INVALID, LEFT_CAPPED, LEFT_UNTIMED)
    assert read.left_out == tuple(UnusedRows(reason, 1) for reason in reasons)


def test_every_mistake_is_reported_at_once() -> None:
    """Each line has the row, the column as the table names it, and the value."""
    frame = pd.DataFrame(
        {
            "GPU": ["A40", "", None],
            "model": ["m", "m", None],
            "sparsity": [0.25, 1.5, "x"],
            "Sequence length": ["512", "x", None],
            "Batch": [1.5, True, None],
            "Examples / s": [1, -2, "inf"],
            "is_valid": [1, "perhaps", True],
            "basis": ["measured", "simulatd", None],
        },
        index=[2, 3, 4],
    )
    assert_lines(
        mistakes(frame, file=CsvFile("a.csv")),
        ("a.csv:2: Batch: ", "whole", "1.5"),
        ("a.csv:3: GPU: ", "empty"),
        ("a.csv:3: sparsity: ", "1.5"),
        ("a.csv:3: Sequence length: ", "'x'"),
        ("a.csv:3: Batch: ", "True"),
        ("a.csv:3: Examples / s: ", "-2"),
        ("a.csv:3: is_valid: ", "'perhaps'"),
        ("a.csv:3: basis: ", "'simulatd'", "'simulated'"),
        ("a.csv:4: GPU: ", "empty"),
        ("a.csv:4: model: ", "empty"),
        ("a.csv:4: sparsity: ", "'x'"),
        ("a.csv:4: Sequence length: ", "empty", "tokens per example"),
        ("a.csv:4: Batch: ", "empty"),
        ("a.csv:4: Examples / s: ", "'inf'"),
    )


def test_missing_columns_are_reported_with_their_meaning() -> None:
    """A mistyped column is suggested in place of the missing one."""
    frame = plain().rename(columns={"examples_per_second": "exampls_pr_second"})
    assert_lines(
        mistakes(frame.drop(columns=["gpu", "model"])),
        ("no column gpu", "catalog gpus"),
        ("no column model",),
        ("no column examples_per_second", "'exampls_pr_second'"),
    )


def test_unused_columns_are_named() -> None:
    """A misspelt column gets a suggestion."""
    read = read_frame(plain(sparcity=1, figure=14))
    (remark,) = read.remarks
    assert "'sparcity'" in remark
    assert "'sparsity'" in remark
    assert "'figure'" in remark


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"gpu": ["A4O", "L4"]}, ["GPU 'A4O' has 1 row: did you mean 'A40'?"]),
        ({"gpu": "Tesla V10O-SXM2-16GB"}, ["GPU 'Tesla V10O-SXM2-16GB' has 2 rows: did you mean"]),
        ({"gpu": ["P40", "my A40"]}, []),
        ({"gpu": ["A100-80GB", "H100-80GB"]}, []),
        ({"model": ["mixtrl-8x7b", "mixtral-8x22b"]}, ["model 'mixtrl-8x7b' has 1 row: did you "]),
        ({"model": ["granite-3b", "granite-8b"]}, []),
        ({"model": ["mine", "Mine"]}, ["model 'Mine' has 1 row: did you mean 'mine'?"]),
        ({"model": "Mixtral-8x7B"}, []),
    ],
)
def test_names_that_may_be_mistyped_are_remarked(
    names: dict[str, object], expected: list[str]
) -> None:
    """A name with another number is another product, not a mistyped one."""
    remarks = read_frame(plain(**names), file=CsvFile("a.csv")).remarks
    assert len(remarks) == len(expected), remarks
    for remark, begin in zip(remarks, expected, strict=True):
        assert remark.startswith(f"a.csv: {begin}")


def test_lengths_are_read_and_all_their_mistakes_reported(tmp_path: Path) -> None:
    """Rows of the same length are added up."""
    path = tmp_path / "lengths.csv"
    path.write_text("dataset,tokens,examples\nd,8,1\nd,4,2\nd,8,3\n")
    lengths = read_lengths(path)["d"]
    assert (lengths.tokens.tolist(), lengths.examples.tolist()) == ([4.0, 8.0], [2.0, 4.0])
    path.write_text("dataset,tokens\n,8\nd,0\n")
    with pytest.raises(TableError) as error:
        read_lengths(path)
    assert_lines(
        str(error.value),
        (f"{path}:1: ", "examples"),
        (f"{path}:2: dataset: ", "empty"),
        (f"{path}:3: tokens: ", "'0'"),
    )
