"""The run folder: all files that one sweep produced."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu_catalog.catalog import Catalog, load_catalog
from orchestrator.datasets.lengths import DataLengths
from orchestrator.planning.faults import Faults
from orchestrator.planning.node_pricing import NodeRentals
from orchestrator.planning.plan import Plan
from orchestrator.run_folder.file_names import (
    CATALOG,
    FAULTS,
    LEARNED,
    LEARNING,
    LENGTHS,
    MODELS,
    NOTES,
    PLAN,
    RANKING,
    RECIPES,
    RENTED,
    SPEC,
)
from orchestrator.run_folder.observation_log import (
    L,
    bytes_of,
    mistake,
    read_lines,
)
from orchestrator.spec.recipe_options import ChosenRecipe
from orchestrator.spec.spec_file import SpecError, decoded, parse_spec
from orchestrator.spec.sweep_spec import CatalogRows, SweepSpec
from orchestrator.storage.run_storage import RunPath, StoreError, run_path
from orchestrator.storage.storages import storage_of
from trials.records.cell import Cell
from trials.records.log_reader import LineReader
from trials.records.model import Model
from trials.records.observation import Observation
from trials.records.profile import LinkTimes, Logged, Profiled, link_or_none, profile_or_none

if TYPE_CHECKING:
    from orchestrator.ranking.ranked_offer import Ranking

K = TypeVar("K")


class RunFolder:
    """A run folder. Reading never changes it, and may happen while a sweep writes to it."""

    def __init__(self, path: RunPath | str) -> None:
        self.path = run_path(path)
        self.storage = storage_of(self.path)

    @classmethod
    def existing(cls, path: RunPath | str) -> Self:
        """Open a folder that must hold a run.

        Raises:
            StoreError: it holds none.
        """
        run = cls(path)
        names = run.storage.names()
        if names is None:
            raise StoreError(
                f"{run.path}: no such run folder ('sweep --out {run.path}' creates it)"
            )
        if SPEC not in names:
            raise StoreError(f"{run.path}: not a run folder: it has no {SPEC}")
        return run

    def spec_text(self) -> str:
        """Specification of the run, as given.

        Raises:
            StoreError: the folder has none.
            SpecError: it is not text.
        """
        content = self.storage.read(SPEC)
        if content is None:
            raise StoreError(f"{self.path}: not a run folder: it has no {SPEC}")
        return decoded(content, str(self.path / SPEC))

    def notes(self) -> str:
        """The user's own notes on the run, as Markdown; empty without any.

        Raises:
            SpecError: they are not text.
        """
        content = self.storage.read(NOTES)
        return "" if content is None else decoded(content, str(self.path / NOTES)).strip()

    def spec(self, base: Catalog | None = None) -> SweepSpec:
        """Parse the specification of the run.

        Args:
            base: catalog that its own rows are merged over; None for the shipped catalog with
                ``catalog_rows``.
        """
        rows = self.catalog_rows() if base is None else CatalogRows()
        if rows != CatalogRows():
            base = load_catalog(rows.gpus, rows.offers)
        # Models and data as they were when the run began: their folders may be gone now.
        remedy = "restore it, or delete it to have the models found again"
        models = self._kept(MODELS, dict[str, Model], "a list of models", remedy)
        remedy = "restore it, or delete it to have them counted again"
        lengths = self._kept(LENGTHS, DataLengths, "lengths of examples", remedy)
        spec = parse_spec(self.spec_text(), str(self.path / SPEC), models, base, lengths)
        spec = spec.with_chosen(self.chosen_recipes())
        if spec.open_cells():
            text = "is missing, or lacks a cell of the specification: restore it"
            raise StoreError(f"{self.path / RECIPES}: {text}")
        return spec

    def chosen_recipes(self) -> tuple[ChosenRecipe, ...]:
        """Recipes that were chosen when the run began; none where the specification has no auto."""
        remedy = "restore it: it has the recipes that the run measures"
        return self._kept(RECIPES, tuple[ChosenRecipe, ...], "chosen recipes", remedy) or ()

    def catalog_rows(self) -> CatalogRows:
        """GPUs and prices of the user's file when the run began; that file may be gone now."""
        rows = self._kept(CATALOG, CatalogRows, "rows of a catalog", "restore it")
        return rows or CatalogRows()

    def plan(self) -> Plan | None:
        """Plan of the latest driver; None before the first."""
        return self._kept(PLAN, Plan, "a plan", "delete it: the next sweep writes it anew")

    def faults(self) -> Faults:
        """Faults until now."""
        remedy = "delete it: it holds no measurements"
        return self._kept(FAULTS, Faults, "a list of faults", remedy) or Faults()

    def ranking(self) -> "Ranking | None":
        """Ranking as the sweep or ``rank`` wrote it; None before the first."""
        from orchestrator.ranking.ranked_offer import Ranking  # noqa: PLC0415 - few commands need it

        return self._kept(RANKING, Ranking, "a ranking", "write it anew by rank")

    def rented(self) -> NodeRentals:
        """Rentals of the nodes; unrestricted where none were recorded."""
        remedy = "delete it, and give --providers, --regions or --spot to the next sweep"
        return self._kept(RENTED, NodeRentals, "rentals of nodes", remedy) or NodeRentals()

    def _kept(self, name: str, kind: type[K], what: str, remedy: str) -> K | None:
        """Parse a file of the run; None where there is none. ``what`` names it in the error."""
        content = self.storage.read(name)
        if content is None:
            return None
        try:
            return TypeAdapter(kind).validate_json(content)
        except ValidationError as error:
            reason = f"not {what} ({mistake(error)})"
            raise StoreError(f"{self.path / name}: {reason}: {remedy}") from None

    def observations(self, reader: LineReader | None = None) -> list[Observation]:
        """All observations, in the order written, without a torn last line.

        Args:
            reader: reader of its lines; None for one that keeps all that they hold.

        Raises:
            StoreError: a line before the last cannot be read.
        """
        with _no_collection():
            return self._listed((reader or LineReader()).observation_or_none)

    def each_observation(self) -> Iterator[Observation]:
        """Iterate over the observations: a long log need not fit into memory.

        Raises:
            StoreError: a line before the last cannot be read.
        """
        return _without_repeats(self._logged(LineReader().observation_or_none))

    def profiles(self) -> list[Profiled]:
        """All profiles. They share the log with the observations."""
        return self._listed(profile_or_none)

    def links(self) -> list[LinkTimes]:
        """Times of links, which share the log likewise."""
        return self._listed(link_or_none)

    def logged(self, reader: LineReader | None = None) -> list[Logged]:
        """All results that cost money, in the order written, by one reading of the log.

        Args:
            reader: reader of its lines; None for one that keeps all that they hold.

        Raises:
            StoreError: a line before the last cannot be read.
        """
        with _no_collection():
            return self._listed((reader or LineReader()).logged)

    def _listed(self, read: Callable[[bytes], L | None]) -> list[L]:
        # Keys made between the records would leave holes among them, and what fills these keeps
        # their memory from being given back.
        return list(_without_repeats(list(self._logged(read))))

    def _logged(self, read: Callable[[bytes], L | None]) -> Iterator[L]:
        for file, lines in self.storage.observations():
            yield from read_lines(file, lines, read)

    def is_running(self) -> bool:
        """Whether a driver writes to it now."""
        return self.storage.is_written()

    def write(self, name: str, content: str | BaseModel | Iterator[bytes]) -> RunPath:
        """Replace a file of the run atomically: a reader sees the old or the new file.

        Raises:
            StoreError: it could not be written; the old file is untouched.
        """
        self.storage.write(name, content if isinstance(content, Iterator) else bytes_of(content))
        return self.path / name


def _without_repeats(logged: Iterable[L]) -> Iterator[L]:
    """The first of all records of a key: two objects, or a log joined by hand, may repeat one."""
    keys: dict[Cell, set[tuple[object, ...]]] = defaultdict(set)
    cell = None
    for record in logged:
        if record.cell is not cell:  # most follow another one of their cell
            cell = record.cell
            of_cell = keys[cell]
        key = record.key_in_cell
        if key not in of_cell:
            of_cell.add(key)
            yield record


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for garbage while records are read: none of them is any."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_run(
    path: RunPath | str, spec_text: str, spec: SweepSpec, rows: CatalogRows | None = None
) -> RunFolder:
    """Open the run folder of a sweep: a new folder, or that in which the same sweep stopped.

    Args:
        path: folder.
        spec_text: specification, as given.
        spec: the same, parsed.
        rows: GPUs and prices of the user's catalog file.

    Raises:
        StoreError: the folder holds something else; nothing in it was changed.
    """
    run = RunFolder(path)
    snapshots = (MODELS, LENGTHS, CATALOG, RECIPES)
    beside = {name for file in snapshots for name in (file, f".{file}.part")}
    beside |= {LEARNED, LEARNING}
    names = (run.storage.names() or set()) - beside - {f".{SPEC}.part"}
    if SPEC in names:
        _check_same_sweep(run, spec)
        _check_same_gpus(run, rows)
        return run
    if names:
        raise StoreError(f"{run.path}: holds {min(names)!r} but no run: choose another --out")
    run.storage.make()
    # The specification comes last: a folder that has one is a run.
    models = TypeAdapter(dict[str, Model]).dump_json(spec.models, indent=1)
    run.write(MODELS, models.decode() + "\n")
    if spec.workload.lengths is not None:
        run.write(LENGTHS, spec.workload.lengths)
    if rows is not None and rows != CatalogRows():
        run.write(CATALOG, rows)
    if spec.chosen:
        chosen = TypeAdapter(tuple[ChosenRecipe, ...]).dump_json(spec.chosen, indent=1)
        run.write(RECIPES, chosen.decode() + "\n")
    run.write(SPEC, spec_text)
    return run


def _check_same_sweep(run: RunFolder, spec: SweepSpec) -> None:
    try:
        there = run.spec()
    except SpecError as error:
        raise StoreError(f"{run.path}: its own specification cannot be read:\n{error}") from None
    # The defaults of recipes are compared as the recipes that they come to.
    names = [name for name in SweepSpec.model_fields if name != "recipe_defaults"]
    differing = [name for name in names if getattr(there, name) != getattr(spec, name)] + [
        f"models {name}"
        for name, model in spec.models.items()
        if name in there.models and there.models[name].config != model.config
    ]
    if differing:
        raise StoreError(
            f"{run.path}: is another sweep's run ({', '.join(differing)} differ): "
            "choose another --out, or run its own specification"
        )


def _check_same_gpus(run: RunFolder, rows: CatalogRows | None) -> None:
    """Refuse other facts of a GPU than the run was measured with; prices may change."""
    then = {gpu.key: gpu for gpu in run.catalog_rows().gpus}
    now = () if rows is None else rows.gpus
    differing = [gpu.key for gpu in now if then.get(gpu.key, gpu) != gpu]
    if differing:
        raise StoreError(
            f"{run.path}: --catalog has changed {', '.join(differing)} since the run began: "
            "restore it, or choose another --out"
        )
