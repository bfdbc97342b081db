"""A step of a preference task takes the memory of TRL's trainer, and has its loss."""

from dataclasses import replace

import pytest
from builders.long_cases import long_cases
from trainer_reference.cells import (
    IN_SMALL_STEPS,
    PREFERENCE,
    PREFERENCE_ROUTERS,
    QUICK_PREFERENCE,
    QUICK_STEPS,
    Compare,
    ReferenceCell,
)

PEAK_TOLERANCE = 0.01

pytestmark = IN_SMALL_STEPS
QUICK = (QUICK_PREFERENCE[2], QUICK_PREFERENCE[3], QUICK_PREFERENCE[5], QUICK_PREFERENCE[6])
"""A cell of each task."""


@pytest.mark.parametrize(
    "cell",
    [*QUICK, *long_cases(cell for cell in QUICK_PREFERENCE if cell not in QUICK)],
    ids=lambda cell: cell.key,
)
def test_measured_and_simulated_steps_equal_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """Same weights, pairs, learning rate and optimizer: a few steps of each."""
    compare(replace(cell, steps=QUICK_STEPS), PEAK_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [c for c in (*PREFERENCE, *PREFERENCE_ROUTERS) if c not in QUICK_PREFERENCE],
    ids=lambda cell: cell.key,
)
def test_every_combination_of_axes_equals_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """The rest of the matrix, in ten steps."""
    compare(cell, PEAK_TOLERANCE)
