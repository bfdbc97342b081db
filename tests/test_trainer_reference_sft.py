"""A step of the project takes the memory of ``trl.SFTTrainer``'s, and has its loss."""

from pathlib import Path

import pytest
from trainer_reference.cells import (
    COMPARED,
    OTHER_MODELS,
    QUICK,
    QUICK_ROUTERS,
    ROUTERS,
    ReferenceCell,
)

PEAK_TOLERANCE = 0.005

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:OptimState.bit does not implement:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny models."""
    from trainer_reference.models import CONFIGURATIONS, write_model  # noqa: PLC0415 - seconds

    folder = tmp_path_factory.mktemp("models")
    for name in CONFIGURATIONS:
        write_model(name, folder)
    return folder


@pytest.mark.parametrize(
    "cell",
    [*QUICK, *OTHER_MODELS, *QUICK_ROUTERS],
    ids=lambda cell: cell.key,
)
def test_measured_and_simulated_steps_equal_the_trainers(cell: ReferenceCell, folder: Path) -> None:
    """Same weights, examples, learning rate and optimizer: ten steps of each."""
    compare(cell, folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [*(cell for cell in COMPARED if cell not in QUICK), *ROUTERS],
    ids=lambda cell: cell.key,
)
def test_every_combination_of_axes_equals_the_trainers(cell: ReferenceCell, folder: Path) -> None:
    """The rest of the matrix."""
    compare(cell, folder)


def compare(cell: ReferenceCell, folder: Path) -> None:
    """Compare ten steps from the same weights, on the same examples."""
    from trainer_reference import comparison  # noqa: PLC0415 - seconds

    comparison.compare(cell, folder, peak_tolerance=PEAK_TOLERANCE)
