"""One optimizer step, as a recipe has it: which optimizer, in what precision, on which side."""

import contextlib
import importlib
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from trials.recipe import Recipe

LEARNING_RATE = 5e-5  # the paper's, 2408.04693 section III
# fp16 gradients are scaled up so that they do not vanish. PyTorch starts at 65,536 and halves it,
# skipping steps, until nothing overflows; from here the first step counts, and optimizer state
# exists after it.
FIRST_LOSS_SCALE = 1024.0
LossOf = Callable[[nn.Module], torch.Tensor]


class Stepper(Protocol):
    """Makes optimizer steps.

    Attributes:
        name: class of the optimizer, with its module.
        optimizer: the optimizer itself.
    """

    name: str
    optimizer: Any

    def step(self, loss_of: LossOf) -> float:
        """One whole step: forward, backward, update.

        Args:
            loss_of: computes the loss with the model it is given.

        Returns:
            The loss. Reading it waits for the device.
        """

    def close(self) -> None:
        """Gives back what it holds."""


def make_stepper(
    model: nn.Module, trainable: list[nn.Parameter], recipe: Recipe, device: torch.device
) -> Stepper:
    """What makes the steps of a recipe, its optimizer still without state.

    Raises:
        ImportError: a package it needs is not installed.
    """
    if recipe.offload_optimizer:
        return _OffloadedStepper(model, trainable, recipe)
    return _DeviceStepper(model, _optimizer(trainable, recipe), recipe, device)


class _DeviceStepper:
    """Steps with the optimizer's state where the model is."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.name = _qualified_name(optimizer)
        self._model = model
        self._device_type = device.type
        self._autocast = recipe.precision == "fp16"
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=FIRST_LOSS_SCALE, enabled=self._autocast
        )

    def step(self, loss_of: LossOf) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device_type, torch.float16, enabled=self._autocast):
            loss = loss_of(self._model)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return float(loss.detach())

    def close(self) -> None:
        self.optimizer.state.clear()


class _OffloadedStepper:
    """Steps with the optimizer's state and update on the host: ZeRO-Offload (2101.06840).

    ZeRO's stages 1 to 3 part optimizer state, gradients and weights among GPUs. On one GPU there is
    nobody to part them with, so they come to the same and what is left of them is this.
    """

    def __init__(self, model: nn.Module, trainable: list[nn.Parameter], recipe: Recipe) -> None:
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as error:
            raise ImportError(
                f"offload_optimizer needs the package deepspeed ({error}): install the extra "
                "'deepspeed', or leave offload_optimizer out"
            ) from None
        _group_of_one(deepspeed)
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=trainable, config=offload_config(recipe)
        )
        # DeepSpeed wraps the optimizer that does the update on the host in its own.
        self.name = _qualified_name(self.optimizer.optimizer)

    def step(self, loss_of: LossOf) -> float:
        # Through the engine's own forward: it prepares the gradients' way to the host.
        loss = loss_of(self._engine)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())

    def close(self) -> None:
        self._engine.destroy()


def offload_config(recipe: Recipe) -> dict[str, Any]:
    """DeepSpeed's configuration of a recipe with its optimizer on the host."""
    return {
        # It only counts queries with this; the batches are as large as they come.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": False}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "bf16": {"enabled": recipe.precision == "bf16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,
    }


def _optimizer(trainable: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    match recipe.optimizer:
        case "adamw":
            # Fused, as Hugging Face's trainer has it: the other one of PyTorch holds one more copy
            # of everything trained during the update.
            return torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(trainable, lr=LEARNING_RATE)
        case "sgd":
            return torch.optim.SGD(trainable, lr=LEARNING_RATE)
        case "adamw_8bit":
            return _bitsandbytes("AdamW8bit", trainable)
        case "paged_adamw_8bit":
            return _bitsandbytes("PagedAdamW8bit", trainable)


def _bitsandbytes(name: str, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizers = importlib.import_module("bitsandbytes.optim")
    made: torch.optim.Optimizer = getattr(optimizers, name)(trainable, lr=LEARNING_RATE)
    return made


def _qualified_name(optimizer: object) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _group_of_one(deepspeed: Any) -> None:
    """The process group DeepSpeed wants, of this process alone; once."""
    if torch.distributed.is_initialized():
        return
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it whoever started the process
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    deepspeed.init_distributed(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        auto_mpi_discovery=False,
        verbose=False,
    )
