"""Fast reader of a long run's log: parts that many lines share are parsed once.

A million probes cover some ten thousand cells on some dozens of nodes. Most of a line describes
these, in the same bytes as other lines. msgspec takes a line apart and checks its numbers, which
takes a tenth of pydantic's time; whatever it refuses is read, or refused, by pydantic.
"""

import statistics
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw
from msgspec.structs import asdict
from pydantic import TypeAdapter

from gpu_catalog.record import Record
from trials.records.built import Built, ParameterCounts
from trials.records.cell import Cell
from trials.records.collectives import CollectiveCount, CollectiveTime
from trials.records.observation import (
    LOG_VERSION,
    Basis,
    DeviceReading,
    Environment,
    Measurement,
    MemoryReading,
    Observation,
    Outcome,
    Purpose,
    RankReading,
    StopReason,
)
from trials.records.profile import Logged, is_observation, logged

T = TypeVar("T")

MISTAKES = (msgspec.MsgspecError, ValueError, RecursionError)
NULL, NONE = Raw(b"null"), Raw(b"[]")
# The bounds of pydantic's records.
_Whole = Annotated[int, Meta(ge=-(2**62), le=2**62)]
_Count = Annotated[int, Meta(ge=1)]
_Second = Annotated[float, Meta(ge=1e-9, le=1e9)]
_Positive = Annotated[float, Meta(ge=0)]


class _Memory(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    peak_allocated_bytes: _Whole
    peak_reserved_bytes: _Whole | None = None
    allocator_retries: _Whole | None = None
    overhead_bytes: _Whole | None = None
    foreign_bytes: _Whole | None = None


class _Reading(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    used_memory_bytes: _Whole | None = None


class _Measured(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    memory_steps: _Whole
    memory: _Memory | None = None
    model_memory_bytes: _Whole | None = None
    warmup_seconds: tuple[_Second, ...] = ()
    step_seconds: tuple[_Second, ...] = ()
    stop_reason: StopReason | None = None
    energy_joules: _Positive | None = None
    before: Raw = NULL
    after: Raw = NULL
    built: Raw = NULL
    relative_error: _Positive | None = None
    relative_error_above: _Positive | None = None
    step_peak_bytes: tuple[_Whole, ...] = ()
    shorter_step_seconds: tuple[tuple[_Count, _Second], ...] = ()
    ranks: Raw = NONE
    collectives: Raw = NONE
    parameters: Raw = NULL
    host_bytes: _Whole | None = None
    step_collectives: Raw = NONE
    exposed_seconds: _Positive | None = None


# Fields in the order of the record, which is the order in which a record is written.
class _Line(msgspec.Struct, forbid_unknown_fields=True, gc=False, kw_only=True):
    cell: Raw = NULL
    purpose: Purpose
    batch_size: Annotated[int, Meta(ge=1, le=10**9)]
    lengths: tuple[_Count, ...] = ()
    repeat: _Whole = 0
    attempt: _Whole = 1
    outcome: Outcome
    detail: str | None = None
    basis: Basis
    memory_limit_bytes: _Whole
    batch_limit: _Whole
    seed: _Whole
    measurement: _Measured | None = None
    environment: Raw = NULL
    started_at: str
    seconds: _Positive
    log_version: Annotated[int, Meta(ge=1, le=LOG_VERSION)] = 1


# What follows from the fields of a record follows from those of a line.
for _name, _value in vars(Observation).items():
    if isinstance(_value, property):
        setattr(_Line, _name, _value)

READING = msgspec.json.Decoder(_Reading | None)
# Parsers of records that only a measurement on several GPUs has.
RANKS = TypeAdapter(tuple[RankReading, ...])
COLLECTIVES = TypeAdapter(tuple[CollectiveTime, ...])
COUNTS = TypeAdapter(tuple[CollectiveCount, ...])
# Records within a measurement that msgspec checks.
PARTS: dict[str, type[Record]] = {
    "memory": MemoryReading,
    "before": DeviceReading,
    "after": DeviceReading,
}


class _Texts(dict[bytes, T]):
    """Values of JSON texts, each parsed at its first lookup; ``given`` ones need none."""

    def __init__(self, kind: TypeAdapter[T], given: Iterable[T] = ()) -> None:
        super().__init__((kind.dump_json(value), value) for value in given)
        self._kind = kind

    def __missing__(self, text: bytes) -> T:
        value = self[text] = self._kind.validate_json(text)
        return value


class LineReader:
    """Reads the observations of one log, several times as fast as separate lines.

    Args:
        brief: cells of which the lines themselves stand for records, which takes half the time and
            memory: they have the same fields and properties, without pydantic's methods. Warm-up
            steps, energy and the readings of the GPU's sensors are left out, as only reports show
            them.
        steps: whether to keep every timed step; otherwise their median stands for them, which takes
            a tenth of the memory away.
        cells: cells of the specification, which then are those of the observations, too: they need
            no parsing, and look-ups of the same objects are fast.
    """

    def __init__(
        self, *, brief: Iterable[Cell] = (), steps: bool = True, cells: Iterable[Cell] = ()
    ) -> None:
        self._brief = frozenset(brief)
        self._steps = steps
        self._line = msgspec.json.Decoder(_Line).decode
        # Many lines have the same numbers. A ranking keeps batch sizes: those of a line would hold
        # the memory of lines around it.
        self._numbers: dict[object, Any] = {}
        self._cells = _Texts(TypeAdapter(Cell), cells)
        self._places: _Texts[Environment | None] = _Texts(TypeAdapter(Environment | None))
        self._models: _Texts[Built | None] = _Texts(TypeAdapter(Built | None))
        self._parameters: _Texts[ParameterCounts | None] = _Texts(
            TypeAdapter(ParameterCounts | None)
        )
        self._counts = _Texts(COUNTS)
        self._start = b"\n"  # of lines of the latest cell, up to its end
        self._cell: Cell | None = None
        self._is_brief = False

    def observation(self, line: bytes) -> Observation:
        """Parse one line; lines share objects for equal cells, environments and built models.

        Raises:
            ValidationError: the line is no observation.
        """
        try:
            return self._taken_apart(line)
        except MISTAKES:  # pydantic has the messages
            return Observation.model_validate_json(line)

    def logged(self, line: bytes) -> Logged:
        """Parse one line, of any kind.

        Raises:
            ValidationError: the line is no record of a log.
        """
        try:
            return self._taken_apart(line)
        except MISTAKES:
            return logged(line)

    def observation_or_none(self, line: bytes) -> Observation | None:
        """Parse one line; None for another kind.

        Raises:
            ValidationError: the line begins as an observation, and is none.
        """
        try:
            return self._taken_apart(line)
        except MISTAKES:
            return Observation.model_validate_json(line) if is_observation(line) else None

    def _taken_apart(self, line: bytes) -> Observation:
        # Most lines follow another one of their cell, which is nearly half of their text.
        follows = line.startswith(self._start)
        rest = b"{" + line[len(self._start) :] if follows else line
        parts: Any = self._line(rest)  # whose fields become those of a record
        if parts.cell is not NULL or not follows:
            self._turn_to(bytes(parts.cell))
        parts.cell = self._cell
        share = self._numbers.setdefault
        parts.batch_size = share(parts.batch_size, parts.batch_size)
        parts.memory_limit_bytes = share(parts.memory_limit_bytes, parts.memory_limit_bytes)
        parts.batch_limit = share(parts.batch_limit, parts.batch_limit)
        parts.environment = self._places[bytes(parts.environment)]
        if parts.measurement is not None:
            self._complete(parts.measurement)
        return parts if self._is_brief else _record(parts)

    def _turn_to(self, text: bytes) -> None:
        """Take the cell of this text for that of the lines that follow."""
        cell = self._cells[text]
        self._start, self._cell, self._is_brief = b'{"cell":%b,' % text, cell, cell in self._brief

    def _complete(self, measured: Any) -> None:
        """Parse, or leave out, what msgspec has left of a measurement."""
        share, memory = self._numbers.setdefault, measured.memory
        of_model = measured.model_memory_bytes
        measured.model_memory_bytes = share(of_model, of_model)
        if memory is not None:
            memory.overhead_bytes = share(memory.overhead_bytes, memory.overhead_bytes)
        if not self._steps and measured.step_seconds:
            measured.step_seconds = (statistics.median(measured.step_seconds),)
        if self._is_brief:
            measured.warmup_seconds = ()
            measured.energy_joules = measured.before = measured.after = None
        else:
            measured.before = READING.decode(measured.before)
            measured.after = READING.decode(measured.after)
        measured.built = self._models[bytes(measured.built)]
        measured.parameters = self._parameters[bytes(measured.parameters)]
        ranks, collectives = measured.ranks, measured.collectives
        measured.ranks = () if ranks is NONE else RANKS.validate_json(bytes(ranks))
        measured.collectives = (
            () if collectives is NONE else COLLECTIVES.validate_json(bytes(collectives))
        )
        counts = measured.step_collectives
        measured.step_collectives = () if counts is NONE else self._counts[bytes(counts)]


def _record(parts: Any) -> Observation:
    """Record of a line whose parts are complete."""
    values = asdict(parts)
    if parts.measurement is not None:
        measured = asdict(parts.measurement)
        for name, kind in PARTS.items():
            if measured[name] is not None:
                measured[name] = kind.of_checked(asdict(measured[name]))
        values["measurement"] = Measurement.of_checked(measured)
    return Observation.of_checked(values)
