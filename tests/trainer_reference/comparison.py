"""Comparison of a step of the project with the trainer's."""

import contextlib
from pathlib import Path

from trainer_reference.cells import ReferenceCell
from trainer_reference.completions import train_on_completions
from trainer_reference.offloading import host_apart
from trainer_reference.preference import train_on_preferences
from trainer_reference.project import measure, simulated_peak
from trainer_reference.trainer import train
from trainer_reference.training import TrainerRun

LOSS_TOLERANCE = 1e-5
SMALLEST_LOSS = 1e-6


def train_both(cell: ReferenceCell, folder: Path) -> tuple[TrainerRun, int, list[float]]:
    """Train by the trainer and by the project; return the run, our peak bytes and our losses."""
    with host_apart() if cell.activation_offloading else contextlib.nullcontext():
        trained = {"sft": train, "grpo": train_on_completions}.get(cell.task, train_on_preferences)
        run = trained(cell, folder)
        counter, losses = measure(cell, folder, run)
    return run, counter.peak_bytes, losses


def compare(cell: ReferenceCell, folder: Path, *, peak_tolerance: float) -> None:
    """Check that the measured and the simulated step have the trainer's peak, and its losses."""
    run, peak_bytes, losses = train_both(cell, folder)
    assert abs(peak_bytes / run.peak_bytes - 1) <= peak_tolerance
    assert abs(simulated_peak(cell, folder) / run.peak_bytes - 1) <= peak_tolerance
    # Advantages add up to zero, so without vLLM the first loss of GRPO does, too.
    assert all(
        abs(a - b) <= max(LOSS_TOLERANCE * abs(b), SMALLEST_LOSS)
        for a, b in zip(losses, run.losses, strict=True)
    )
