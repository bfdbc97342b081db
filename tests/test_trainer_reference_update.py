"""GRPO's update takes the memory of TRL's trainer, and has its loss."""

from pathlib import Path

import pytest
from trainer_reference.cells import QUICK_UPDATES, UPDATES, ReferenceCell

PEAK_TOLERANCE = 0.01

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`.*` is deprecated and will be removed in v6:FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    from trainer_reference.models import write_model  # noqa: PLC0415 - seconds

    folder = tmp_path_factory.mktemp("models")
    write_model("llama", folder)
    return folder


@pytest.mark.parametrize("cell", QUICK_UPDATES, ids=lambda cell: cell.key)
def test_measured_and_simulated_updates_equal_the_trainers(
    cell: ReferenceCell, folder: Path
) -> None:
    """Same weights, completions, advantages and log-probabilities of a sampler: ten steps each."""
    compare(cell, folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [c for c in UPDATES if c not in QUICK_UPDATES], ids=lambda cell: cell.key
)
def test_every_combination_of_axes_equals_the_trainers(cell: ReferenceCell, folder: Path) -> None:
    """The rest of the matrix."""
    compare(cell, folder)


def compare(cell: ReferenceCell, folder: Path) -> None:
    """Compare ten steps from the same weights, on the same completions."""
    from trainer_reference import comparison  # noqa: PLC0415 - seconds

    comparison.compare(cell, folder, peak_tolerance=PEAK_TOLERANCE)
