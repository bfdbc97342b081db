"""The run folder: everything one sweep produced. One writer appends observations, durably."""

from collections.abc import Callable, Iterator
from typing import Self, TypeVar

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
    PLAN,
    RENTED,
    SPEC,
)
from orchestrator.run_folder.observation_log import L, bytes_of, mistake, once, told
from orchestrator.spec.spec_file import SpecError, decoded, parse_spec
from orchestrator.spec.sweep_spec import CatalogRows, Models, SweepSpec
from orchestrator.storage.local_storage import LocalStorage
from orchestrator.storage.run_storage import RunPath, RunStorage, S3Url, StoreError, run_path
from trials.records.log_reader import LineReader
from trials.records.model import Model
from trials.records.observation import Observation
from trials.records.profile import Logged, Profiled

K = TypeVar("K")

_MODELS = TypeAdapter(dict[str, Model])


class RunFolder:
    """A run folder to read from. Reading never changes it, and a running sweep does not mind."""

    def __init__(self, path: RunPath | str) -> None:
        self.path = run_path(path)
        self.place = _place_of(self.path)

    @classmethod
    def existing(cls, path: RunPath | str) -> Self:
        """A folder that holds a run.

        Raises:
            StoreError: it does not.
        """
        run = cls(path)
        names = run.place.names()
        if names is None:
            raise StoreError(f"{run.path}: no such run folder ('sweep --out {run.path}' makes one)")
        if SPEC not in names:
            raise StoreError(f"{run.path}: not a run folder: it has no {SPEC}")
        return run

    def spec_text(self) -> str:
        """The specification of this run, as given.

        Raises:
            SpecError: it is no text.
        """
        content = self.place.read(SPEC)
        if content is None:
            raise StoreError(f"{self.path}: not a run folder: it has no {SPEC}")
        return decoded(content, str(self.path / SPEC))

    def spec(self, base: Catalog | None = None) -> SweepSpec:
        """The specification of this run.

        Args:
            base: the catalog its own rows go over; absent for the shipped one and ``catalog_rows``.
        """
        rows = self.catalog_rows() if base is None else CatalogRows()
        if rows != CatalogRows():
            base = load_catalog(rows.gpus, rows.offers)
        name = str(self.path / SPEC)
        return parse_spec(self.spec_text(), name, self._models(), base, self._lengths())

    def catalog_rows(self) -> CatalogRows:
        """The GPUs and prices of the user's file that the run began with; it may be gone by now."""
        rows = self._kept(
            CATALOG, CatalogRows.model_validate_json, "not rows of a catalog", "restore it"
        )
        return CatalogRows() if rows is None else rows

    def _models(self) -> Models:
        """The models as they were when the run began: their folders may be gone by now."""
        remedy = "restore it, or delete it and have the models found again"
        return self._kept(MODELS, _MODELS.validate_json, "not a list of models", remedy) or {}

    def _lengths(self) -> DataLengths | None:
        """Lengths of the examples when the run began; their data may be gone by now."""
        remedy = "restore it, or delete it and have them counted again"
        return self._kept(
            LENGTHS, DataLengths.model_validate_json, "not lengths of examples", remedy
        )

    def plan(self) -> Plan | None:
        """What the latest driver planned; None before it did."""
        remedy = "delete it, the next sweep writes it anew"
        return self._kept(PLAN, Plan.model_validate_json, "not a plan", remedy)

    def faults(self) -> Faults:
        """What went wrong so far."""
        remedy = "delete it, nothing that was measured is in it"
        faults = self._kept(FAULTS, Faults.model_validate_json, "not a list of faults", remedy)
        return Faults() if faults is None else faults

    def rented(self) -> NodeRentals:
        """What the nodes of the run are rented as; anything where nobody has said."""
        wrong = "does not say what nodes are rented as"
        remedy = "delete it, and say it to the next sweep"
        rented = self._kept(RENTED, NodeRentals.model_validate_json, wrong, remedy)
        return NodeRentals() if rented is None else rented

    def _kept(self, name: str, read: Callable[[bytes], K], wrong: str, remedy: str) -> K | None:
        """What a file of the run holds; None where there is none.

        Raises:
            StoreError: it holds something else; what is wrong with it, and what to do.
        """
        content = self.place.read(name)
        if content is None:
            return None
        try:
            return read(content)
        except ValidationError as error:
            raise StoreError(f"{self.path / name}: {wrong} ({mistake(error)}): {remedy}") from None

    def observations(self) -> list[Observation]:
        """Every observation, in the order written. A torn last line is not one.

        Raises:
            StoreError: a line before the last cannot be read.
        """
        return list(self.each_observation())

    def each_observation(self) -> Iterator[Observation]:
        """As ``observations``, one after the other: those of a long log need not be held at once.

        Raises:
            StoreError: a line before the last cannot be read.
        """
        return self._logged(LineReader().observation, profiles=False)

    def profiles(self) -> list[Profiled]:
        """Every profile, alike. They stand in the same log and are no observations of a batch."""
        return list(self._logged(Profiled.model_validate_json, profiles=True))

    def logged(self) -> list[Logged]:
        """All that was paid for: every observation, then every profile."""
        return [*self.observations(), *self.profiles()]

    def _logged(self, read: Callable[[bytes], L], *, profiles: bool) -> Iterator[L]:
        files = self.place.observations()
        found = (each for file, lines in files for each in told(file, lines, read, profiles))
        return once(found) if self.place.has_several_files else found

    def is_running(self) -> bool:
        """Whether a driver is writing to it now."""
        return self.place.is_written()

    def write(self, name: str, content: str | BaseModel) -> RunPath:
        """Replaces one file of the run as a whole: whoever reads it sees the old or the new one.

        Raises:
            StoreError: it could not be written; the old one is still there.
        """
        self.place.write(name, bytes_of(content))
        return self.path / name


def open_run(
    path: RunPath | str, spec_text: str, spec: SweepSpec, rows: CatalogRows | None = None
) -> RunFolder:
    """The run folder of a sweep: a new one, or the one where this very sweep stopped.

    Args:
        path: the folder.
        spec_text: the specification, as given.
        spec: what it says.
        rows: GPUs and prices of a user's file, that the specification goes by.

    Raises:
        StoreError: the folder belongs to something else. Nothing in it was changed.
    """
    run = RunFolder(path)
    beside = {name for file in (MODELS, LENGTHS, CATALOG) for name in (file, f".{file}.part")}
    beside |= {LEARNED, LEARNING}
    names = (run.place.names() or set()) - beside - {f".{SPEC}.part"}
    if SPEC in names:
        _check_same_sweep(run, spec)
        _check_same_gpus(run, rows)
        return run
    if names:
        raise StoreError(f"{run.path}: holds {min(names)!r} but no run: choose another --out")
    run.place.make()
    # The specification comes last: a folder that has one is a run.
    run.write(MODELS, _MODELS.dump_json(spec.models, indent=1).decode() + "\n")
    if spec.workload.lengths is not None:
        run.write(LENGTHS, spec.workload.lengths)
    if rows is not None and rows != CatalogRows():
        run.write(CATALOG, rows)
    run.write(SPEC, spec_text)
    return run


def _check_same_sweep(run: RunFolder, spec: SweepSpec) -> None:
    try:
        there = run.spec()
    except SpecError as error:
        raise StoreError(f"{run.path}: its own specification cannot be read:\n{error}") from None
    differing = [
        name for name in SweepSpec.model_fields if getattr(there, name) != getattr(spec, name)
    ] + [
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
    """What was measured was on the GPUs as they were told then; prices may change."""
    then = {gpu.key: gpu for gpu in run.catalog_rows().gpus}
    now = () if rows is None else rows.gpus
    differing = [gpu.key for gpu in now if then.get(gpu.key, gpu) != gpu]
    if differing:
        raise StoreError(
            f"{run.path}: began with other facts of {', '.join(differing)} than --catalog has now: "
            "choose another --out, or restore them"
        )


def _place_of(path: RunPath) -> RunStorage:
    if not isinstance(path, S3Url):
        return LocalStorage(path)
    from orchestrator.storage.s3_storage import S3Storage  # noqa: PLC0415 - boto3, for buckets only

    return S3Storage(path)
