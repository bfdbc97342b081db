"""Pictures of the clock's page: predicted over measured durations of kernels, by class.

    .venv/bin/python tests/benchmarks/kernel_pictures.py FOLDER [FOLDER ...]

The folders are those of ``kernel_times.py``. Writes docs/pictures/clock-*.png.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from kernel_rows import Measured, measured_gpus, measured_rows
from kernel_times import predicted_seconds
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from PIL import Image

from trials.simulation.recording import FloatArray

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
# Panels of each picture by what the names of their classes contain, the first that does.
PANELS = {
    "products": {
        "linear": "linear",
        "fewer than 256 tokens": "few-tokens",
        "narrow": "narrow",
        "thin, as adapters": "thin",
        "fp32": "fp32",
    },
    "attention": {
        "backward, H100": "backward",
        "FlashAttention-2, forward": ("on 8", "on 12", "pytorch_flash"),
        "Hopper and B200, forward": "forward",
    },
    "moving": {
        "cross entropy": "cross_entropy",
        "softmax": "softmax",
        "norms": ("norm", "/ln"),
        "rotary embedding": "rope",
        "gated activations": ("glu", "mlp_act"),
        "embedding": "embedding",
        "AdamW": "adamw",
        "4-bit weights": "dequantisation",
        "elementwise, casts": ("elementwise", "stream", "upcast"),
    },
}
COLUMNS, SIZE, DPI = 3, 2.3, 110
BOUNDS = (0.33, 3.0)  # of predicted over measured
MANY = 400  # points from which on their density is drawn
COLOURS = 48  # few, so that the files stay small
Points = tuple[list[float], list[float]]


def points_of(folders: list[Path]) -> dict[str, Points]:
    """Milliseconds measured, and predicted over measured, by class and generation of the GPU."""
    by_gpu: dict[str, list[Measured]] = defaultdict(list)
    for folder in folders:
        for row in measured_rows(folder):
            by_gpu[row.gpu].append(row)
    points: dict[str, Points] = defaultdict(lambda: ([], []))
    for key, rows in by_gpu.items():
        gpu = measured_gpus()[key]
        generation = (gpu.compute_capability or "").partition(".")[0]
        for row, predicted in zip(rows, predicted_seconds(rows, gpu), strict=True):
            measured, ratios = points[f"{row.label} on {generation}"]
            measured.append(1e3 * row.seconds)
            ratios.append(predicted / row.seconds)
    return points


def panel_of(label: str, panels: dict[str, str | tuple[str, ...]]) -> str | None:
    """Title of the first panel whose part of a name a class contains."""
    for title, parts in panels.items():
        if any(part in label for part in ([parts] if isinstance(parts, str) else parts)):
            return title
    return None


def draw(panels: dict[str, Points], file: Path) -> None:
    """One panel for each class, with the error of all its rows."""
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(SIZE * 1.25 * COLUMNS, SIZE * rows), dpi=DPI, layout="constrained")
    grid = np.ravel(figure.subplots(rows, COLUMNS, sharey=True))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, (measured, ratios)) in zip(grid, panels.items(), strict=False):
        within: FloatArray = np.clip(ratios, *BOUNDS)
        if len(ratios) < MANY:
            axes.scatter(measured, within, s=9, alpha=0.6, linewidths=0)
        else:
            scale = {"xscale": "log", "yscale": "log", "bins": "log"}
            axes.hexbin(measured, within, gridsize=36, mincnt=1, cmap="Blues", vmin=0.3, **scale)
        axes.axhline(1.0, color="black", linewidth=0.6)
        error = 100 * float(np.abs(np.array(ratios) - 1).mean())
        axes.set_title(f"{title}: {len(ratios):,}, {error:.0f} % off", fontsize=8)
        axes.set(xscale="log", yscale="log", ylim=BOUNDS, yticks=[0.5, 1, 2])
        axes.set_yticks([], minor=True)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticklabels(["0.5", "1", "2"])
        axes.tick_params(labelsize=7)
    figure.supxlabel("measured, ms", fontsize=8)
    figure.supylabel("predicted / measured", fontsize=8)
    figure.savefig(file)
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS).save(file, optimize=True)


def main() -> None:
    """Write the pictures."""
    points = points_of([Path(name) for name in sys.argv[1:]])
    for name, panels in PANELS.items():
        kind = "memory/" if name == "moving" else f"{name.removesuffix('s')}/"
        drawn: dict[str, Points] = {title: ([], []) for title in panels}
        for label, (measured, ratios) in sorted(points.items()):
            title = panel_of(label, panels) if label.startswith(kind) else None
            if title is not None:
                drawn[title][0].extend(measured)
                drawn[title][1].extend(ratios)
        file = PICTURES / f"clock-{name}.png"
        draw({title: both for title, both in drawn.items() if both[0]}, file)
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
