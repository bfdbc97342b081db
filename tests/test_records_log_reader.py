"""Log lines read with shared parts: the same records and mistakes as line by line."""

import json

import pytest
from builders.observations import MIB, measurement, observation, recipe, tiny_cell
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trials.records.collectives import CollectiveCount, CollectiveTime
from trials.records.log_reader import LineReader
from trials.records.observation import (
    DeviceReading,
    Measurement,
    MemoryReading,
    Observation,
    Outcome,
    RankReading,
)

STEPS = (0.1, 0.2, 0.15)
READING = DeviceReading(sm_clock_mhz=1410, throttle_reasons=("power",))
TIMED = measurement(MIB, STEPS).model_copy(
    update={"before": READING, "after": READING, "warmup_seconds": (0.3,)}
)
OF_RANKS = TIMED.model_copy(
    update={
        "ranks": (RankReading(rank=0, peak_allocated_bytes=MIB, step_seconds=STEPS),),
        "collectives": (CollectiveTime(collective="all-reduce", buffer_bytes=MIB, seconds=0.1),),
        "host_bytes": 7 * MIB,
        "step_collectives": (
            CollectiveCount(collective="all-gather", count=3, buffer_bytes=5 * MIB),
        ),
        "exposed_seconds": 0.02,
    }
)
KINDS = (
    observation(8, purpose="ladder", measurement=TIMED),
    observation(9, measurement=TIMED.model_copy(update={"built": None, "relative_error": 0.1})),
    observation(16, Outcome.OUT_OF_MEMORY, detail='says ,"environment":{} and ,"built":1'),
    observation(4, measurement=OF_RANKS),
    observation(16, Outcome.HOST_OUT_OF_MEMORY, environment=None),
    observation(1, cell=tiny_cell("mixtral-tiny", recipe("lora"), active=2)),
)


def line_of(one: Observation) -> bytes:
    """A record as the run's writer formats it."""
    return one.model_dump_json().encode() + b"\n"


LINES = tuple(map(line_of, KINDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: f"{one.outcome}-{one.batch_size}")
def test_records_read_back_as_written(kind: Observation) -> None:
    """Records of every kind are equal, read once or twice."""
    reader = LineReader()
    for _ in range(2):
        read = reader.observation(line_of(kind))
        assert read == kind
        assert read.model_dump_json() == kind.model_dump_json()
        assert type(read) is Observation
        assert type(read.measurement) is type(kind.measurement)


def test_equal_cells_environments_and_built_models_are_shared() -> None:
    """A million lines hold as many objects as there are different values."""
    reader = LineReader()
    one, other = (reader.observation(line_of(observation(size))) for size in (1, 2))
    assert (one.batch_size, other.batch_size) == (1, 2)
    assert one.cell is other.cell
    assert one.environment is other.environment
    assert one.measurement is not None
    assert other.measurement is not None
    assert one.measurement.built is other.measurement.built


def test_cells_of_the_specification_are_those_of_its_observations() -> None:
    """A line in their own format, and one that older programs wrote, have a cell equal to them."""
    cell = KINDS[0].cell.model_copy()
    reader = LineReader(cells=[cell])
    assert reader.observation(LINES[0]).cell is cell
    assert reader.observation(LINES[0].replace(b'"capped_on":null,', b"")).cell == cell


def test_a_line_has_its_own_cell_whatever_the_line_before() -> None:
    """Lines of several GPUs alternate; a line without a cell is a mistake, also after others."""
    reader = LineReader()
    for line, kind in [(LINES[0], KINDS[0]), (LINES[-1], KINDS[-1])] * 2:
        assert reader.observation(line) == kind
    cell = KINDS[-1].cell.model_dump_json().encode()
    assert cell in LINES[-1]
    with pytest.raises(ValidationError, match="cell"):
        reader.observation(LINES[-1].replace(b'"cell":%b,' % cell, b""))


def plain(part: object) -> object:
    """Return the fields of a record, or of a line that stands for one, as dictionaries."""
    kind = {"_Line": Observation, "_Measured": Measurement, "_Memory": MemoryReading}
    record = kind.get(type(part).__name__, type(part))
    names = getattr(record, "model_fields", None)
    return part if names is None else {name: plain(getattr(part, name)) for name in names}


def test_readings_can_be_left_out() -> None:
    """Only they are missing then, of these cells alone."""
    reader = LineReader(brief=[KINDS[0].cell])
    bare = {"warmup_seconds": (), "energy_joules": None, "before": None, "after": None}
    for kind in KINDS[:-1]:
        measured = kind.measurement
        if measured is not None:
            measured = measured.model_copy(update=bare)
        expected = kind.model_copy(update={"measurement": measured})
        assert plain(reader.observation(line_of(kind))) == plain(expected)
    assert KINDS[-1].cell != KINDS[0].cell
    assert reader.observation(LINES[-1]) == KINDS[-1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: f"{one.outcome}-{one.batch_size}")
def test_a_line_that_stands_for_a_record_has_its_properties(kind: Observation) -> None:
    """So plans, laws and prices make no difference between them."""
    line = LineReader(brief=[kind.cell]).observation(line_of(kind))
    properties = [name for name, value in vars(Observation).items() if isinstance(value, property)]
    assert "micro_batch_seconds" in properties
    for name in properties:
        assert plain(getattr(line, name)) == plain(getattr(kind, name))


def test_the_median_of_steps_can_stand_for_them() -> None:
    """It is checked as the steps are; a probe without timed steps keeps none."""
    reader = LineReader(brief=[KINDS[0].cell], steps=False)
    timed = reader.observation(LINES[0]).measurement
    assert timed is not None
    assert timed.step_seconds == (0.15,)
    assert plain(reader.observation(LINES[2])) == plain(KINDS[2])
    with pytest.raises(ValidationError, match="step_seconds"):
        reader.observation(LINES[0].replace(b"[0.1,0.2,0.15]", b'[0.1,"x",0.15]'))


def test_a_line_in_another_format_is_read() -> None:
    """Another program's spaces and key order, or an older version's missing field, are allowed."""
    reader, fields = LineReader(), json.loads(LINES[0])
    spaced = json.dumps(dict(sorted(fields.items())), indent=None).encode()
    del fields["cell"]["weights"], fields["repeat"], fields["measurement"]["energy_joules"]
    older = json.dumps(fields, separators=(",", ":")).encode()
    for line in (spaced, older):
        assert reader.observation(line).model_dump() == KINDS[0].model_dump()


def result_of(line: bytes, read: object) -> object:
    """Return the record, or the place and the message of its mistakes."""
    try:
        return read(line).model_dump()  # type: ignore[operator]
    except ValidationError as error:
        return [(mistake["loc"], mistake["msg"]) for mistake in error.errors(include_url=False)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"cell":{', b'{"cell":0,"x":{'),
        (b'"gpu":"cpu"', b'"gpu":"cpu","colour":"red"'),
        (b'"seq_len":16', b'"seq_len":-16'),
        (b',"purpose":"', b',"cell":0,"purpose":"'),
        (b'"built":{', b'"built":0,"built_":{'),
        (b'"layers":2', b'"layers":"two"'),
        (b'"sm_clock_mhz":1410', b'"sm_clock_mhz":"fast"'),
        (b'"throttle_reasons":["power"]', b'"throttle_reasons":["power"],"fan":1'),
        (b'"host":"here"', b'"host":5'),
        (b'"environment":{', b'"environment":0,"environment_":{'),
        (b'"step_seconds":[0.1', b'"step_seconds":[-0.1'),
        (b'"memory_steps":3', b'"memory_steps":"many"'),
        (b'"outcome":"FITS"', b'"outcome":"FLIES"'),
        (b',"started_at"', b',"another":1,"started_at"'),
        (b"}\n", b"}}\n"),
        (b"}\n", b"\n"),
    ],
)
def test_a_mistake_is_reported_as_for_a_single_line(old: bytes, new: bytes) -> None:
    """Similar valid lines before it change nothing, and the reader does not cache the mistake."""
    reader = LineReader()
    reader.observation(LINES[0])
    assert old in LINES[0]
    wrong = LINES[0].replace(old, new, 1)
    expected = result_of(wrong, Observation.model_validate_json)
    assert isinstance(expected, list)
    assert result_of(wrong, reader.observation) == result_of(wrong, reader.observation) == expected
    left_out = any({"before", "after", "built"} & {*place} for place, _ in expected)
    brief = LineReader(brief=[KINDS[0].cell])
    assert left_out or result_of(wrong, brief.observation) == expected
    assert reader.observation(LINES[0]).model_dump() == KINDS[0].model_dump()


@given(st.sampled_from(LINES), st.data())
@settings(max_examples=150, derandomize=True)
def test_a_damaged_line_is_treated_like_a_single_line(line: bytes, data: st.DataObject) -> None:
    """The damage removes bytes, or replaces them by those of another line; the line preceded it."""
    start = data.draw(st.integers(0, len(line) - 1))
    gone = data.draw(st.integers(0, 60))
    other = data.draw(st.sampled_from(LINES))
    place = data.draw(st.integers(0, len(other) - 1))
    put = other[place : place + data.draw(st.integers(0, 60))]
    damaged = line[:start] + put + line[start + gone :]
    reader = LineReader()
    reader.observation(line)
    expected = result_of(damaged, Observation.model_validate_json)
    assert result_of(damaged, reader.observation) == expected


def test_a_deeply_nested_line_is_a_mistake_like_others() -> None:
    """Whatever part of it is nested."""
    reader = LineReader()
    for before, after in ((b'{"cell":', b"}"), (b"", b"")):
        line = before + b"[" * 10_000 + b"]" * 10_000 + after + b"\n"
        with pytest.raises(ValidationError):
            reader.observation(line)
