"""The table of measured results is made from the kept observations alone."""

from builders.observations import measurement, observation, tiny_cell
from measured_table import measured_block

from trials.records.cell import Cell
from trials.records.observation import Observation, Outcome


def observations_of(cell: Cell) -> list[Observation]:
    """Two fits, one of them timed at 50 ms a step, and an out-of-memory outcome."""
    return [
        observation(1, cell=cell),
        observation(2, cell=cell, purpose="ladder", measurement=measurement(1, (0.05,) * 6)),
        observation(3, Outcome.OUT_OF_MEMORY, cell=cell),
    ]


def test_a_row_has_the_cell_its_results_and_the_date() -> None:
    """A capped GPU has a largest batch size and no speed of its own."""
    own = tiny_cell().model_copy(update={"model": "llama-2-7b", "gpu": "H200-SXM"})
    capped = own.model_copy(update={"gpu": "A40", "capped_on": "H200-SXM"})
    text = measured_block([*observations_of(own), observation(4, cell=capped)])
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[2:4]]
    stem = ["llama-2-7b", "full-fp32", "none", "16"]
    assert rows == [
        ["H200-SXM", *stem, "2", "40", "2026-11-20"],
        ["A40, as if on H200-SXM", *stem, "not known", "not measured", "2026-11-20"],
    ]
    assert "llama-2-7b" not in text.splitlines()[-1]


def test_measured_values_stand_beside_simulated_ones() -> None:
    """The comparison is made at the largest timed batch size, for GPUs without a cap only."""
    own = tiny_cell().model_copy(update={"gpu": "A40"})
    gib = measurement(2**30, (0.05,) * 6)
    timed = observation(2, cell=own, purpose="ladder", measurement=gib)
    text = measured_block([timed, *observations_of(tiny_cell())])
    _, _, compared = text.partition("Measured against simulated")
    rows = [line for line in compared.splitlines() if line.startswith("| A40")]
    assert len(rows) == 1
    key, batch, peak, simulated_peak, step, simulated_step = (
        cell.strip() for cell in rows[0].split("|")[1:-1]
    )
    assert (key, batch, peak, step) == (own.key, "2", "1.00 GiB", "0.05 s")
    assert "GiB (-" in simulated_peak
    assert simulated_step.endswith("%)")


def test_models_that_have_run_on_no_gpu_are_named() -> None:
    """The table also lists the models without any measurement."""
    text = measured_block([])
    assert text.startswith("Models that this project has not yet run")
    assert "blackmamba-2.8b" in text
    assert "mixtral-8x7b" in text
    assert "tiny" not in text
