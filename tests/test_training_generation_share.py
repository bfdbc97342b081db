"""vLLM's share of the memory is none of GRPO's update, and prices name what they leave out."""

import json

import pytest
import torch
from builders.observations import cpu, recipe, tiny_cell

from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from trials.devices.cuda import without_share
from trials.devices.device import DeviceError
from trials.records.model import find_model
from trials.records.timing_rule import TimingRule
from trials.simulation.simulated_prober import usable_bytes
from trials.training.finetune import FineTuning
from trials.training.recipe_check import departures
from trials.training.worker import open_device
from trials.trial import TrialTask

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
GIB = 2**30
HALF = recipe("lora", task="grpo", generation_share=0.5, reference="adapter-off")


def test_a_probe_has_the_rest_of_the_memory() -> None:
    """It is half of the smaller device that another one stands in for."""
    task = TrialTask(
        cell=tiny_cell(recipe=HALF),
        model=find_model("llama-tiny"),
        gpu=cpu(10_000),
        target=cpu(8_000),
        seed=0,
        batch_limit=4,
        timing=TimingRule(),
        build_timeout_seconds=60,
        probe_timeout_seconds=60,
    )
    assert task.memory_guess_bytes == 4_000
    assert open_device(task.setup).memory_limit_bytes == 4_000


def test_a_gpus_limit_loses_a_share_of_all_of_its_memory() -> None:
    """As vLLM takes it, CUDA's context included; a share that leaves nothing is an error."""
    assert without_share(79 * GIB, 80 * GIB, 0.5) == 39 * GIB
    with pytest.raises(DeviceError, match="generation_share"):
        without_share(79 * GIB, 80 * GIB, 0.99)
    gpu = load_catalog().gpu("A40")
    assert gpu.usable_memory_bytes is not None
    taken = usable_bytes(gpu, recipe("full")) - usable_bytes(gpu, HALF)
    assert taken == pytest.approx(gpu.usable_memory_bytes / 2)


def test_a_trial_checks_that_the_model_scores_its_completions() -> None:
    """Only with vLLM does a step compute their log-probabilities without gradients."""
    cell, model = tiny_cell(recipe=HALF, seq_len=8), find_model("llama-tiny")
    tuning = FineTuning(cell, model, device=torch.device("cpu"), seed=0)
    built = tuning.built()
    assert departures(cell.recipe, built, tuning.implied()) == []
    alone = cell.recipe.model_copy(update={"generation_share": 0.0})
    assert len(departures(alone, built, tuning.implied())) == 1


def test_an_estimate_names_the_generation_that_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In its table, beside the price, and as JSON."""
    job = ["estimate", "--model", "llama-tiny", "--gpu", "A40", "--seq-len", "16", "--task", "grpo"]
    assert main(job) == 0
    shown = capsys.readouterr().out
    assert "generation comes on top" in shown
    assert "Left out: " in shown
    assert main([*job, "--generation-share", "0.5", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert "50%" in estimate["left_out"]
    assert estimate["usable_gib"] < 24
