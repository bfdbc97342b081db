"""A step of the project takes the memory of ``trl.SFTTrainer``'s, and has its loss."""

from pathlib import Path

import pytest
from trainer_reference.cells import (
    COMPARED,
    COMPARED_ADAPTERS,
    FOREACH,
    OFFLOADED,
    OTHER_MODELS,
    PACKED,
    PACKED_QUICK,
    QUANTISED,
    QUICK,
    QUICK_ADAPTERS,
    QUICK_ROUTERS,
    ROUTERS,
    TORCHAO,
    ReferenceCell,
)
from trainer_reference.offloading import host_apart

PEAK_TOLERANCE = 0.005
LOSS_TOLERANCE = 1e-5

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
    [*QUICK, *QUANTISED, *FOREACH, *OTHER_MODELS, *QUICK_ADAPTERS, *QUICK_ROUTERS, *PACKED_QUICK],
    ids=lambda cell: cell.key,
)
def test_measured_and_simulated_steps_equal_the_trainers(cell: ReferenceCell, folder: Path) -> None:
    """Same weights, examples, learning rate and optimizer: ten steps of each."""
    compare(cell, folder)


@pytest.mark.parametrize("cell", OFFLOADED, ids=lambda cell: cell.key)
def test_steps_with_offloaded_activations_equal_the_trainers(
    cell: ReferenceCell, folder: Path
) -> None:
    """TRL's context manager on real tensors, counted from outside, and under the trace."""
    from trainer_reference.project import measure, simulated_peak  # noqa: PLC0415 - seconds
    from trainer_reference.trainer import train  # noqa: PLC0415 - as above

    with host_apart():
        run = train(cell, folder)
        counter, losses = measure(cell, folder, run)
    assert counter.peak_bytes == pytest.approx(run.peak_bytes, rel=PEAK_TOLERANCE)
    assert simulated_peak(cell, folder) == pytest.approx(run.peak_bytes, rel=PEAK_TOLERANCE)
    assert losses == pytest.approx(run.losses, rel=LOSS_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [
        cell
        for cell in (*COMPARED, *COMPARED_ADAPTERS, *PACKED, *ROUTERS, *TORCHAO)
        if cell not in {*QUICK, *PACKED_QUICK}
    ],
    ids=lambda cell: cell.key,
)
def test_every_combination_of_axes_equals_the_trainers(cell: ReferenceCell, folder: Path) -> None:
    """The rest of the matrix."""
    compare(cell, folder)


def compare(cell: ReferenceCell, folder: Path) -> None:
    """Compare ten steps from the same weights, on the same examples."""
    from trainer_reference.project import check_equal  # noqa: PLC0415 - seconds
    from trainer_reference.trainer import train  # noqa: PLC0415 - as above

    check_equal(train(cell, folder), cell, folder, peak_tolerance=PEAK_TOLERANCE)
