"""Probes of Mixtral on the paper's GPUs, with exact step times and memory limits."""

import math
from collections.abc import Iterable

import numpy as np

from builders.observations import built
from fitting.fit import fit_observations
from fitting.laws.equations import max_batch_eq1
from fitting.laws.fit_result import Fit, Law
from trials.recipes.recipe import Recipe
from trials.records.built import ParameterCounts
from trials.records.cell import Cell
from trials.records.observation import (
    Basis,
    Environment,
    Measurement,
    MemoryReading,
    Observation,
    Outcome,
)

RECIPE = Recipe(method="qlora", lora_rank=16, precision="bf16", gradient_checkpointing=True)
GB = 10**9


def cell(active: int | None = 2, *, gpu: str = "a40", seq_len: int = 128, rank: int = 16) -> Cell:
    """Mixtral with this many active experts of 8; None for a model without experts."""
    return Cell(
        gpu=gpu,
        model="llama-7b" if active is None else "mixtral-8x7b",
        recipe=RECIPE.model_copy(update={"lora_rank": rank}),
        experts=None if active is None else 8,
        active_experts=active,
        seq_len=seq_len,
    )


def environment(device_name: str = "NVIDIA A40", torch: str = "2.9.0") -> Environment:
    """Environment of a probe; another device or torch version is another software stack."""
    return Environment(
        versions=(("python", "3.11"), ("torch", torch)),
        device_name=device_name,
        threads=8,
        host="h",
    )


def measurement(step_seconds: tuple[float, ...]) -> Measurement:
    """Measurement of a probe that fits, with 24 GB of weights."""
    return Measurement(
        memory_steps=3,
        memory=MemoryReading(peak_allocated_bytes=30 * GB),
        model_memory_bytes=24 * GB,
        step_seconds=step_seconds,
        stop_reason="precise" if step_seconds else None,
        built=built(
            parameters=ParameterCounts(total=47 * 10**9, trainable=10**8, four_bit=46 * 10**9)
        ),
    )


def probe(
    probed_cell: Cell,
    batch_size: int,
    step_seconds: tuple[float, ...] = (),
    *,
    outcome: Outcome = Outcome.FITS,
    basis: Basis = Basis.MEASURED,
    memory_gb: int = 48,
    at: Environment | None = None,
    **fields: object,
) -> Observation:
    """One probe; a timed probe is on the ladder."""
    fits = outcome is Outcome.FITS
    values = {
        "cell": probed_cell,
        "purpose": "ladder" if step_seconds else "search",
        "batch_size": batch_size,
        "outcome": outcome,
        "basis": basis,
        "memory_limit_bytes": memory_gb * GB,
        "batch_limit": 1000,
        "seed": 0,
        "measurement": measurement(step_seconds) if fits else None,
        "environment": at or environment(),
        "started_at": "2026-01-01T00:00:00Z",
        "seconds": 9.0,
    }
    return Observation.model_validate(values | fields)


def ladder(
    probed_cell: Cell, batches: Iterable[int], t0: float, k: float, **fields: object
) -> list[Observation]:
    """Exact affine step times, with an outlier on either side for the median to ignore."""
    return [
        probe(probed_cell, b, ((t0 + b * k) / 9, t0 + b * k, (t0 + b * k) * 9), **fields)  # type: ignore[arg-type]
        for b in batches
    ]


def noisy_ladder(batches: Iterable[int]) -> list[Observation]:
    """Two sparsities, two visits of each batch, 2 % noise on ``t = 2 + b (0.4 + 0.8 s)``."""
    generator = np.random.default_rng(1)
    return [
        probe(probed_cell, b, ((2 + b * (0.4 + 0.8 * probed_cell.sparsity)) * factor,))
        for probed_cell in (cell(2), cell(8))
        for b in batches
        for factor in generator.normal(1, 0.02, size=2)
    ]


def limit(
    probed_cell: Cell, largest: int, *, memory_gb: int = 48, **fields: object
) -> list[Observation]:
    """A closed search: the largest batch fits and one more does not."""
    miss = {"outcome": Outcome.OUT_OF_MEMORY} | fields
    return [
        *([probe(probed_cell, largest, memory_gb=memory_gb)] if largest else []),
        probe(probed_cell, largest + 1, memory_gb=memory_gb, **miss),  # type: ignore[arg-type]
    ]


def fits_of(law: Law, observations: list[Observation]) -> list[Fit]:
    """All fits of one law."""
    return [fit for fit in fit_observations(observations).fits if fit.law is law]


def only(law: Law, observations: list[Observation]) -> Fit:
    """The one fit of a law."""
    (fit,) = fits_of(law, observations)
    return fit


def value(fit: Fit, name: str) -> float:
    """One parameter by name."""
    (result,) = (p.value for p in fit.parameters if p.name == name)
    return result


LIMITS = tuple(
    (active, gpu, memory_gb, seq_len)
    for active in (2, 8)
    for gpu, memory_gb in (("a40", 48), ("h100", 80))
    for seq_len in (64, 128)
)


def eq1_observations(c0: float, c1: float) -> list[Observation]:
    """Closed searches whose largest batches are those of Eq. 1, rounded down."""
    return [
        o
        for active, gpu, memory_gb, seq_len in LIMITS
        for o in limit(
            cell(active, gpu=gpu, seq_len=seq_len),
            math.floor(max_batch_eq1(memory_gb, 24, seq_len, active / 8, c0, c1)),
            memory_gb=memory_gb,
        )
    ]
