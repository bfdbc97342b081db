"""A step with a variant of weights, adapters, optimizer or batches equals ``trl.SFTTrainer``'s."""

from dataclasses import replace

import pytest
from builders.long_cases import long_cases
from trainer_reference.cells import (
    ADAFACTOR,
    COMPARED_ADAPTERS,
    COMPARED_FOREACH,
    COMPARED_OFFLOADED,
    COMPARED_QUANTISED,
    EIGHT_BIT,
    FOREACH,
    FURTHER,
    IN_SMALL_STEPS,
    OFFLOADED,
    PACKED,
    PACKED_QUICK,
    QUANTISED,
    QUICK_ADAPTERS,
    QUICK_STEPS,
    TORCHAO,
    Compare,
    ReferenceCell,
)

PEAK_TOLERANCE = 0.005

pytestmark = IN_SMALL_STEPS
VARIANTS = (
    *(*QUANTISED, *FOREACH, *ADAFACTOR, *EIGHT_BIT),
    *(*QUICK_ADAPTERS, *PACKED_QUICK, *OFFLOADED),
)
QUICK = (QUANTISED[1], EIGHT_BIT[0], QUICK_ADAPTERS[4], PACKED_QUICK[0], OFFLOADED[0])
"""A cell each of int8 weights, of 8-bit state, of DoRA, of packing and of offloading."""


@pytest.mark.parametrize(
    "cell",
    [*QUICK, *long_cases(cell for cell in VARIANTS if cell not in QUICK)],
    ids=lambda cell: cell.key,
)
def test_measured_and_simulated_steps_equal_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """Same weights, examples, learning rate and optimizer: a few steps of each."""
    compare(replace(cell, steps=QUICK_STEPS), PEAK_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [
        *(cell for cell in COMPARED_ADAPTERS if cell not in QUICK_ADAPTERS),
        *(cell for cell in COMPARED_QUANTISED if cell not in QUANTISED),
        *(cell for cell in COMPARED_FOREACH if cell not in FOREACH),
        *(cell for cell in PACKED if cell not in PACKED_QUICK),
        *COMPARED_OFFLOADED,
        *FURTHER,
        *TORCHAO,
    ],
    ids=lambda cell: cell.key,
)
def test_every_combination_of_axes_equals_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """The rest of the matrix, in ten steps."""
    compare(cell, PEAK_TOLERANCE)
