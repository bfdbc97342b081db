"""A step of the project takes the memory of ``trl.SFTTrainer``'s, and has its loss."""

from dataclasses import replace

import pytest
from builders.long_cases import long_cases
from trainer_reference.cells import (
    COMPARED,
    IN_SMALL_STEPS,
    OTHER_MODELS,
    QUICK,
    QUICK_ROUTERS,
    QUICK_STEPS,
    ROUTERS,
    Compare,
    ReferenceCell,
)

PEAK_TOLERANCE = 0.005

pytestmark = IN_SMALL_STEPS
OF_FEW_STEPS = (*QUICK, *OTHER_MODELS, *QUICK_ROUTERS)
EACH_RUN = (*QUICK[:3], QUICK[-1], QUICK_ROUTERS[1])
"""Each method, precision and loss, and the loss of routers."""


@pytest.mark.parametrize(
    "cell",
    [*EACH_RUN, *long_cases(cell for cell in OF_FEW_STEPS if cell not in EACH_RUN)],
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
    [*(cell for cell in COMPARED if cell not in QUICK), *ROUTERS],
    ids=lambda cell: cell.key,
)
def test_every_combination_of_axes_equals_the_trainers(
    cell: ReferenceCell, compare: Compare
) -> None:
    """The rest of the matrix, in ten steps."""
    compare(cell, PEAK_TOLERANCE)
