"""Run folder of a training's own measurement, as a sweep's, so that every command takes it."""

from collections.abc import Sequence

import yaml
from pydantic import TypeAdapter

from gpu_catalog.errors import UserError
from orchestrator.callback.live_training import LiveTraining
from orchestrator.callback.training_measurement import TrainingMeasurement
from orchestrator.run_folder.file_names import MODELS, SPEC
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.run_folder.specification_text import specification_of
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.storage.run_storage import RunPath, run_path
from trials.records.cell import Cell
from trials.records.model import Model
from trials.records.observation import Basis, Observation, Outcome

HEAD = "# Trainings that FineTuneForecast measured."
BATCH_LIMIT = SweepSpec.model_fields["max_batch_size"].default
"""Limit of a search, which a training is none of: its batch is not the largest that fits."""


def record(
    path: RunPath | str, training: LiveTraining, measured: TrainingMeasurement, seed: int
) -> Observation:
    """Write a measurement into a run folder, which is made if there is none.

    A folder may hold several trainings on one GPU; its job is that of the first.

    Raises:
        UserError: the folder holds another run, or cannot be written.
    """
    cell = training.cell(measured.seq_len)
    run = _opened(path, training, cell)
    memory = measured.measurement.memory
    retries = 0 if memory is None else memory.allocator_retries or 0
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
    """Run folder whose specification has a cell: a new one, or one of earlier trainings.

    Raises:
        UserError: the folder holds something else, or trainings on another GPU.
    """
    run, model = RunFolder(path), training.model
    models, values = {model.name: model}, specification_of(path, [cell], training.job)
    is_new = SPEC not in (run.storage.names() or ())
    if not is_new:
        there, kept = run.spec(), yaml.safe_load(run.spec_text())
        is_alike = there.models.get(model.name, model).config == model.config
        if not (run.spec_text().startswith(HEAD) and is_alike and kept["gpus"] == values["gpus"]):
            raise UserError(f"{path}: holds another run: give the training a folder of its own")
        if cell in there.all_cells():
            return run
        models |= there.models
        values = kept | {"cells": [*kept["cells"], *values["cells"]]}
    text = f"{HEAD}\n{yaml.safe_dump(values, sort_keys=False)}"
    spec = parse_spec(text, str(path), models)
    if cell not in spec.all_cells():
        raise UserError(f"{path}: no specification describes the cell {cell.key}")
    if is_new:
        return open_run(run_path(path), text, spec)
    run.write(MODELS, TypeAdapter(dict[str, Model]).dump_json(spec.models, indent=1).decode())
    run.write(SPEC, text)
    return run


def _visits(observations: Sequence[Observation], cell: Cell, batch_size: int) -> int:
    return sum(o.cell == cell and o.batch_size == batch_size for o in observations)
