"""Largest batches foretold by the other cells: right where memory is a line, silent else."""

import pytest
from builders.observations import MIB, measurement, observation, tiny_cell

from fitting.largest_batch_check import held_out_largest_batches
from trials.records.observation import Observation, Outcome

LIMIT = 64 * MIB
MODEL = 5 * MIB
OF_A_TOKEN = MIB // 20


def seen(seq_len: int, *, fills: float = 0.9, longer: int = 0) -> list[Observation]:
    """Every batch that fits into a part of the limit, and the first that does not."""
    cell = tiny_cell(seq_len=seq_len)
    largest = int((fills * LIMIT - MODEL) / (OF_A_TOKEN * seq_len))
    probes = [
        observation(
            size,
            cell=cell,
            memory_limit_bytes=LIMIT,
            measurement=measurement(MODEL + OF_A_TOKEN * size * seq_len + longer),
        )
        for size in range(1, largest + 1)
    ]
    miss = observation(largest + 1, Outcome.OUT_OF_MEMORY, cell=cell, memory_limit_bytes=LIMIT)
    return [*probes, miss]


def test_a_cell_is_foretold_by_the_others_alone() -> None:
    """What an allocator keeps of the limit is learned from them; its own probes change nothing."""
    probes = [*seen(16), *seen(32), *seen(64)]
    told = held_out_largest_batches(probes)
    for seq_len in (16, 32, 64):
        found = max(o.batch_size for o in seen(seq_len) if o.outcome is Outcome.FITS)
        foretold = told[tiny_cell(seq_len=seq_len)]
        assert foretold.low <= found <= foretold.high
        assert foretold.value == pytest.approx(found, rel=0.03)
    other = held_out_largest_batches([*seen(16), *seen(32), *seen(64, fills=0.4, longer=MIB)])
    assert other[tiny_cell(seq_len=64)] == told[tiny_cell(seq_len=64)]


def test_parts_of_the_limit_that_differ_widen_the_interval() -> None:
    """Where the others filled more or less of it."""
    alike = held_out_largest_batches([*seen(16), *seen(32), *seen(64)])[tiny_cell(seq_len=64)]
    apart = held_out_largest_batches([*seen(16, fills=0.7), *seen(32), *seen(64)])[
        tiny_cell(seq_len=64)
    ]
    assert apart.low < alike.low
    assert apart.high >= alike.value


def test_nothing_is_foretold_of_a_cell_alone() -> None:
    """Nor from others whose limit was never found."""
    assert held_out_largest_batches(seen(16)) == {}
    open_ended = [o for o in seen(32) if o.outcome is Outcome.FITS]
    assert tiny_cell(seq_len=16) not in held_out_largest_batches([*seen(16), *open_ended])
