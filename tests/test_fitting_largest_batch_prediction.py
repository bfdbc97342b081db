"""Largest batch sizes predicted from other cells."""

import pytest
from builders.observations import MIB, environment, measurement, observation, tiny_cell

from fitting.largest_batch_prediction import held_out_largest_batches, likely_largest
from trials.records.observation import Basis, Observation, Outcome
from trials.search import LikelyLargest

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


def test_drawn_lengths_of_another_software_are_no_cell_of_it() -> None:
    """A report on a run whose software changed before lengths were drawn does not stop there."""
    probes = [*probes_up_to_limit(16), *probes_up_to_limit(32)]
    newer = environment(versions=(("torch", "99"),))
    drawn = observation(2, purpose="drawn", lengths=(8, 16), environment=newer, cell=tiny_cell())
    assert held_out_largest_batches([*probes, drawn]) == held_out_largest_batches(probes)


def likely_at(seq_len: int, probes: list[Observation]) -> LikelyLargest:
    """Estimate of a cell with the same limit as the probes."""
    likely = likely_largest(tiny_cell(seq_len=seq_len), LIMIT, probes)
    assert likely is not None
    return likely


@pytest.mark.parametrize("seq_len", [8, 24, 48, 100])
def test_a_cell_without_probes_has_an_estimate_from_other_lengths(seq_len: int) -> None:
    """Its fixed share is that of the model at the largest batch, and its own probes add nothing."""
    largest = int((0.9 * LIMIT - MODEL) / (OF_A_TOKEN * seq_len))
    likely = likely_at(seq_len, [*probes_up_to_limit(16), *probes_up_to_limit(32)])
    assert likely.batch == pytest.approx(largest, abs=1)
    peak = MODEL + likely.batch * OF_A_TOKEN * seq_len
    assert likely.fixed_share == pytest.approx(MODEL / peak, rel=1e-3)
    assert likely.error >= 0.06
    own = probes_up_to_limit(seq_len, fills=0.4, longer=MIB)
    others = [*probes_up_to_limit(16), *probes_up_to_limit(32)]
    assert likely_at(seq_len, [*own, *others]) == likely


def test_an_estimate_on_another_gpu_follows_its_memory() -> None:
    """Peaks are those of the measured GPU, the limit is that of the other."""
    other = tiny_cell(seq_len=16).model_copy(update={"gpu": "A40"})
    likely = likely_largest(other, 2 * LIMIT, probes_up_to_limit(16))
    assert likely is not None
    assert likely.batch == pytest.approx((0.9 * 2 * LIMIT - MODEL) / (OF_A_TOKEN * 16), abs=2)


def test_an_uncertain_estimate_has_a_larger_error() -> None:
    """A search then begins at the lower end of the 90 % interval."""
    alike = [*probes_up_to_limit(16), *probes_up_to_limit(32)]
    apart = [*probes_up_to_limit(16, fills=0.7), *probes_up_to_limit(32)]
    assert likely_at(64, alike).error == pytest.approx(0.06, abs=0.02)
    assert 0.1 < likely_at(64, apart).error < 0.5


def test_an_estimate_needs_measured_probes_of_the_same_memory_law() -> None:
    """Simulated probes, other models and a limit below one example give none."""
    probes = probes_up_to_limit(16)
    cell = tiny_cell(seq_len=32)
    assert likely_largest(cell, LIMIT, []) is None
    assert likely_largest(tiny_cell(seq_len=16), LIMIT, probes) is None
    assert likely_largest(cell, MODEL, probes) is None
    one = likely_largest(cell, int((MODEL + 1.5 * OF_A_TOKEN * 32) / 0.9), probes)
    assert one is not None
    assert one.batch == 1
    assert likely_largest(tiny_cell("mixtral-tiny", seq_len=32), LIMIT, probes) is None
    simulated = [o.model_copy(update={"basis": Basis.SIMULATED}) for o in probes]
    assert likely_largest(cell, LIMIT, simulated) is None
    mostly = environment(versions=(("python", "3.11.1"), ("torch", "2.8.0")))
    longer = [*probes_up_to_limit(8, longer=MIB), *probes_up_to_limit(64, longer=MIB)]
    elsewhere = [o.model_copy(update={"environment": mostly}) for o in longer]
    assert likely_largest(cell, LIMIT, [*probes, *elsewhere]) == likely_at(32, elsewhere)
