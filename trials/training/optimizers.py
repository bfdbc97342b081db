"""Optimizer steps of recipes: the optimizer, its precision, and state on device or host."""

import contextlib
import gc
import importlib
import math
import os
import socket
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from trials.models.weight_placement import autocast_to
from trials.recipes.fields import Optimizer
from trials.recipes.recipe import Recipe
from trials.training.recipe_check import RecipeError

LEARNING_RATE = 5e-5  # the paper's, 2408.04693 section III
# fp16 gradients are scaled up so that they do not vanish. PyTorch starts at 65,536 and halves it,
# skipping steps, until nothing overflows; from here the first step counts, and optimizer state
# exists after it.
FIRST_LOSS_SCALE = 1024.0
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # its default reduce_bucket_size
# Names of parameters without weight decay (get_decay_parameter_names of transformers' Trainer).
WITHOUT_DECAY = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
LossOf = Callable[[nn.Module], torch.Tensor]
Offloading = contextlib.AbstractContextManager[object]
NOT_OFFLOADED: Offloading = contextlib.nullcontext()


class SkippedStepError(RuntimeError):
    """Loss scaling skipped the update, so neither its time nor its memory can be measured."""


class Stepper(Protocol):
    """Runs optimizer steps."""

    name: str
    optimizer: Any

    def step(self, *losses_of: LossOf) -> float:
        """Run one whole step: forward and backward pass of each micro-batch, one update.

        Args:
            losses_of: computes the loss of a micro-batch by the model it gets, one each; the
                step's loss is their sum.

        Returns:
            Loss. Reading it waits for the device.

        Raises:
            SkippedStepError: gradients overflowed in fp16, though the loss did not.
        """

    def state_dict(self) -> dict[str, Any]:
        """State from which a later process continues with the same numbers, for ``torch.save``.

        Raises:
            NotImplementedError: the state is on the host, in DeepSpeed's own format.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of ``state_dict``.

        Raises:
            NotImplementedError: as above.
        """

    def close(self) -> None:
        """Release the optimizer's state."""


def make_stepper(
    model: nn.Module,
    trainable: list[nn.Parameter],
    recipe: Recipe,
    device: torch.device,
    offloading: Offloading = NOT_OFFLOADED,
) -> Stepper:
    """Make the stepper of a recipe, with an optimizer without state.

    Args:
        model: model to train.
        trainable: its trained parameters.
        recipe: recipe of the steps.
        device: device of the model.
        offloading: context of the passes (``trials.models.activation_offloading``).

    Raises:
        ImportError: a package that the recipe needs is not installed.
        RecipeError: the device does not support the optimizer.
    """
    if recipe.offload_optimizer:
        return _OffloadedStepper(model, trainable, recipe)
    if recipe.optimizer.startswith("paged") and device.type != "cuda":
        # bitsandbytes only warns and continues unpaged, under the same class name.
        raise RecipeError(
            f"optimizer {recipe.optimizer} needs a CUDA GPU, bitsandbytes pages nothing on a "
            f"{device.type}: use {recipe.optimizer.removeprefix('paged_').removesuffix('_32bit')}"
        )
    optimizer = make_optimizer(parameter_groups(model, trainable), recipe, device.type)
    stepper = DeviceStepper(model, optimizer, recipe, device)
    stepper.offloading = offloading
    return stepper


class DeviceStepper:
    """Runs steps with the optimizer's state on the model's device.

    Args:
        model: model to train.
        optimizer: its optimizer.
        recipe: with the precision and the norm that gradients are clipped to.
        device: device of the model.
        kernels_of: type of the device whose kernels clip the gradients; absent for the device's
            own.

    Attributes:
        offloading: context of each micro-batch's forward and backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        kernels_of: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.name = _qualified_name(optimizer)
        self._model = model
        self._device_type = device.type
        self._recipe = recipe
        self.offloading = NOT_OFFLOADED
        self._clips_together = (kernels_of or device.type) == "cuda"
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=FIRST_LOSS_SCALE, enabled=recipe.precision == "fp16"
        )

    def step(self, *losses_of: LossOf) -> float:
        """Run one whole step."""
        self.forget_gradients()
        losses = [self.backward(loss_of).detach() for loss_of in losses_of]
        skipped_at = self.update()
        value = float(sum(losses))
        # A loss that is not finite is the caller's error to raise.
        if skipped_at is not None and math.isfinite(value):
            raise SkippedStepError(
                f"gradients overflowed in fp16 at loss scale {skipped_at:g} (loss {value:g}), the "
                "update was skipped: use precision bf16 or fp32"
            )
        return value

    def forget_gradients(self) -> None:
        """Free the gradients of the previous step."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss_of: LossOf) -> torch.Tensor:
        """Run forward and backward pass, and return the loss on the device."""
        with self.offloading:
            with autocast_to(self._recipe.autocast, self._device_type):
                loss = loss_of(self._model)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self) -> float | None:
        """Clip and update; return the loss scale of a skipped update, None otherwise."""
        if self._recipe.max_grad_norm is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(
                self._trained, self._recipe.max_grad_norm, foreach=self._clips_together
            )
        self._scaler.step(self.optimizer)
        scale = self._scaler.get_scale()
        self._scaler.update()
        # GradScaler lowers the scale exactly when it skips an update.
        return scale if self._scaler.get_scale() < scale else None

    @cached_property
    def _trained(self) -> list[nn.Parameter]:
        """Trained parameters in the model's order, which determines the last bit of their norm."""
        order = {id(p): index for index, p in enumerate(self._model.parameters())}
        members = (p for group in self.optimizer.param_groups for p in group["params"])
        return sorted(members, key=lambda p: order.get(id(p), len(order)))

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and of loss scaling, the latter empty except for fp16."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Free the optimizer's state."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if getattr(value, "is_paged", False):
                    value.is_spare = True
        self.optimizer.state.clear()


class _OffloadedStepper:
    """Runs steps with the optimizer's state and update on the host: ZeRO-Offload (2101.06840).

    ZeRO's stages 1 to 3 shard optimizer state, gradients and weights over GPUs. On one GPU there is
    nothing to shard, so all stages equal this one. At any precision, the host holds optimizer state
    and a copy of the trained weights in fp32.
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
        self._remove_additions = _removal_of_additions(model)
        config = offload_config(recipe, sum(p.numel() for p in trainable))
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, model_parameters=trainable, config=config
        )
        # DeepSpeed wraps the optimizer that does the update on the host in its own.
        self.name = _qualified_name(self.optimizer.optimizer)

    def step(self, *losses_of: LossOf) -> float:
        total = 0.0
        for count, loss_of in enumerate(losses_of, start=1):
            # Else the configured number decides, which depends on the batch size under an effective
            # batch.
            self._engine.set_gradient_accumulation_boundary(count == len(losses_of))
            # The engine's own forward pass prepares the transfer of gradients to the host.
            loss = loss_of(self._engine)
            self._engine.backward(loss, scale_wrt_gas=False)  # the losses are scaled already
            total += float(loss.detach())
        self._engine.step()
        return total

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._engine.destroy()
        # DeepSpeed leaves hooks on the model that would keep the engine alive, and with it copies
        # of the trained weights on device and host: one more set at each restart of the training.
        self._remove_additions()
        self._engine = self.optimizer = None
        gc.collect()  # the engine is in reference cycles


def offload_config(recipe: Recipe, trained_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe with the optimizer on the host."""
    return {
        # DeepSpeed only counts examples with it; batches may have any size.
        "train_micro_batch_size_per_gpu": 1,
        # Above 1, gradients accumulate on the host; the step marks its own last micro-batch.
        "gradient_accumulation_steps": recipe.micro_batches(1),
        "gradient_clipping": recipe.max_grad_norm or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": False},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            # Gradients pass through a buffer of this size on the device, always allocated whole:
            # the default would take a GB in bf16 for a few adapters.
            "reduce_bucket_size": min(DEEPSPEED_BUCKET_ELEMENTS, trained_parameters),
        },
        "bf16": {"enabled": recipe.precision == "bf16"},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31,
    }


def parameter_groups(model: nn.Module, trainable: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups that transformers' Trainer updates one by one: with weight decay, and without.

    The decay is 0 in both by default. Foreach AdamW takes its temporaries for one group.
    """
    names = set(get_parameter_names(model, [nn.LayerNorm], WITHOUT_DECAY))
    decayed = {id(p) for name, p in model.named_parameters() if name in names}
    groups = (
        [p for p in trainable if id(p) in decayed],
        [p for p in trainable if id(p) not in decayed],
    )
    return [group for group in groups if group]


def make_optimizer(
    groups: list[list[nn.Parameter]], recipe: Recipe, device_type: str
) -> torch.optim.Optimizer:
    """Make the optimizer of a recipe, without state.

    Args:
        groups: parameters to update (``parameter_groups``).
        recipe: recipe that names the optimizer.
        device_type: PyTorch updates many tensors at once on a GPU, one by one on a CPU.
    """
    # PyTorch's own default for each device, explicit because a simulated GPU's tensors are on the
    # CPU.
    together = device_type == "cuda"
    # transformers' Trainer takes the fused one, without weight decay.
    adamw = partial(torch.optim.AdamW, weight_decay=0.0)
    makers: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
        "adamw": partial(adamw, fused=True),
        # Holds another copy of all trained weights during the update.
        "adamw_foreach": partial(adamw, foreach=True),
        "adamw_loop": partial(adamw, foreach=False),
        "adafactor": torch.optim.Adafactor,
        "sgd": partial(torch.optim.SGD, foreach=together),
        "adamw_8bit": partial(_bitsandbytes, "AdamW8bit"),
        "paged_adamw_8bit": partial(_bitsandbytes, "PagedAdamW8bit"),
        "paged_adamw_32bit": partial(_bitsandbytes, "PagedAdamW32bit"),
    }
    return makers[recipe.optimizer]([{"params": group} for group in groups], lr=LEARNING_RATE)


def _bitsandbytes(name: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    optimizers = importlib.import_module("bitsandbytes.optim")
    made: torch.optim.Optimizer = getattr(optimizers, name)(groups, lr=lr, weight_decay=0.0)
    if name.startswith("Paged"):
        _page_again(made, importlib.import_module("bitsandbytes.functional").fill)
    return made


def _page_again(optimizer: Any, fill: Callable[[torch.Tensor, float], object]) -> None:
    """Let a paged optimizer reuse the managed memory of closed ones.

    bitsandbytes never frees managed memory and keeps a list of all of it, so that each restart of
    the training would lose two bytes per trained weight. Only state of 100,000 elements or more is
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
                spare: torch.Tensor = buffer
                return spare
        new: torch.Tensor = take_new(p, dtype=dtype)
        return new

    optimizer.get_state_buffer = state_buffer


def _qualified_name(optimizer: Any) -> str:
    """Class of an optimizer, and its implementation where that is not the fused one."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults["fused"]:
        return name
    return f"{name} ({'foreach' if optimizer.defaults['foreach'] else 'loop'})"


def _removal_of_additions(model: nn.Module) -> Callable[[], None]:
    """Make a function that removes all hooks and attributes added to a model from now on."""
    marked: list[dict[Any, Any]] = [vars(parameter) for parameter in model.parameters()]
    for module in model.modules():
        marked += [module._forward_pre_hooks, module._forward_hooks]  # noqa: SLF001 - no other name
    noted = [(marks, set(marks)) for marks in marked]

    def remove_additions() -> None:
        for marks, before in noted:
            for added in set(marks) - before:
                del marks[added]

    return remove_additions


def _group_of_one(deepspeed: Any) -> None:
    """Initialise the process group that DeepSpeed requires, with this process alone; once."""
    if torch.distributed.is_initialized():
        return
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed reads it even without a launcher
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    deepspeed.init_distributed(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        auto_mpi_discovery=False,
        verbose=False,
    )
