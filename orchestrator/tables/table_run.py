"""Run folder of a table of measurements, so that a CSV is taken where a run is."""

import datetime as dt
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fitting.tables.csv_rows import COLUMNS, read_rows
from fitting.tables.csv_table import CsvTable, read_csv
from fitting.tables.table_error import TableError
from gpu_catalog.catalog import UnknownGpuError, load_catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.estimate_request import DEFAULT_JOB
from orchestrator.model_names import named_model
from orchestrator.run_folder.file_names import SPEC
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import open_run
from orchestrator.run_folder.specification_text import specification_of
from orchestrator.spec.recipe_options import RecipeOptions, recipe_of
from orchestrator.spec.spec_file import parse_spec
from orchestrator.storage.run_storage import StoreError
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import has_bf16, with_defaults
from trials.records.model import Model
from trials.records.observation import Environment, Measurement, Observation, Outcome

SUFFIX = ".run"
HEAD = "# Measurements of a table."
AXES = tuple(name for name in Recipe.model_fields if name not in COLUMNS)
UNKNOWN_GPU = "their GPU is not in the catalog"
log = logging.getLogger(__name__)


def table_run(path: Path) -> Path:
    """Write the rows of a CSV of measurements into a run folder.

    A row needs the columns that ``fit`` needs, and those of its recipe: ``method``, or ``recipe``
    with the name of one, and any other field of a recipe; absent fields have TRL's defaults.

    Raises:
        TableError: the CSV cannot be read; a line for each mistake.
        StoreError: the folder cannot be written.
    """
    frame, file = read_csv(path)
    table = CsvTable(frame, {**COLUMNS, **dict.fromkeys(AXES, ())}, file)
    if "method" not in table and "recipe" not in table:
        table.head_is_wrong(
            "no column method or recipe: add method (full, lora or qlora), and a column for each "
            "field of the recipe that is not TRL's default"
        )
    changed = dt.datetime.fromtimestamp(path.stat().st_mtime, dt.UTC)
    reader = _Reader(table, path.name, changed)
    observations = list(reader.observations())
    table.check()
    if not observations:
        reasons = "; ".join(f"{out.rows} rows: {out.reason}" for out in table.left_out)
        raise TableError(f"{path}: no row can be used: {reasons}")
    folder = path.with_name(f"{path.stem}{SUFFIX}")
    _write(folder, observations, reader.models)
    for out in table.left_out:
        log.info("%s: %d rows are not used: %s", path, out.rows, out.reason)
    log.info("%s: %d measurements as a run in %s", path, len(observations), folder)
    return folder


def _write(folder: Path, observations: list[Observation], models: Mapping[str, Model]) -> None:
    spec_file = folder / SPEC
    if folder.exists():
        if not (spec_file.is_file() and spec_file.read_text(encoding="utf-8").startswith(HEAD)):
            raise StoreError(f"{folder}: is another run: move it, or rename the table")
        shutil.rmtree(folder)
    cells = list(dict.fromkeys(o.cell for o in observations))
    fields = specification_of(folder, cells, DEFAULT_JOB)
    text = f"{HEAD}\n{yaml.safe_dump(fields, sort_keys=False)}"
    run = open_run(folder, text, parse_spec(text, str(folder), dict(models)))
    with ObservationWriter(run) as writer:
        for observation in observations:
            writer.append(observation)


class _Reader:
    """Reader of the rows of a table; it records their mistakes in the table.

    Attributes:
        models: models of the rows by name.
    """

    def __init__(self, table: CsvTable, file_name: str, changed: dt.datetime) -> None:
        self._table = table
        self._families, self._rows = read_rows(table, None, timed=True)
        self._file_name = file_name
        self._changed = changed
        self.models: dict[str, Model] = {}

    def observations(self) -> Iterator[Observation]:
        """Yield an observation for each row without a mistake."""
        catalog, keys = load_catalog(), [str(gpu).partition("@")[0] for gpu in self._rows.gpu]
        gpus: dict[str, Gpu | None] = {}
        for key in keys:
            try:
                gpus[key] = catalog.gpu(key)
            except UnknownGpuError:
                gpus[key] = None
        self._table.leave_out(np.array([gpus[key] is None for key in keys], bool), UNKNOWN_GPU)
        visits: Counter[tuple[Cell, int]] = Counter()
        for place, key in enumerate(keys):
            gpu = gpus[key]
            if not self._table.kept[place] or gpu is None:
                continue
            cell = self._cell(place, gpu)
            if cell is not None and np.isfinite(self._rows.seconds[place]):
                batch_size = int(self._rows.batch_size[place])
                yield self._observation(place, cell, gpu, visits[cell, batch_size])
                visits[cell, batch_size] += 1

    def _cell(self, place: int, gpu: Gpu) -> Cell | None:
        """Cell of a row; None where it has a mistake, which is recorded."""
        family, tokens = self._families[place], self._rows.tokens[place]
        if family.model is None or not np.isfinite(tokens):
            return None  # recorded already
        try:
            model = self.models.get(family.model) or named_model(family.model)
        except UserError as error:
            self._table.row_is_wrong("model", place, str(error))
            return None
        self.models[family.model] = self.models[model.name] = model
        try:
            recipe = self._recipe(place, gpu)
        except UserError as error:
            self._table.row_is_wrong("method", place, "; ".join(str(error).splitlines()))
            return None
        experts, active = model.experts, model.active_experts
        if experts is not None and "sparsity" in self._table:
            share = float(self._rows.sparsity[place]) * experts
            active = max(1, round(share))
            if abs(active - share) > 0.01:
                text = f"{experts} experts cannot have this share active"
                self._table.row_is_wrong("sparsity", place, text)
        return Cell(
            gpu=gpu.key,
            model=model.name,
            weights=family.weights or "random",
            recipe=with_defaults(recipe, model, gpu),
            experts=experts,
            active_experts=active,
            seq_len=max(1, round(float(tokens / self._rows.batch_size[place]))),
        )

    def _recipe(self, place: int, gpu: Gpu) -> Recipe:
        """Recipe of a row.

        Raises:
            UserError: there is no such recipe.
        """
        stated: dict[str, Any] = {}
        for name in ("method", "recipe", *AXES):
            text = self._table.texts(name)[place] if name in self._table else None
            if text is not None:
                is_name = name in ("method", "recipe")
                stated[name] = text if is_name else yaml.safe_load(text)
        if not {"method", "recipe"} & stated.keys():
            raise TableError("is empty: give the method: full, lora or qlora")
        return recipe_of(RecipeOptions(**stated), has_bf16=has_bf16(gpu))

    def _observation(self, place: int, cell: Cell, gpu: Gpu, repeat: int) -> Observation:
        family = self._families[place]
        software = () if family.software is None else (("software", family.software),)
        seconds = float(self._rows.seconds[place])
        return Observation(
            cell=cell,
            purpose="ladder",
            batch_size=int(self._rows.batch_size[place]),
            repeat=repeat,
            outcome=Outcome.FITS,
            basis=family.family.basis,
            memory_limit_bytes=gpu.usable_memory_bytes or 0,
            batch_limit=max(1024, int(self._rows.batch_size[place])),
            seed=0,
            measurement=Measurement(
                memory_steps=0, step_seconds=(seconds,), stop_reason="step cap"
            ),
            environment=Environment(
                versions=software,
                device_name=gpu.key,
                threads=1,
                allocator=None if gpu.kind == "cpu" else "",
                host=f"{gpu.key} of {self._file_name}",  # each GPU has a machine of its own
            ),
            started_at=self._changed.isoformat(),
            seconds=seconds,
        )
