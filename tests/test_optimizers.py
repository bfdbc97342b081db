"""Optimizer steps: what they train, what state they keep, and what fp16 and offloading do."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch_process import small_steps

from trials.optimizers import make_stepper, offload_config
from trials.recipe import Optimizer, Recipe
from trials.recipe_check import OPTIMIZER_CLASSES

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def made_for_small_steps() -> Iterator[None]:
    """All of this file."""
    with small_steps():
        yield


class Frozen(nn.Module):
    """A layer that is trained on one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(64, 128)
        self.trained = nn.Linear(128, 64)
        self.frozen.requires_grad_(False)  # noqa: FBT003 - torch's own signature

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        trained: torch.Tensor = self.trained(self.frozen(inputs))
        return trained


def loss_of(model: nn.Module) -> torch.Tensor:
    """A loss that is the same each time but for the weights."""
    inputs = torch.ones(4, 64)
    output: torch.Tensor = model(inputs)
    return output.float().square().mean()


def recipe(optimizer: Optimizer = "adamw", **fields: object) -> Recipe:
    """Full fine-tuning with this optimizer."""
    return Recipe.model_validate(
        {"method": "full", "precision": "fp32", "optimizer": optimizer} | fields
    )


STATE = {
    "adamw": {torch.float32},
    "adamw_8bit": {torch.uint8, torch.float32},
    "adafactor": {torch.float32},
    "sgd": set(),
}


@pytest.mark.parametrize("optimizer", STATE)
def test_a_step_moves_what_is_trained_and_nothing_else(optimizer: Optimizer) -> None:
    """With the optimizer asked for, and the state it is known by."""
    model = Frozen()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(optimizer), CPU)
    losses = [stepper.step(loss_of) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"trained.weight", "trained.bias"}
    assert stepper.name == OPTIMIZER_CLASSES[optimizer]
    state = stepper.optimizer.state[model.trained.weight]
    dtypes = {v.dtype for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1}
    assert dtypes == STATE[optimizer]


def test_8_bit_state_takes_a_quarter_of_the_memory() -> None:
    """A byte instead of four for each of two numbers a weight, and some for the scales."""
    sizes = {}
    for optimizer in ("adamw", "adamw_8bit"):
        model = Frozen()
        stepper = make_stepper(model, [model.trained.weight], recipe(optimizer), CPU)  # type: ignore[arg-type]
        stepper.step(loss_of)
        state = stepper.optimizer.state[model.trained.weight]
        whole = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() == 2]
        sizes[optimizer] = sum(v.numel() * v.element_size() for v in whole)
    assert sizes["adamw"] == 4 * sizes["adamw_8bit"] == 8 * 64 * 128


def test_fp16_trains_from_the_first_step_on() -> None:
    """No step is skipped for overflow: optimizer state is there when memory is counted."""
    model = Frozen()
    model.frozen.half()
    before = model.trained.weight.detach().clone()
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(precision="fp16"), CPU)
    seen = []
    model.trained.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    stepper.step(loss_of)
    assert seen == [torch.float16]
    assert not torch.equal(model.trained.weight, before)
    assert stepper.optimizer.state[model.trained.weight]["exp_avg"].dtype == torch.float32


def test_a_closed_stepper_lets_go_of_its_state() -> None:
    """The next probe's optimizer starts with none."""
    model = Frozen()
    stepper = make_stepper(model, list(model.trained.parameters()), recipe(), CPU)
    stepper.step(loss_of)
    stepper.close()
    assert not stepper.optimizer.state


def test_offloading_without_deepspeed_is_told_in_a_line() -> None:
    """With the extra that brings it."""
    model = Frozen()
    with pytest.raises(ImportError, match=r"offload_optimizer needs the package deepspeed.*extra"):
        make_stepper(model, list(model.parameters()), recipe(offload_optimizer=True), CPU)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deepspeed_is_told_the_recipe(precision: str) -> None:
    """The optimizer on the host, its rate, and the precision."""
    config = offload_config(recipe(precision=precision, offload_optimizer=True))
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"]["lr"] == 5e-5
    assert config["bf16"]["enabled"] is (precision == "bf16")
    assert config["gradient_accumulation_steps"] == 1
