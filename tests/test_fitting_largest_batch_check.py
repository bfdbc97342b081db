"""Largest batch sizes predicted from other cells."""

import pytest
from builders.observations import MIB, measurement, observation, tiny_cell

from fitting.largest_batch_check import held_out_largest_batches
from trials.records.observation import Observation, Outcome

LIMIT = 64 * MIB
MODEL = 5 * MIB
OF_A_TOKEN = MIB // 20


def probes_up_to_limit(seq_len: int, *, fills: float = 0.9, longer: int = 0) -> list[Observation]:
    """Probes of every batch size that fits ``fills`` of the limit, and the first that does not."""
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


def test_a_cell_is_predicted_from_the_other_cells_alone() -> None:
    """The usable share of the limit comes from other cells; own probes change nothing."""
    probes = [*probes_up_to_limit(16), *probes_up_to_limit(32), *probes_up_to_limit(64)]
    predicted_batches = held_out_largest_batches(probes)
    for seq_len in (16, 32, 64):
        largest = max(
            o.batch_size for o in probes_up_to_limit(seq_len) if o.outcome is Outcome.FITS
        )
        prediction = predicted_batches[tiny_cell(seq_len=seq_len)]
        assert prediction.low <= largest <= prediction.high
        assert prediction.value == pytest.approx(largest, rel=0.03)
    other = held_out_largest_batches(
        [
            *probes_up_to_limit(16),
            *probes_up_to_limit(32),
            *probes_up_to_limit(64, fills=0.4, longer=MIB),
        ]
    )
    assert other[tiny_cell(seq_len=64)] == predicted_batches[tiny_cell(seq_len=64)]


def test_different_usable_shares_of_the_limit_widen_the_interval() -> None:
    """Cells that filled more or less of the limit make the prediction less certain."""
    alike = held_out_largest_batches(
        [*probes_up_to_limit(16), *probes_up_to_limit(32), *probes_up_to_limit(64)]
    )[tiny_cell(seq_len=64)]
    apart = held_out_largest_batches(
        [*probes_up_to_limit(16, fills=0.7), *probes_up_to_limit(32), *probes_up_to_limit(64)]
    )[tiny_cell(seq_len=64)]
    assert apart.low < alike.low
    assert apart.high >= alike.value


def test_a_cell_without_others_has_no_prediction() -> None:
    """Cells whose limit was not reached do not count as others."""
    assert held_out_largest_batches(probes_up_to_limit(16)) == {}
    open_ended = [o for o in probes_up_to_limit(32) if o.outcome is Outcome.FITS]
    assert tiny_cell(seq_len=16) not in held_out_largest_batches(
        [*probes_up_to_limit(16), *open_ended]
    )
