"""Fast reader of a long run's log: parts that many lines share are parsed once.

A million probes cover some ten thousand cells on some dozens of nodes. Most of a line describes
these, in the same bytes as other lines.
"""

import statistics
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError, ValidationInfo

from trials.records.built import Built
from trials.records.cell import Cell
from trials.records.observation import Environment, Measurement, Observation, Seconds

T = TypeVar("T")

STEPS = b',"step_seconds":'
SECONDS = TypeAdapter(Seconds)


def _shared(mark: object, info: ValidationInfo) -> object:
    """Replace the placeholder 0 by the shared value of the field."""
    if mark != 0 or info.context is None or info.field_name is None:
        raise ValueError("not a placeholder")
    return info.context[info.field_name]


class _MarkedMeasurement(Measurement):
    built: Annotated[Built | None, BeforeValidator(_shared)] = None


class _MarkedObservation(Observation):
    cell: Annotated[Cell, BeforeValidator(_shared)]
    measurement: _MarkedMeasurement | None = None
    environment: Annotated[Environment | None, BeforeValidator(_shared)] = None


class _Texts(dict[bytes, T]):
    """Values of JSON texts, each parsed at its first lookup."""

    def __init__(self, kind: TypeAdapter[T]) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, text: bytes) -> T:
        value = self[text] = self._kind.validate_json(text)
        return value


class LineReader:
    """Reads the observations of one log, twice as fast as separate lines.

    Args:
        readings: whether to keep warm-up steps, energy and the readings of the GPU's sensors. Only
            reports show them, and they are a third of a long log's memory.
        steps: whether to keep every timed step; otherwise their median stands for them, which takes
            a tenth of the memory away.
    """

    def __init__(self, *, readings: bool = True, steps: bool = True) -> None:
        self._readings = readings
        self._steps = steps
        self._field_sets: dict[frozenset[str], set[str]] = {}
        self._cells = _Texts(TypeAdapter(Cell))
        self._places: _Texts[Environment | None] = _Texts(TypeAdapter(Environment | None))
        self._models: _Texts[Built | None] = _Texts(TypeAdapter(Built | None))

    def observation(self, line: bytes) -> Observation:
        """Parse one line; lines share objects for equal cells, environments and built models.

        Raises:
            ValidationError: the line is no observation.
        """
        try:
            marked = self._marked(line)
        except ValidationError:
            marked = None
        # Lines in another spacing or order parse here, and errors get their messages here.
        return Observation.model_validate_json(line) if marked is None else marked

    def _marked(self, line: bytes) -> Observation | None:
        """Parse a line with its fields in the written order; None for any other line.

        The separators below cannot occur inside a JSON string, where quotation marks are escaped.
        So a line is valid if each part cut out is valid and the rest, with placeholders for the
        parts, is an observation.
        """
        purpose = line.find(b',"purpose":"')
        environment = line.rfind(b',"environment":')
        started = line.rfind(b',"started_at":"')
        if not line.startswith(b'{"cell":') or not 0 < purpose < environment < started:
            return None
        shared: dict[str, object] = {
            "cell": self._cells[line[8:purpose]],
            "environment": self._places[line[environment + 15 : started]],
        }
        rest = line[purpose:environment]
        built, error = rest.find(b',"built":'), rest.find(b',"relative_error":')
        if 0 < built < error:
            shared["built"] = self._models[rest[built + 9 : error]]
            head = rest[:built] if self._readings else _without_readings(rest[:built])
            head = head if self._steps else _with_median(head)
            rest = b'%b,"built":0%b' % (head, rest[error:])
        text = b'{"cell":0%b,"environment":0%b' % (rest, line[started:])
        marked = _MarkedObservation.model_validate_json(text, context=shared)
        # Records of two classes are never equal, so the result gets the class that others have.
        object.__setattr__(marked, "__class__", Observation)
        self._share_field_set(marked)
        if marked.measurement is not None:
            object.__setattr__(marked.measurement, "__class__", Measurement)
            self._share_field_set(marked.measurement)
            if marked.measurement.memory is not None:
                self._share_field_set(marked.measurement.memory)
        return marked

    def _share_field_set(self, record: BaseModel) -> None:
        """Let records share the set of the fields that they were given.

        Each would have one of its own, which takes as much memory as its values.
        """
        given = record.model_fields_set
        shared = self._field_sets.setdefault(frozenset(given), given)
        object.__setattr__(record, "__pydantic_fields_set__", shared)


def _with_median(head: bytes) -> bytes:
    """A line up to the built model, with the median of its steps in their place."""
    start, end = head.find(STEPS) + len(STEPS), head.find(b',"stop_reason":')
    if not len(STEPS) <= start < end:
        return head
    steps = SECONDS.validate_json(head[start:end])
    if not steps:
        return head
    return b"%b[%b]%b" % (head[:start], repr(statistics.median(steps)).encode(), head[end:])


def _without_readings(head: bytes) -> bytes:
    """A line up to the built model, without its readings."""
    warmup, steps = head.find(b',"warmup_seconds":'), head.find(b',"step_seconds":')
    energy = head.find(b',"energy_joules":')
    return head[:warmup] + head[steps:energy] if 0 < warmup < steps < energy else head
