"""Fit of the clock's rates of operators that move data (``kernel_constants.py``)."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np
from kernel_rows import FORMER_SOFTMAX, Measured, measured_gpus, operators_of

from gpu_catalog.kernel_rates import SHARED, KernelRate, memory_of, nearest_rate
from trials.simulation.clock.moving import PREFIX, MovingConstants, moving_rates, moving_seconds
from trials.simulation.recording import Column, FloatArray, IntArray
from trials.simulation.timing_model import EfficiencyConstants

START = MovingConstants(0.85, 3.0, 0.85, 1.5, 1.0, 2.0, 2.0, 1.5, 2.5, 0.3, 1.3, 25.0, 2.795)
NAMES = [field.name for field in fields(MovingConstants)]
BY_CLOCK = ("scattered", "gather", "norm", "norm_backward", "softmax")
UNITS = dict.fromkeys(BY_CLOCK, "elements per clock")
UNITS |= {"launch_us": "us", "softmax_us": "us", "picked_ns": "ns"}
# No memory moves more than this part of its peak rate. The knee stays as it is: attention's rates
# are fitted by it, too, and a free one (1.8) would make the B200's rotary embedding too fast.
LIMITS = {"reached": (0.4, 0.95), "knee": (2.79, 2.80)}
MOST_ROWS = 150  # of each class and GPU in the fit
# Weight of each class and GPU, whatever its rows: plain kernels show the bandwidth.
WEIGHTS, WEIGHT_ELSE = {"memory/elementwise": 160.0, "memory/stream": 160.0}, 40.0
# Mostly matrix products; and what the clock times by other numbers.
GATED = {"memory/block geglu", "memory/block swiglu", "memory/dequantisation"}
SOURCE = "vidur 7d47513; NeuSight 6945927; Liger-Kernel ead96b6; tests/benchmarks/kernels"
Key = tuple[str, str]
Least = Callable[
    [Callable[[FloatArray], FloatArray], FloatArray, FloatArray], tuple[FloatArray, FloatArray]
]


@dataclass(frozen=True, slots=True)
class Movers:
    """Measured rows of one class on one GPU, as operators.

    Attributes:
        work, numbers: (operators,) classes, and (operators, columns) their numbers.
        places: (operators,) row that each belongs to.
        seconds: (rows,) measured.
        beside_seconds: (rows,) part of them that the collector adds.
        gpu: key of the GPU.
        by_former_softmax: whether they ran PyTorch's softmax of 2023.
    """

    work: IntArray
    numbers: FloatArray
    places: IntArray
    seconds: FloatArray
    beside_seconds: FloatArray
    gpu: str
    by_former_softmax: bool

    def errors(self, constants: MovingConstants) -> FloatArray:
        """(rows,) logarithms of predicted over measured seconds."""
        rates = moving_rates(measured_gpus()[self.gpu])
        floor = np.maximum(self.numbers[:, Column.LAUNCHES], 1.0)
        floor *= 1e-6 * EfficiencyConstants().kernel_floor_us
        seconds = moving_seconds(
            *(self.work, self.numbers, rates, constants), by_former_softmax=self.by_former_softmax
        )
        seconds = np.maximum(seconds, floor)
        total = np.bincount(self.places, weights=seconds, minlength=len(self.seconds))
        logarithms: FloatArray = np.log((total + self.beside_seconds) / self.seconds)
        return logarithms


def movers(rows: list[Measured]) -> Movers:
    """Operators of measured rows of one GPU."""
    operators, places = operators_of(rows)
    seconds = np.array([row.seconds for row in rows])
    beside = np.array([row.beside_seconds for row in rows])
    is_former = rows[0].label == FORMER_SOFTMAX
    numbers, gpu = operators.numbers, rows[0].gpu
    return Movers(operators.names // 4, numbers, places, seconds, beside, gpu, is_former)


def halves(rows: Iterable[Measured]) -> tuple[dict[Key, Movers], dict[Key, Movers]]:
    """Rows that the fit sees and those held out, by class and GPU.

    They are split by the size of the largest tensor, which both passes of a block share.
    """
    split: tuple[dict[Key, list[Measured]], ...] = (defaultdict(list), defaultdict(list))
    for row in rows:
        if row.label.startswith("memory/") and row.label not in GATED:
            sizes = (n[Column.ROWS] * n[Column.COLUMNS] or n[Column.BYTES] for _, _, n in row.works)
            half = zlib.crc32(b"%d" % max(sizes)) % 2
            split[half][row.label, row.gpu].append(row)
    seen, judged = split
    fitted = {key: movers(_drawn(own)) for key, own in seen.items()}
    return fitted, {key: movers(own) for key, own in judged.items()}


def _drawn(rows: list[Measured]) -> list[Measured]:
    order = np.random.default_rng(0).permutation(len(rows))[:MOST_ROWS]
    return [rows[at] for at in np.sort(order)]


def weight_of(label: str, gpu: str, samples: dict[Key, Movers]) -> float:
    """Weight of a class on a GPU. Streams of this project's own sweep stand for others' rows."""
    if label == "memory/elementwise" and ("memory/stream", gpu) in samples:
        return 0.0
    return WEIGHTS.get(label, WEIGHT_ELSE)


def moving_rows(samples: dict[Key, Movers], least: Least) -> tuple[KernelRate, ...]:
    """Rows of the table: the bandwidth that each GPU reaches, and the shared numbers."""
    gpus = sorted({gpu for _, gpu in samples})

    def residuals(point: FloatArray) -> FloatArray:
        values = np.exp(point)
        parts = []
        for (label, gpu), one in samples.items():
            own = MovingConstants(float(values[gpus.index(gpu)]), *map(float, values[len(gpus) :]))
            weight = weight_of(label, gpu, samples) / len(one.seconds)
            parts.append(one.errors(own) * np.sqrt(weight))
        return np.concatenate(parts)

    start = [START.reached] * len(gpus) + [getattr(START, name) for name in NAMES[1:]]
    names = ["reached"] * len(gpus) + NAMES[1:]
    limits = np.array([LIMITS.get(name, (0.0, np.inf)) for name in names])
    values, errors = least(residuals, np.array(start), limits)
    counts = defaultdict(int)
    for (_, gpu), one in samples.items():
        counts[gpu] += len(one.seconds)
    counts[SHARED] = sum(counts.values())
    return tuple(
        KernelRate(
            gpu=key,
            group=SHARED if key == SHARED else memory_of(measured_gpus()[key]),
            quantity=f"{PREFIX}{name}",
            value=float(f"{value:.4g}"),
            unit=UNITS.get(name, "1"),
            standard_error=float(f"{value * error:.2g}"),
            rows=counts[key],
            source=SOURCE,
        )
        for key, name, value, error in zip(
            gpus + [SHARED] * (len(NAMES) - 1), names, values, errors, strict=True
        )
    )


def held_out_moving(rows: tuple[KernelRate, ...], one: Movers) -> FloatArray:
    """Absolute relative errors of held-out rows of one class, by a table of rates."""
    memory = memory_of(measured_gpus()[one.gpu])
    values = [nearest_rate(rows, f"{PREFIX}{name}", one.gpu, memory) for name in NAMES]
    errors: FloatArray = np.abs(np.expm1(one.errors(MovingConstants(*values))))
    return errors
