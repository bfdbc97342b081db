"""The run folder: everything one sweep produced. One writer appends observations, durably."""

from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu_catalog.catalog import Catalog, load_catalog
from orchestrator.data_lengths import DataLengths
from orchestrator.faults import Faults
from orchestrator.local_place import LocalPlace
from orchestrator.place import Place, RunPath, S3Url, StoreError, run_path
from orchestrator.plan import Plan
from orchestrator.rented import Rented
from orchestrator.spec_file import SpecError, decoded, parse_spec
from orchestrator.sweep import CatalogRows, Models, SweepSpec
from orchestrator.wording import dotted
from trials.log_lines import LineReader
from trials.models.model import Model
from trials.observation import Observation
from trials.profile import Logged, Profiled, is_profile

SPEC = "sweep.yaml"
MODELS = "models.json"
LENGTHS = "lengths.json"
CATALOG = "catalog.json"
PLAN = "plan.json"
LEARNED = "learned.jsonl"
LEARNING = "learning"
FAULTS = "faults.json"
RENTED = "rented.json"

K = TypeVar("K")
L = TypeVar("L", Observation, Profiled)
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
        """How long queries were counted to be when the run began; their data may be gone by now."""
        remedy = "restore it, or delete it and have them counted again"
        return self._kept(
            LENGTHS, DataLengths.model_validate_json, "not lengths of queries", remedy
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

    def rented(self) -> Rented:
        """What the nodes of the run are rented as; anything where nobody has said."""
        wrong = "does not say what nodes are rented as"
        remedy = "delete it, and say it to the next sweep"
        rented = self._kept(RENTED, Rented.model_validate_json, wrong, remedy)
        return Rented() if rented is None else rented

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
            raise StoreError(f"{self.path / name}: {wrong} ({_mistake(error)}): {remedy}") from None

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
        found = (each for file, lines in files for each in _told(file, lines, read, profiles))
        return _once(found) if self.place.has_several_files else found

    def is_running(self) -> bool:
        """Whether a driver is writing to it now."""
        return self.place.is_written()

    def write(self, name: str, content: str | BaseModel) -> RunPath:
        """Replaces one file of the run as a whole: whoever reads it sees the old or the new one.

        Raises:
            StoreError: it could not be written; the old one is still there.
        """
        self.place.write(name, _bytes_of(content))
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


class ObservationWriter:
    """The one writer of a run's observations. A context manager; a second one is refused.

    Raises:
        StoreError: on entering, when another driver is writing.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._log = run.place.log()
        self._written: set[str] = set()

    def __enter__(self) -> Self:
        self._log.open()
        try:
            self._written = {o.key for o in self._run.each_observation()}
            self._written |= {p.key for p in self._run.profiles()}
            self._written |= self._log.recover(self._written)
        except BaseException:
            self._log.close(failed=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._log.close(failed=error is not None)

    def append(self, observation: Logged) -> bool:
        """Writes one observation, or profile, so that no crash can lose it.

        Returns:
            Whether it was new: one that is there already is not written again.

        Raises:
            StoreError: the disk would not take it; what was there before is untouched.
        """
        if observation.key in self._written:
            return False
        self._log.append(observation.model_dump_json().encode() + b"\n")
        self._written.add(observation.key)
        return True

    def write(self, name: str, content: BaseModel) -> None:
        """Replaces one file of the run, as ``RunFolder.write``, but waits for no bucket.

        A sweep's trials go on while its bucket is away: the file is there when this is left.

        Raises:
            StoreError: it could not be written; the old one is still there.
        """
        self._log.write(name, _bytes_of(content))


def _bytes_of(content: str | BaseModel) -> bytes:
    text = content if isinstance(content, str) else content.model_dump_json(indent=1) + "\n"
    return text.encode()


def _place_of(path: RunPath) -> Place:
    if not isinstance(path, S3Url):
        return LocalPlace(path)
    from orchestrator.s3_place import S3Place  # noqa: PLC0415 - boto3, for buckets only

    return S3Place(path)


class BadLineError(ValueError):
    """A line of the log that cannot be read.

    Args:
        number: of the line, from 1.
        reason: what is wrong with it.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number = number
        self.reason = reason

    def of(self, file: RunPath, before: int = 0) -> StoreError:
        """What a user is told: where it stands in its file, after so many others, and a remedy."""
        return StoreError(
            f"{file}:{before + self.number}: not an observation ({self.reason}): "
            "restore the line or delete it"
        )


def read_lines(
    lines: Iterable[bytes], read: Callable[[bytes], L], *, profiles: bool = False
) -> Iterator[L]:
    """The observations of lines, or their profiles; a torn last line is neither.

    Raises:
        BadLineError: a line before the last cannot be read.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return  # what a writer adds meanwhile is not the rest of another line
        if is_profile(line) is not profiles:
            continue
        try:
            yield read(line)
        except ValidationError as error:
            raise BadLineError(number, _mistake(error)) from None


def _told(
    file: RunPath,
    lines: Iterable[bytes],
    read: Callable[[bytes], L],
    profiles: bool,  # noqa: FBT001 - which
) -> Iterator[L]:
    """As ``read_lines``, of a file."""
    try:
        yield from read_lines(lines, read, profiles=profiles)
    except BadLineError as error:
        raise error.of(file) from None


def _once(logged: Iterable[L]) -> Iterator[L]:
    """Each key once, the first that was written: several files may tell of one probe."""
    keys: set[str] = set()
    for each in logged:
        key = each.key
        if key not in keys:
            keys.add(key)
            yield each


def _mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = dotted(first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
