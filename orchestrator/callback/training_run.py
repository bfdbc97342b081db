"""Run folder of a training's own measurement, as a sweep's, so that every command takes it."""

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from gpu_catalog.errors import UserError
from orchestrator.callback.live_training import LiveTraining
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.storage.run_storage import RunPath, run_path
from trials.records.cell import Cell
from trials.records.observation import (
    Basis,
    Environment,
    Measurement,
    Observation,
    Outcome,
)

BATCH_LIMIT = SweepSpec.model_fields["max_batch_size"].default
"""Limit of a search, which a training is none of: its batch is not the largest that fits."""


@dataclass(frozen=True, slots=True)
class TrainingMeasurement:
    """Measurement of a training.

    Attributes:
        seq_len: mean tokens per row of the timed steps, padding included.
        memory_limit_bytes: device memory that it could take.
        started_at: start of its first step.
        seconds: wall time from then on.
    """

    measurement: Measurement
    environment: Environment
    seq_len: int
    memory_limit_bytes: int
    started_at: dt.datetime
    seconds: float


def record(
    path: RunPath | str, training: LiveTraining, measured: TrainingMeasurement, seed: int
) -> Observation:
    """Write a measurement into a run folder, which is made if there is none.

    A folder holds trainings of one cell: they may differ in their micro-batch.

    Raises:
        UserError: the folder holds another run, or cannot be written.
    """
    cell = training.cell(measured.seq_len)
    run = _opened(path, training, cell)
    retries = measured.measurement.memory.allocator_retries or 0
    size = training.batch_size
    observation = Observation(
        cell=cell,
        purpose="ladder",
        batch_size=size,
        repeat=_visits(run.observations(), cell, size),
        outcome=Outcome.THRASHING if retries else Outcome.FITS,
        detail=f"the allocator emptied its cache {retries} times" if retries else None,
        basis=Basis.MEASURED,
        memory_limit_bytes=measured.memory_limit_bytes,
        batch_limit=BATCH_LIMIT,
        seed=seed,
        measurement=measured.measurement,
        environment=measured.environment,
        started_at=measured.started_at.isoformat(),
        seconds=measured.seconds,
    )
    with ObservationWriter(run) as writer:
        writer.append(observation)
    return observation


def _opened(path: RunPath | str, training: LiveTraining, cell: Cell) -> RunFolder:
    text = yaml.safe_dump(_specification(path, training, cell), sort_keys=False)
    spec = parse_spec(text, str(path), {training.model.name: training.model})
    if cell not in spec.all_cells():
        raise UserError(f"{path}: no specification describes the cell {cell.key}")
    return open_run(run_path(path), text, spec)


def _specification(path: RunPath | str, training: LiveTraining, cell: Cell) -> dict[str, Any]:
    recipe = training.recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    block = {
        "models": [training.model.name],
        "weights": cell.weights,
        "recipes": [recipe],
        "seq_lens": [cell.seq_len],
    }
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(path).rstrip("/").rpartition("/")[2]).lstrip("._-")
    return {
        "name": name or "training",
        "gpus": [training.gpu.key],
        "cells": [block],
        "workload": {"examples": training.examples, "epochs": training.epochs},
        "boundary_repeats": 0,
    }


def _visits(observations: Sequence[Observation], cell: Cell, batch_size: int) -> int:
    return sum(o.cell == cell and o.batch_size == batch_size for o in observations)
