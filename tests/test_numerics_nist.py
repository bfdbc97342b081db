"""Nonlinear least squares against NIST's certified answers: 27 problems, two starts each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import Solution, Status, solve_nonlinear

FOLDER = Path(__file__).parent / "data" / "nist"
VALUE_DIGITS, ERROR_DIGITS = 6, 4
# Lanczos1's residuals are 350 times what a double is rounded by: without longer ones, 3 digits.
Long = NDArray[np.longdouble]
HAS_LONG = np.finfo(np.longdouble).eps < 1e-18
Model = Callable[[Long, Long], Long]


def _saturating(b: Long, x: Long) -> Long:
    return np.asarray(b[0] * (1 - np.exp(-b[1] * x)))


def _decay_over_line(b: Long, x: Long) -> Long:
    return np.asarray(np.exp(-b[0] * x) / (b[1] + b[2] * x))


def _three_decays(b: Long, x: Long) -> Long:
    return np.asarray(
        b[0] * np.exp(-b[1] * x) + b[2] * np.exp(-b[3] * x) + b[4] * np.exp(-b[5] * x)
    )


def _decay_and_two_peaks(b: Long, x: Long) -> Long:
    peaks = b[2] * np.exp(-(((x - b[3]) / b[4]) ** 2)) + b[5] * np.exp(-(((x - b[6]) / b[7]) ** 2))
    return np.asarray(b[0] * np.exp(-b[1] * x) + peaks)


def _cubic_over_cubic(b: Long, x: Long) -> Long:
    above = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return np.asarray(above / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3))


def _three_cycles(b: Long, x: Long) -> Long:
    total = np.full_like(x, b[0])
    for cosine, sine, period in ((b[1], b[2], 12), (b[4], b[5], b[3]), (b[7], b[8], b[6])):
        angle = 2 * np.pi * x / period
        total += cosine * np.cos(angle) + sine * np.sin(angle)
    return total


MODELS: dict[str, Model] = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": _saturating,
    "Chwirut1": _decay_over_line,
    "Chwirut2": _decay_over_line,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": _three_cycles,
    "Eckerle4": lambda b, x: b[0] / b[1] * np.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": _decay_and_two_peaks,
    "Gauss2": _decay_and_two_peaks,
    "Gauss3": _decay_and_two_peaks,
    "Hahn1": _cubic_over_cubic,
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": _three_decays,
    "Lanczos2": _three_decays,
    "Lanczos3": _three_decays,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * np.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * np.exp(-x * b[3]) + b[2] * np.exp(-x * b[4]),
    "Misra1a": _saturating,
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x: b[0] - b[1] * x[0] * np.exp(-b[2] * x[1]),
    "Rat42": lambda b, x: b[0] / (1 + np.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + np.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - np.arctan(b[2] / (x - b[3])) / np.pi,
    "Thurber": _cubic_over_cubic,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem file of NIST.

    Attributes:
        starts: (2, parameters).
        values: (parameters,) certified.
        standard_errors: (parameters,) certified.
        residual_deviation: certified.
        data: (columns, points): y, then what it depends on.
    """

    starts: FloatArray
    values: FloatArray
    standard_errors: FloatArray
    residual_deviation: float
    data: Long

    @classmethod
    def read(cls, name: str) -> "Problem":
        """Read a file by the line numbers in its header, as in ``Data  (lines 61 to 74)``."""
        lines = (FOLDER / f"{name}.dat").read_text(encoding="ascii").splitlines()

        def section(what: str) -> list[str]:
            (head,) = (line for line in lines[:10] if line.strip().startswith(f"{what} "))
            first, last = head.partition("(lines")[2].rstrip(" )").split("to")
            return lines[int(first) - 1 : int(last)]

        table = np.array([line.split("=")[1].split() for line in section("Starting Values")], float)
        (deviation,) = (
            float(line.split(":")[1])
            for line in section("Certified Values")
            if line.startswith("Residual Standard Deviation:")
        )
        data = np.array([line.split() for line in section("Data")], np.longdouble)
        return cls(table[:, :2].T, table[:, 2], table[:, 3], deviation, data.T)

    def solved(self, model: Model, start: int) -> Solution:
        """Solution without bounds."""
        free = np.full(len(self.values), np.inf)
        y, x = self.data[0], self.data[1] if len(self.data) == 2 else self.data[1:]

        def residuals(values: FloatArray) -> FloatArray:
            return np.asarray(model(values.astype(np.longdouble), x) - y, float)

        return solve_nonlinear(residuals, self.starts[start], lower=-free, upper=free)


def _read(name: str) -> Problem:
    problem = Problem.read(name)
    if name == "Nelson":  # its model is of log[y]
        problem.data[0] = np.log(problem.data[0])
    return problem


def _digits(values: FloatArray, certified: FloatArray) -> float:
    """Number of correct significant digits of the worst value."""
    return float(-np.log10(np.max(np.abs(values - certified) / np.abs(certified))))


def test_every_problem_is_there() -> None:
    """All 27 files are present and read completely."""
    assert len(MODELS) == 27
    assert {path.stem for path in FOLDER.glob("*.dat")} == set(MODELS)
    for name in MODELS:
        text = (FOLDER / f"{name}.dat").read_text(encoding="ascii")
        problem = Problem.read(name)
        assert f"{problem.data.shape[1]} Observations" in text
        assert f"{len(problem.values)} Parameters" in text


@pytest.mark.parametrize("start", [0, 1], ids=["start 1", "start 2"])
@pytest.mark.parametrize("name", MODELS)
def test_nonlinear_solution_has_the_certified_digits(name: str, start: int) -> None:
    """All 54 runs: values to six digits, standard errors and residual deviation to four."""
    problem = _read(name)
    solution = problem.solved(MODELS[name], start)
    assert solution.status is Status.OK
    errors = np.array(solution.standard_errors, float)
    assert _digits(solution.values, problem.values) >= VALUE_DIGITS
    digits = ERROR_DIGITS if HAS_LONG or name != "Lanczos1" else 3
    assert _digits(errors, problem.standard_errors) >= digits
    assert solution.rmse is not None
    deviation = solution.rmse * np.sqrt(solution.points / solution.degrees_of_freedom)
    assert deviation == pytest.approx(problem.residual_deviation, rel=10.0**-digits)
