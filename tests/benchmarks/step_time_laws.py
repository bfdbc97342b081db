"""Laws of the step time, compared with the paper's law on its 96 points and with curve_fit.

Prints Markdown, after some minutes on two cores.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import OptimizeWarning, curve_fit

from fitting.laws.forms import Form
from fitting.laws.robust_fit import fit_form
from fitting.numerics.arrays import FloatArray
from fitting.paper.reproduction import Reproduction, reproduction
from fitting.tables.frames import FrameFits, fit_frame
from fitting.tables.observations_table import read_frame
from orchestrator.markdown_table import table

SEED = 20240804
FAMILIES, GPUS = 100, 10
LENGTHS = (64, 128, 256, 512, 1024)
SPARSITIES = (0.25, 1.0)
BATCHES = np.arange(1.0, 11.0)
NOISE = 0.01
CELLS = FAMILIES * GPUS * len(LENGTHS) * len(SPARSITIES)
ALL_LAWS_SAMPLE = 50  # cells on which a loop fits and chooses among all laws; the time is scaled

# Law of one cell, at one length and sparsity, for curve_fit: parameters a and b.
CellLaw = Callable[[FloatArray, float, float], FloatArray]


def smooth(power: float) -> CellLaw:
    """``t**p = a**p + (batch * b)**p``."""

    def law(batch: FloatArray, floor: float, slope: float) -> FloatArray:
        return np.asarray((floor**power + (batch * slope) ** power) ** (1 / power))

    return law


def logarithm(batch: FloatArray, intercept: float, slope: float) -> FloatArray:
    """Eq. 2 in step times: ``t = batch / (a + b ln batch)``."""
    return np.asarray(batch / (intercept + slope * np.log(batch)))


# Our six forms within one cell.
LAWS: tuple[CellLaw, ...] = (smooth(1.1), smooth(1.0), smooth(1.5), logarithm)


def paper_rows(reproduced: Reproduction) -> Iterator[tuple[str, str, str]]:
    """Rows of held-out predictions: the task, and the errors of the paper's law and of ours."""
    figures = reproduced.figures
    transfer, left_out = "dataset_transfer_mape_pct", "leave_one_gpu_out_mape_pct"
    growing, a40 = "extrapolation_mape_pct", "gpu_transfer_mape_pct.a40_only"

    def percent(*names: str) -> str:
        return " / ".join(f"{figures[name]:.1f}" for name in names) + " %"

    yield "one point left out", percent("loo_mape_pct.paper"), percent("loo_mape_pct.chosen")
    yield (
        "larger batches from the smaller half",
        percent(f"{growing}.paper"),
        percent(f"{growing}.chosen"),
    )
    yield (
        "the same, without the H100's",
        percent(f"{growing}.paper_without_h100"),
        percent(f"{growing}.chosen_without_h100"),
    )
    yield (
        "the other data set, Mixtral / BlackMamba",
        "not possible",
        percent(f"{transfer}.mixtral", f"{transfer}.blackmamba"),
    )
    yield (
        "GPUs never fitted, from the A40 alone, mean / worst GPU",
        "not possible",
        percent(f"{a40}_mean", f"{a40}_worst"),
    )
    yield (
        "a GPU from the three others, mean / worst GPU",
        "not possible",
        percent(f"{left_out}.mean", f"{left_out}.worst"),
    )
    yield "points within their 90 % interval", "none", percent("interval_coverage_pct")
    yield (
        "largest batches of Mixtral, exact of 12",
        f"{figures['max_batch_exact_of_12.paper']:.0f}",
        f"{figures['max_batch_exact_of_12']:.0f}",
    )


def made_table(families: int, gpus: int) -> pd.DataFrame:
    """Observations of families, each on a number of GPUs, at 5 lengths and 2 sparsities.

    Each cell has ten batch sizes, drawn from a law with noise of 1 %.
    """
    random = np.random.default_rng(SEED)
    shape = (families, gpus, len(LENGTHS), len(SPARSITIES), len(BATCHES))
    family, gpu, length, sparsity, size = (axis.ravel() for axis in np.indices(shape))
    floor = random.uniform(0.1, 3.0, (families, gpus))[family, gpu]
    slope = random.uniform(0.001, 0.01, (families, gpus))[family, gpu]
    exponent = random.uniform(0.4, 0.9, families)[family]
    batch, seq_len = BATCHES[size], np.array(LENGTHS, float)[length]
    share = np.array(SPARSITIES)[sparsity]
    seconds = smooth(1.1)(batch * seq_len * share**exponent, floor, slope)
    noisy = seconds * np.exp(random.normal(0, NOISE, len(seconds)))
    return pd.DataFrame(
        {
            "gpu": np.char.mod("gpu%d", gpu),
            "model": np.char.mod("model%d", family),
            "sparsity": share,
            "seq_len": seq_len,
            "batch_size": batch,
            "examples_per_second": batch / noisy,
        }
    )


def cells_of(frame: pd.DataFrame) -> FloatArray:
    """(cells, batches) step times of a made table, whose rows are ordered by cell."""
    seconds = (frame["batch_size"] / frame["examples_per_second"]).to_numpy()
    return np.asarray(seconds.reshape(-1, len(BATCHES)))


def fit_plainly(seconds: FloatArray) -> bool:
    """Fit one law by curve_fit with its defaults: least squares of relative errors, no bounds.

    Returns:
        Whether floor and slope are not negative and have finite errors.
    """
    start = (seconds[0], seconds[-1] / BATCHES[-1])
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)
        values, covariance = curve_fit(smooth(1.1), BATCHES, seconds, p0=start, sigma=seconds)
    return bool((values >= 0).all() and np.isfinite(covariance).all())


def fit_robustly(law: CellLaw, batch: FloatArray, seconds: FloatArray) -> FloatArray:
    """Fit one law as ours are fitted: no value below zero, and a robust loss."""
    start = (1.0, 0.1) if law is logarithm else (seconds[0], seconds[-1] / batch[-1])
    return np.asarray(
        curve_fit(
            law,
            batch,
            seconds,
            p0=start,
            sigma=0.01 * seconds,
            bounds=(1e-12, np.inf),
            loss="soft_l1",
        )[0]
    )


def fit_and_choose(seconds: FloatArray) -> CellLaw:
    """Fit all laws with and without each point; return the one with the least held-out error."""
    errors = []
    for law in LAWS:
        fit_robustly(law, BATCHES, seconds)
        off = []
        for out in range(len(BATCHES)):
            left = np.arange(len(BATCHES)) != out
            values = fit_robustly(law, BATCHES[left], seconds[left])
            off.append(abs(law(BATCHES[[out]], *values)[0] / seconds[out] - 1))
        errors.append(np.mean(off))
    return LAWS[int(np.argmin(errors))]


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that a function takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that 10,000 cells of 10 points take.

    Attributes:
        many: ours, 100 families of 100 cells each.
        one: ours, one family of all cells.
        one_form: ours, one form alone fitted to that family.
        plain: a loop of ``fit_plainly``.
        failed: cells in which that loop fails.
        robust: a loop of ``fit_robustly``.
        choosing: a loop of ``fit_and_choose``, from a sample of the cells.
        pooled: families, of 100, for which the law that made them is chosen.
    """

    many: float
    one: float
    one_form: float
    plain: float
    failed: int
    robust: float
    choosing: float
    pooled: int


def measured_speed() -> Speed:
    """Measure all ways in one run, on the same observations."""
    frame = made_table(FAMILIES, GPUS)
    cells = cells_of(frame)
    fits: list[FrameFits] = []
    many = seconds_of(lambda: fits.append(fit_frame(frame)))
    alone = made_table(1, FAMILIES * GPUS)
    rows = read_frame(alone).rows
    has_fit: list[bool] = []
    sample = cells[:: len(cells) // ALL_LAWS_SAMPLE]
    law = smooth(1.1)
    return Speed(
        many=many,
        one=seconds_of(lambda: fit_frame(alone)),
        one_form=seconds_of(lambda: fit_form(Form.POOLED, rows)),
        plain=seconds_of(lambda: has_fit.extend(fit_plainly(cell) for cell in cells)),
        failed=has_fit.count(False),
        robust=seconds_of(lambda: [fit_robustly(law, BATCHES, cell) for cell in cells]),
        choosing=seconds_of(lambda: [fit_and_choose(cell) for cell in sample])
        * (len(cells) / len(sample)),
        pooled=sum(fit.form is Form.POOLED for fit in fits[0].families),
    )


def speed_rows(speed: Speed) -> Iterator[tuple[str, str, str]]:
    """Rows of ways to fit: the way, its time, and its time relative to ours."""
    rows = (
        (f"ours: six laws, their held-out errors, intervals; {FAMILIES} families", "many"),
        ("ours, all cells one family", "one"),
        ("ours, one law alone, all cells one family", "one_form"),
        ("`curve_fit` in a loop: one law, defaults", "plain"),
        ("`curve_fit` in a loop: one law, bounds and a robust loss as ours", "robust"),
        (f"so four laws, each point left out once ({ALL_LAWS_SAMPLE} cells, scaled)", "choosing"),
    )
    for text, name in rows:
        took = getattr(speed, name)
        yield text, f"{took:.1f} s", f"{took / speed.many:.2f}"


def main() -> None:
    """Print both tables."""
    say = sys.stdout.write
    say("Mean absolute error of throughput on held-out points.\n\n")
    say(table(("predicted", "paper's law", "ours"), paper_rows(reproduction())) + "\n\n")
    speed = measured_speed()
    say(f"{CELLS:,} cells of {len(BATCHES)} points.\n\n")
    say(table(("way", "took", "over ours"), speed_rows(speed)) + "\n\n")
    say(
        f"The law that made it is chosen for {speed.pooled} of {FAMILIES} families. `curve_fit` "
        f"with its defaults fails on {speed.failed} cells: a floor below zero, or no error.\n"
    )


if __name__ == "__main__":
    main()
