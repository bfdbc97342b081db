"""GRPO's update takes the memory of TRL's trainer, and has its loss."""

from dataclasses import replace

import pytest
from builders.long_cases import long_cases
from trainer_reference.cells import (
    IN_SMALL_STEPS,
    QUICK_STEPS,
    QUICK_UPDATES,
    UPDATES,
    Compare,
    ReferenceCell,
)

PEAK_TOLERANCE = 0.01

pytestmark = IN_SMALL_STEPS


@pytest.mark.parametrize(
    "cell", [QUICK_UPDATES[0], *long_cases(QUICK_UPDATES[1:])], ids=lambda cell: cell.key
)
def test_measured_and_simulated_updates_equal_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """Same weights, completions, advantages and log-probabilities of a sampler, for a few steps."""
    compare(replace(cell, steps=QUICK_STEPS), PEAK_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [c for c in UPDATES if c not in QUICK_UPDATES], ids=lambda cell: cell.key
)
def test_every_combination_of_axes_equals_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """The rest of the matrix, in ten steps."""
    compare(cell, PEAK_TOLERANCE)
