"""The paper's figures with this project's laws, as SVG files.

matplotlib is imported only where something is drawn.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fitting.laws.forms import Form
from fitting.laws.robust_fit import fit_form
from fitting.paper.published import EQ1_FIGURE, EQ1_TEXT
from fitting.paper.reproduction import Reproduction, projected_max_batch
from fitting.points.step_time_rows import StepTimes
from gpu_catalog.errors import UserError
from orchestrator.reporting.paper_report import PROJECTED, chosen_fit

WIDTH, HEIGHT = 4.2, 3.2  # inches of one plot
DPI = 100


class ReproduceError(UserError):
    """The figures cannot be written."""


def draw(reproduction: Reproduction, folder: Path) -> list[Path]:
    """Draw Fig. 13, 14 and 15 as SVG files and return their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points = reproduction.throughput.points
    on_a40 = points.gpu == "A40"
    return [
        _draw_memory(folder / "fig13.svg"),
        _draw_series(reproduction, np.unique(points.rows.series[on_a40]), folder / "fig14.svg"),
        _draw_series(reproduction, np.unique(points.rows.series[~on_a40]), folder / "fig15.svg"),
    ]


def _draw_memory(path: Path) -> Path:
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, for a drawing only

    figure = Figure(figsize=(WIDTH * 1.4, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    memory = np.linspace(24.0, 125.0, 50)
    for name, constants in (("drawn", EQ1_FIGURE), ("text", EQ1_TEXT)):
        curve = [projected_max_batch(m, constants) for m in memory]
        axes.plot(memory, curve, label=f"Eq. 1, constants as {name}")
    axes.plot(list(PROJECTED), [int(b) for b in PROJECTED.values()], "^", label="published")
    axes.set(xlabel="memory, GB", ylabel="largest batch", title="Sparse Mixtral, Fig. 13")
    axes.legend(fontsize="small")
    figure.savefig(path)
    return path


def _draw_series(reproduction: Reproduction, names: np.ndarray, path: Path) -> Path:
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(WIDTH * len(names), HEIGHT), dpi=DPI, layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(names)))
    rows = reproduction.throughput.points.rows
    for axes, name in zip(all_axes, names, strict=True):
        series = rows.where(rows.series == name)
        fitted = chosen_fit(reproduction, name.split("/")[0])
        papers = fit_form(Form.LOGARITHM, series)
        assert papers is not None
        for curve, colour in _curves(series):
            label = f"s = {curve.sparsity[0]:g}"
            rate = curve.batch_size / curve.seconds
            axes.plot(curve.batch_size, rate, "o", color=colour, label=label)
            for law, style in ((papers, ":"), (fitted, "-")):
                axes.plot(
                    curve.batch_size, curve.batch_size / law.seconds(curve), style, color=colour
                )
        axes.set(title=name, xlabel="batch size", ylabel="examples/s")
        axes.title.set_fontsize("small")
        axes.legend(title="- ours, : paper's", fontsize="small", title_fontsize="small")
    figure.savefig(path)
    return path


def _curves(series: StepTimes) -> Iterator[tuple[StepTimes, str]]:
    for sparsity, colour in zip(np.unique(series.sparsity), ("tab:blue", "tab:red"), strict=True):
        curve = series.where(series.sparsity == sparsity)
        yield curve.where(np.argsort(curve.batch_size)), colour
