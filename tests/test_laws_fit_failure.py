"""Reasons of fit failures: counts, and a remedy for each cause."""

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fitting.laws.fit_failure import (
    FitFailure,
    family_fit_failure,
    ladder_fit_failure,
    largest_batch_fit_failure,
    peak_fit_failure,
)
from fitting.numerics.least_squares import Status


def solution(status: Status, parameters: int = 2) -> Any:
    """Solution of a fit with this status and number of parameters."""
    return SimpleNamespace(status=status, parameter_count=parameters, rank=1)


def numbers(text: str) -> list[str]:
    """Whole numbers that stand alone, in order."""
    return re.findall(r"\b\d+\b", text)


def test_a_ladder_with_too_few_points_counts_them_and_its_batch_sizes() -> None:
    """The reason counts points and batch sizes: three parameters need four points."""
    points = cast("Any", SimpleNamespace(batch_size=np.array([1.0, 1.0, 4.0])))
    failure = ladder_fit_failure(points, solution(Status.TOO_FEW_POINTS, 3))
    assert numbers(failure.reason) == ["3", "2", "3"]
    assert numbers(failure.remedy) == ["4"]
    nothing = ladder_fit_failure(points, solution(Status.NO_DATA, 3))
    assert numbers(nothing.remedy) == ["4"]
    deficient = ladder_fit_failure(points, solution(Status.RANK_DEFICIENT, 3))
    assert numbers(deficient.reason) == ["1", "3"]
    assert "sparsity" in deficient.remedy


class Family(SimpleNamespace):
    """Points of a family."""

    def __len__(self) -> int:
        return len(self.batch_size)


def test_a_family_without_points_asks_for_three_and_with_few_counts_them() -> None:
    """A floor and a slope are two parameters and need three points."""
    empty = cast("Any", Family(batch_size=np.array([]), gpu=np.array([])))
    assert numbers(family_fit_failure(empty).remedy) == ["3"]
    single = cast("Any", Family(batch_size=np.array([4.0]), gpu=np.array(["a"])))
    assert numbers(family_fit_failure(single).reason) == ["1", "1", "1"]
    few = Family(batch_size=np.array([1.0, 1.0, 2.0]), gpu=np.array(["a", "b", "a"]))
    assert numbers(family_fit_failure(cast("Any", few)).reason) == ["3", "2", "2"]


def of_limits(status: Status, parameters: int, count: int = 1) -> FitFailure:
    """Failure to fit the largest batch sizes of some of seven cells."""
    points = SimpleNamespace(
        largest_batch=np.ones(count), cell_count=7, sparsity=np.array([0.25, 0.5])
    )
    return largest_batch_fit_failure(cast("Any", points), solution(status, parameters))


def test_failures_to_fit_largest_batches_have_a_remedy_by_cause() -> None:
    """No cell, too few cells, one sparsity and no minimum have different remedies."""
    assert numbers(of_limits(Status.NO_DATA, 2).reason)[0] == "7"
    few = of_limits(Status.TOO_FEW_POINTS, 2)
    assert numbers(few.reason) == ["1", "2"]
    assert re.search(r"\b1 point\b", few.reason)
    assert numbers(few.remedy) == ["3"]
    assert few.remedy.endswith("sparsities")
    alone = of_limits(Status.TOO_FEW_POINTS, 1, 2)
    assert "sparsit" not in alone.remedy
    assert "sequence lengths" in alone.remedy
    assert re.search(r"\b2 points\b", alone.reason)
    assert "0.25" in of_limits(Status.RANK_DEFICIENT, 2).reason
    assert "minimum" in of_limits(Status.NOT_CONVERGED, 2).reason


@pytest.mark.parametrize(
    ("status", "count", "words"),
    [
        (Status.NO_DATA, [], "fits"),
        (Status.TOO_FEW_POINTS, ["2", "2"], "points"),
        (Status.RANK_DEFICIENT, ["64"], "separate"),
    ],
)
def test_failures_to_fit_peak_memory_have_a_remedy_by_cause(
    status: Status, count: list[str], words: str
) -> None:
    """No probe that fits, too few probes, and equal numbers of tokens have different remedies."""
    points = cast("Any", SimpleNamespace(tokens=np.array([64.0, 64.0])))
    failure = peak_fit_failure(points, solution(status))
    assert numbers(failure.reason) == count
    assert words in failure.reason
