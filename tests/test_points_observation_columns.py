"""Observations as columns: their values, and the memory of long logs."""

import tracemalloc
from pathlib import Path

import numpy as np
from builders.observations import MIB, environment, measurement, observation, tiny_cell
from builders.runs import made_run
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting.numerics.least_squares import solve_linear
from fitting.points.fit_points import limits
from fitting.points.observation_columns import BASES, NOWHERE, columns_of
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import MEMORY_MISSES, Basis, Observation, Outcome, largest_batch

BYTES_A_PROBE = 400  # ten numbers, twice while an array grows; a record takes 14,000


def test_a_row_has_the_values_of_its_probe() -> None:
    """The step time is the median; a probe without a measurement has nan."""
    timed = measurement(3 * MIB, (0.4, 0.1, 0.3, 0.2))
    columns = columns_of(
        [
            observation(8, purpose="ladder", measurement=timed),
            observation(9, Outcome.OUT_OF_MEMORY, cell=tiny_cell(seq_len=32)),
            observation(9, Outcome.FAILED, environment=None),
        ]
    )
    assert columns.cells == (tiny_cell(), tiny_cell(seq_len=32))
    assert columns.environments == (environment(),)
    assert columns.cell.tolist() == [0, 1, 0]
    assert columns.environment.tolist() == [0, 0, NOWHERE]
    assert {BASES[place] for place in columns.basis} == {Basis.MEASURED}
    assert columns.timed.tolist() == [True, False, False]
    assert columns.batch_size.tolist() == [8, 9, 9]
    assert columns.step_seconds[0] == 0.25
    assert columns.peak_bytes[0] == 3 * MIB
    assert np.isnan([columns.step_seconds[1], columns.peak_bytes[1], columns.model_bytes[2]]).all()


def most_bytes(run: RunFolder, probes: int) -> int:
    """Peak bytes while a log with this number of probes of ten cells is read into columns."""
    timed = measurement(MIB, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    lines = [
        observation(1, cell=tiny_cell(seq_len=length), purpose="ladder", measurement=timed)
        .model_dump_json()
        .replace('"repeat":0', '"repeat":%d')
        for length in range(1, 11)
    ]
    text = "".join(f"{lines[probe % 10] % probe}\n" for probe in range(probes))
    (Path(str(run.path)) / "observations.jsonl").write_text(text, encoding="utf-8")
    del text
    tracemalloc.start()
    columns = columns_of(run.each_observation())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(columns.cell) == probes
    return most


def test_memory_grows_by_a_row_of_numbers_per_probe(tmp_path: Path) -> None:
    """A million probes take a few hundred MiB, not fourteen GiB."""
    run = made_run(tmp_path / "run", measured=0)
    most_bytes(run, 20)  # allocates what the first read allocates
    few, many = most_bytes(run, 1000), most_bytes(run, 5000)
    assert (many - few) / 4000 < BYTES_A_PROBE


def test_memory_of_a_fit_grows_linearly_with_its_points() -> None:
    """A matrix of all pairs of 4,000 points would take 128 MB."""
    size = np.arange(1.0, 4001.0)
    tracemalloc.start()
    solution = solve_linear(np.stack([np.ones(4000), size], axis=1), 3 + 2 * size)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert solution.status.is_usable
    assert most < 4000 * 500


VERDICTS = st.tuples(
    st.integers(1, 8), st.sampled_from([Outcome.FITS, *MEMORY_MISSES, Outcome.FAILED])
)


@given(st.lists(VERDICTS, min_size=1, max_size=12))
@settings(max_examples=200, derandomize=True)
def test_limits_to_fit_are_the_largest_batches_of_the_searches(
    tried: list[tuple[int, Outcome]],
) -> None:
    """Only limits that memory set count, and only if at least one example fits."""
    probes: list[Observation] = [
        observation(size, outcome, environment=environment(), attempt=place)
        for place, (size, outcome) in enumerate(tried, start=1)
    ]
    result = largest_batch(probes)
    (points,) = limits(columns_of(probes))
    is_limit = result is not None and result[0] >= 1 and result[1] is not None
    assert points.largest_batch.tolist() == ([result[0]] if is_limit and result else [])
    assert points.cell_count == 1
