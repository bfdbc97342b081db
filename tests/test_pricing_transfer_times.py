"""Start-up and checkpoints by the bytes of a model, computed by hand and counted."""

import pytest
import torch
from builders.observations import measurement, observation, recipe, tiny_cell
from builders.rankings import JOB, on_desk, ranked, timed

from orchestrator.pricing.transfer_times import (
    BOOT_MINUTES,
    CHECKPOINT_SECONDS,
    checkpoint_bytes,
    download_bytes,
    recorded_parameters,
    with_transfer_times,
)
from orchestrator.spec.job import Job, Overheads
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.built import ParameterCounts
from trials.records.model import find_model
from trials.training.finetune import FineTuning

OPEN = Job(examples=1000, epochs=1)
LORA = recipe("lora", precision="fp32-mixed-load")
FULL = recipe("full", precision="bf16-mixed")
ADAPTED_1B = ParameterCounts(total=1_011_000_000, trainable=11_000_000, four_bit=0)
WHOLE_70B = ParameterCounts(total=70_000_000_000, trainable=70_000_000_000, four_bit=0)


def times(
    recipe: Recipe, counts: ParameterCounts | None, layout: Parallel | None = None, job: Job = OPEN
) -> tuple[float | None, float | None]:
    """Minutes of start-up and seconds of a checkpoint."""
    overheads = with_transfer_times(job, recipe, counts, layout).overheads
    return overheads.startup_minutes, overheads.checkpoint_seconds


def test_a_small_adapter_is_saved_in_seconds_and_a_large_model_in_half_an_hour() -> None:
    """12 bytes of each trained weight: fp32 with both moments; 2 of each downloaded one."""
    assert checkpoint_bytes(LORA, ADAPTED_1B) == 12 * 11_000_000
    assert download_bytes(LORA, ADAPTED_1B) == 2_000_000_000
    startup, checkpoint = times(LORA, ADAPTED_1B)
    assert startup == pytest.approx(BOOT_MINUTES + (2 / 0.4 + 2 / 0.5) / 60, abs=0.05)
    assert checkpoint == CHECKPOINT_SECONDS
    startup, checkpoint = times(FULL, WHOLE_70B)
    assert startup == pytest.approx(BOOT_MINUTES + (140 / 0.4 + 140 / 0.5) / 60, abs=0.05)
    assert checkpoint == CHECKPOINT_SECONDS + 12 * 70 / 0.5


def test_given_times_are_flat_and_an_unknown_size_changes_nothing() -> None:
    """So a table, whose models are names alone, is priced at flat times."""
    stated = OPEN.model_copy(update={"overheads": Overheads(startup_minutes=3)})
    assert times(FULL, WHOLE_70B, job=stated) == (3, CHECKPOINT_SECONDS + 12 * 70 / 0.5)
    stated = OPEN.model_copy(update={"overheads": Overheads(checkpoint_seconds=0)})
    assert times(FULL, WHOLE_70B, job=stated)[1] == 0
    assert times(FULL, None) == (None, None)
    assert with_transfer_times(OPEN, LORA, ADAPTED_1B, None).overheads.checkpoint_minutes == 60
    assert Overheads().expected_startup_minutes == 10


@pytest.mark.parametrize(
    ("layout", "disks"),
    [
        (Parallel(gpus=16, strategy="ddp", nodes=2), 1),
        (Parallel(gpus=8, strategy="fsdp2"), 1),
        (Parallel(gpus=16, strategy="fsdp2", nodes=2), 2),
        (Parallel(gpus=32, strategy="hsdp", nodes=4, replicas=2), 2),
    ],
    ids=lambda one: one.key if isinstance(one, Parallel) else str(one),
)
def test_the_nodes_of_a_copy_write_their_shares(layout: Parallel, disks: int) -> None:
    """Copies of the model are saved once."""
    assert times(FULL, WHOLE_70B, layout)[1] == CHECKPOINT_SECONDS + 12 * 70 / 0.5 / disks


def test_deepspeed_saves_a_copy_of_the_weights_in_fp32() -> None:
    """Beside weights in bf16 and both moments, by every stage and on the host of one GPU."""
    in_bf16 = recipe("full", precision="bf16")
    assert checkpoint_bytes(in_bf16, WHOLE_70B) == 6 * 70e9
    for stage in ("deepspeed-zero1", "deepspeed-zero3"):
        assert checkpoint_bytes(in_bf16, WHOLE_70B, Parallel(gpus=8, strategy=stage)) == 14 * 70e9


def test_a_machine_of_ones_own_runs_already() -> None:
    """It loads the weights, and nothing boots."""
    own = with_transfer_times(OPEN, LORA, ADAPTED_1B, None, is_own=True).overheads
    assert own.startup_minutes == pytest.approx((2 / 0.4 + 2 / 0.5) / 60, abs=0.05)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "saved",
    [
        recipe("full", precision="bf16"),
        recipe("full", precision="bf16-mixed"),
        recipe("full", trained_layers=1, precision="bf16-mixed"),
        recipe("full", optimizer="sgd"),
        recipe("lora", precision="bf16-mixed", adapter_dtype="bf16"),
        recipe("lora", precision="fp32-mixed-load"),
    ],
    ids=lambda one: one.key,
)
def test_a_checkpoint_has_the_bytes_of_the_tensors_that_are_saved(saved: Recipe) -> None:
    """Those of the whole model or its adapters, and of the optimizer's state after a step."""
    cell = tiny_cell(recipe=saved)
    tuning = FineTuning(cell, find_model(cell.model), device=torch.device("cpu"), seed=0)
    tuning.step(tuning.tokens(2))
    tensors = [*(tuning.trainable if saved.has_adapters else tuning.model.parameters())]
    states = tuning.stepper.optimizer.state.values()
    tensors += [one for state in states for name, one in state.items() if name != "step"]
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert size == checkpoint_bytes(saved, tuning.implied())


def test_a_ranking_prices_each_cell_by_its_size() -> None:
    """A simulated cell has the counts of its trace, a measured one of its built model."""
    large = ParameterCounts(total=10**10, trainable=10**10, four_bit=0)
    steps = measurement(step_seconds=(0.1,))
    simulated = steps.model_copy(update={"built": None, "parameters": large})
    assert recorded_parameters([observation(1, measurement=None)]) is None
    assert recorded_parameters([timed(8, measurement=simulated)]) == large
    assert recorded_parameters([timed(8, 0.1)]).total == 250
    job = JOB.model_copy(update={"overheads": Overheads()})
    small = on_desk(ranked([timed(8, 0.1)], job))
    assert small.startup_minutes == BOOT_MINUTES
    assert on_desk(ranked([timed(8, measurement=simulated)], job)).startup_minutes == pytest.approx(
        BOOT_MINUTES + (20 / 0.4 + 20 / 0.5) / 60
    )
