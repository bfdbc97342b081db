"""One optimizer step, as a recipe has it: which optimizer, in what precision, on which side."""

import contextlib
import gc
import importlib
import math
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from trials.records.recipe import Recipe
from trials.training.recipe_check import RecipeError

LEARNING_RATE = 5e-5  # the paper's, 2408.04693 section III
# fp16 gradients are scaled up so that they do not vanish. PyTorch starts at 65,536 and halves it,
# skipping steps, until nothing overflows; from here the first step counts, and optimizer state
# exists after it.
FIRST_LOSS_SCALE = 1024.0
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # its default reduce_bucket_size
LossOf = Callable[[nn.Module], torch.Tensor]


class SkippedStepError(RuntimeError):
    """Loss scaling skipped the update, so neither its time nor its memory can be measured."""


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

        Raises:
            SkippedStepError: gradients overflowed in fp16, though the loss did not.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a later process goes on from with the same numbers, as ``torch.save`` takes it.

        Raises:
            NotImplementedError: it is on the host, where DeepSpeed keeps it in parts of its own.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from such a state.

        Raises:
            NotImplementedError: as above.
        """

    def close(self) -> None:
        """Gives back what it holds."""


def make_stepper(
    model: nn.Module, trainable: list[nn.Parameter], recipe: Recipe, device: torch.device
) -> Stepper:
    """What makes the steps of a recipe, its optimizer still without state.

    Raises:
        ImportError: a package it needs is not installed.
        RecipeError: the device cannot have this optimizer.
    """
    if recipe.offload_optimizer:
        return _OffloadedStepper(model, trainable, recipe)
    if recipe.optimizer == "paged_adamw_8bit" and device.type != "cuda":
        # bitsandbytes only warns and goes on unpaged, under the same class name.
        raise RecipeError(
            f"optimizer paged_adamw_8bit needs a CUDA GPU, bitsandbytes pages nothing on a "
            f"{device.type}: use adamw_8bit"
        )
    optimizer = make_optimizer(trainable, recipe, device.type)
    return DeviceStepper(model, optimizer, recipe, device)


class DeviceStepper:
    """Steps with the optimizer's state where the model is.

    Args:
        model: what is trained.
        optimizer: of what of it is trained.
        recipe: its precision says whether losses are scaled.
        device: where they are.
    """

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
        """One whole step."""
        self.forget_gradients()
        loss = self.backward(loss_of)
        skipped_at = self.update()
        value = float(loss.detach())
        # That of a loss that is no number is the caller's to tell.
        if skipped_at is not None and math.isfinite(value):
            raise SkippedStepError(
                f"gradients overflowed in fp16 at loss scale {skipped_at:g} (loss {value:g}), the "
                "update was skipped: use precision bf16 or fp32"
            )
        return value

    def forget_gradients(self) -> None:
        """Before a step: the gradients of the one before."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss_of: LossOf) -> torch.Tensor:
        """Forward and backward pass; the loss, still on the device."""
        with torch.autocast(self._device_type, torch.float16, enabled=self._autocast):
            loss = loss_of(self._model)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self) -> float | None:
        """The optimizer's update; the loss scale at which it was skipped, None when it was not."""
        self._scaler.step(self.optimizer)
        scale = self._scaler.get_scale()
        self._scaler.update()
        # The scale falls when the update was skipped, and only then.
        return scale if self._scaler.get_scale() < scale else None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and that of loss scaling, which is empty but for fp16."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from such a state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Lets go of the optimizer's state."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if getattr(value, "is_paged", False):
                    value.is_spare = True
        self.optimizer.state.clear()


class _OffloadedStepper:
    """Steps with the optimizer's state and update on the host: ZeRO-Offload (2101.06840).

    ZeRO's stages 1 to 3 part optimizer state, gradients and weights among GPUs. On one GPU there is
    nobody to part them with, so they come to the same and what is left of them is this. Whatever
    the precision, the host holds optimizer state and a copy of what is trained in fp32.
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
        self._take_off = _marks_of(model)
        config = offload_config(recipe, sum(p.numel() for p in trainable))
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=trainable, config=config
        )
        # DeepSpeed wraps the optimizer that does the update on the host in its own.
        self.name = _qualified_name(self.optimizer.optimizer)

    def step(self, loss_of: LossOf) -> float:
        # Through the engine's own forward: it prepares the gradients' way to the host.
        loss = loss_of(self._engine)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._engine.destroy()
        # What it leaves on the model would keep it, and with it copies of all that is trained on
        # the device and several on the host: one more set each time the training starts over.
        self._take_off()
        self._engine = self.optimizer = None
        gc.collect()  # the engine holds itself in cycles


def offload_config(recipe: Recipe, trained_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a recipe with its optimizer on the host."""
    return {
        # It only counts examples with this; the batches are as large as they come.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": False}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            # Gradients pass through a buffer of this size on the device. It is taken whole however
            # little is trained: a GB in bf16 for a few adapters, did it not end with them.
            "reduce_bucket_size": min(DEEPSPEED_BUCKET_ELEMENTS, trained_parameters),
        },
        "bf16": {"enabled": recipe.precision == "bf16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,
    }


def make_optimizer(
    trainable: list[nn.Parameter], recipe: Recipe, device_type: str
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, without state.

    Args:
        trainable: what it updates.
        recipe: names it.
        device_type: PyTorch updates many tensors at once on a GPU, one by one on a CPU.
    """
    # PyTorch's own choice for each optimizer, said: a simulated GPU's tensors are on the CPU.
    together = device_type == "cuda"
    match recipe.optimizer:
        case "adamw":
            # Fused, as Hugging Face's trainer has it: the other one of PyTorch holds one more copy
            # of everything trained during the update.
            return torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(trainable, lr=LEARNING_RATE)
        case "sgd":
            return torch.optim.SGD(trainable, lr=LEARNING_RATE, foreach=together)
        case "adamw_8bit":
            return _bitsandbytes("AdamW8bit", trainable)
        case "paged_adamw_8bit":
            return _bitsandbytes("PagedAdamW8bit", trainable)


def _bitsandbytes(name: str, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizers = importlib.import_module("bitsandbytes.optim")
    made: torch.optim.Optimizer = getattr(optimizers, name)(trainable, lr=LEARNING_RATE)
    if name.startswith("Paged"):
        _page_again(made, importlib.import_module("bitsandbytes.functional").fill)
    return made


def _page_again(optimizer: Any, fill: Callable[[torch.Tensor, float], object]) -> None:
    """Gives a paged optimizer the managed memory of closed ones.

    bitsandbytes frees none and keeps a list of all of it: two bytes for each weight trained would
    be lost with each time the training starts over. Only state of 100,000 elements or more is
    paged; that of most adapters is not.
    """
    take_new = optimizer.get_state_buffer

    def state_buffer(p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        for buffer in optimizer.page_mng.paged_tensors:
            if getattr(buffer, "is_spare", False) and (buffer.shape, buffer.dtype) == (
                p.shape,
                dtype,
            ):
                buffer.is_spare = False
                fill(buffer, 0)
                found: torch.Tensor = buffer
                return found
        new: torch.Tensor = take_new(p, dtype=dtype)
        return new

    optimizer.get_state_buffer = state_buffer


def _qualified_name(optimizer: object) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _marks_of(model: nn.Module) -> Callable[[], None]:
    """Notes what hangs on a model now; what it returns takes off all that was added since."""
    marked: list[dict[Any, Any]] = [vars(parameter) for parameter in model.parameters()]
    for module in model.modules():
        marked += [module._forward_pre_hooks, module._forward_hooks]  # noqa: SLF001 - no other name
    noted = [(marks, set(marks)) for marks in marked]

    def take_off() -> None:
        for marks, before in noted:
            for added in set(marks) - before:
                del marks[added]

    return take_off


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
