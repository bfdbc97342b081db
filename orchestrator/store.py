"""The run folder: everything one sweep produced. One writer appends observations, durably."""

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu_catalog.catalog import Catalog, load_catalog
from orchestrator.data_lengths import DataLengths
from orchestrator.plan import Plan
from orchestrator.spec_file import SpecError, parse_spec, read_spec_text
from orchestrator.sweep import CatalogRows, Models, SweepSpec
from orchestrator.wording import dotted
from trials.models.model import Model
from trials.observation import Observation

SPEC = "sweep.yaml"
MODELS = "models.json"
LENGTHS = "lengths.json"
CATALOG = "catalog.json"
PLAN = "plan.json"
OBSERVATIONS = "observations.jsonl"


_MODELS = TypeAdapter(dict[str, Model])


class StoreError(RuntimeError):
    """A run folder that cannot be used; one line on why and what to do."""


class RunFolder:
    """A run folder to read from. Reading never changes it, and a running sweep does not mind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def existing(cls, path: Path) -> Self:
        """A folder that holds a run.

        Raises:
            StoreError: it does not.
        """
        names = _names(path)
        if names is None:
            raise StoreError(f"{path}: no such run folder ('sweep --out {path}' makes one)")
        if SPEC not in names:
            raise StoreError(f"{path}: not a run folder: it has no {SPEC}")
        return cls(path)

    def spec(self, base: Catalog | None = None) -> SweepSpec:
        """The specification of this run.

        Args:
            base: the catalog its own rows go over; absent for the shipped one and ``catalog_rows``.
        """
        rows = self.catalog_rows() if base is None else CatalogRows()
        if rows != CatalogRows():
            base = load_catalog(rows.gpus, rows.offers)
        path = self.path / SPEC
        return parse_spec(read_spec_text(path), str(path), self._models(), base, self._lengths())

    def catalog_rows(self) -> CatalogRows:
        """The GPUs and prices of the user's file that the run began with; it may be gone by now."""
        content = _content(self.path / CATALOG)
        if content is None:
            return CatalogRows()
        try:
            return CatalogRows.model_validate_json(content)
        except ValidationError as error:
            raise StoreError(
                f"{self.path / CATALOG}: not rows of a catalog ({_mistake(error)}): restore it"
            ) from None

    def _models(self) -> Models:
        """The models as they were when the run began: their folders may be gone by now."""
        content = _content(self.path / MODELS)
        if content is None:
            return {}
        try:
            return _MODELS.validate_json(content)
        except ValidationError as error:
            raise StoreError(
                f"{self.path / MODELS}: not a list of models ({_mistake(error)}): restore it, or "
                "delete it and have the models found again"
            ) from None

    def _lengths(self) -> DataLengths | None:
        """How long queries were counted to be when the run began; their data may be gone by now."""
        content = _content(self.path / LENGTHS)
        if content is None:
            return None
        try:
            return DataLengths.model_validate_json(content)
        except ValidationError as error:
            raise StoreError(
                f"{self.path / LENGTHS}: not lengths of queries ({_mistake(error)}): restore it, "
                "or delete it and have them counted again"
            ) from None

    def plan(self) -> Plan | None:
        """What the latest driver planned; None before it did."""
        file = self.path / PLAN
        content = _content(file)
        if content is None:
            return None
        try:
            return Plan.model_validate_json(content)
        except ValidationError as error:
            raise StoreError(
                f"{file}: not a plan ({_mistake(error)}): delete it, the next sweep writes it anew"
            ) from None

    def observations(self) -> list[Observation]:
        """Every observation, in the order written. A torn last line is not one.

        Raises:
            StoreError: a line before the last cannot be read.
        """
        file = self.path / OBSERVATIONS
        whole, _, _torn = (_content(file) or b"").rpartition(b"\n")
        found = []
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                found.append(Observation.model_validate_json(line))
            except ValidationError as error:
                reason = _mistake(error)
                raise StoreError(
                    f"{file}:{number}: not an observation ({reason}): restore the line or delete it"
                ) from None
        return found

    def is_running(self) -> bool:
        """Whether a driver is writing to it now."""
        try:
            with (self.path / OBSERVATIONS).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise _unusable(self.path / OBSERVATIONS, "looked at", error) from None
        return False

    def write(self, name: str, content: str | BaseModel) -> Path:
        """Replaces one file of the run as a whole: whoever reads it sees the old or the new one.

        Raises:
            StoreError: it could not be written; the old one is still there.
        """
        text = content if isinstance(content, str) else content.model_dump_json(indent=1) + "\n"
        target, part = self.path / name, self.path / f".{name}.part"
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
            _sync_folder(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise _unusable(target, "written", error) from None
        return target


def open_run(
    path: Path, spec_text: str, spec: SweepSpec, rows: CatalogRows | None = None
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
    names = (_names(path) or set()) - beside - {f".{SPEC}.part"}
    if SPEC in names:
        _check_same_sweep(run, spec)
        _check_same_gpus(run, rows)
        return run
    if names:
        raise StoreError(f"{path}: holds {min(names)!r} but no run: choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, "made", error) from None
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


class ObservationWriter:
    """The one writer of a run's observations. A context manager; a second one is refused.

    Raises:
        StoreError: on entering, when another driver is writing.
    """

    def __init__(self, run: RunFolder) -> None:
        self._path = run.path / OBSERVATIONS
        self._run = run
        self._written: set[str] = set()
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _unusable(self._path, "written", error) from None
        try:
            self._begin()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def _begin(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._drop_torn_line()
            _sync_folder(self._run.path)
        except BlockingIOError:
            raise StoreError(
                f"{self._run.path}: another sweep is writing to it: wait for it, or stop it"
            ) from None
        except OSError as error:
            raise _unusable(self._path, "written", error) from None
        self._written = {o.key for o in self._run.observations()}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def append(self, observation: Observation) -> bool:
        """Writes one observation so that no crash can lose it.

        Returns:
            Whether it was new: one that is there already is not written again.

        Raises:
            StoreError: the disk would not take it; what was there before is untouched.
        """
        if observation.key in self._written:
            return False
        line = observation.model_dump_json().encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise StoreError(
                f"{self._path}: cannot be written: {error.strerror}: make room and run the same "
                "command again, it continues where this stopped"
            ) from None
        self._written.add(observation.key)
        return True

    def _drop_torn_line(self) -> None:
        """A driver that was killed may have left half a line; its probe is simply made again."""
        content = self._path.read_bytes()
        torn = content.rpartition(b"\n")[2]
        if torn:
            os.ftruncate(self._descriptor, len(content) - len(torn))


def _names(path: Path) -> set[str] | None:
    """What a folder holds; None when there is no such folder."""
    try:
        return {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise StoreError(f"{path}: is a file, or below one: name a folder") from None
    except OSError as error:
        raise _unusable(path, "read", error) from None


def _content(file: Path) -> bytes | None:
    """What a file holds; None when there is no such file."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(file, "read", error) from None


def _mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = dotted(first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def _unusable(path: Path, done: str, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be {done}: {error.strerror}")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
