"""Optimizer steps with the optimizer's state on the model's device."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trials.models.weight_placement import autocast_to
from trials.recipes.recipe import Recipe

LEARNING_RATE = 5e-5  # the paper's, 2408.04693 section III
# fp16 gradients are scaled up so that they do not vanish. PyTorch starts at 65,536 and halves it,
# skipping steps, until nothing overflows; from here the first step counts, and optimizer state
# exists after it.
FIRST_LOSS_SCALE = 1024.0
LossOf = Callable[[nn.Module], torch.Tensor]
Offloading = contextlib.AbstractContextManager[object]
NOT_OFFLOADED: Offloading = contextlib.nullcontext()


class SkippedStepError(RuntimeError):
    """Loss scaling skipped the update, so neither its time nor its memory can be measured."""


class Stepper(Protocol):
    """Runs optimizer steps."""

    optimizer: Any

    @property
    def name(self) -> str:
        """Class of the optimizer."""

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
        self.name = qualified_name(optimizer)
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
        total: torch.Tensor | None = None  # of the micro-batches so far, as the Trainer keeps it
        for loss_of in losses_of:
            loss = self.backward(loss_of).detach()
            total = loss if total is None else total + loss
            del loss
        skipped_at = self.update()
        value = 0.0 if total is None else float(total)
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
            clip(self._trained, self._recipe.max_grad_norm, together=self._clips_together)
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


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by the ranks that hold them, in their order.

    No operator of PyTorch takes tensors of different meshes, or of one rank and of several.
    """
    groups: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())


def clip(parameters: list[nn.Parameter], max_norm: float, *, together: bool) -> None:
    """Clip the norm of all gradients, wherever their ranks are."""
    groups = by_mesh(p for p in parameters if p.grad is not None)
    if len(groups) == 1:
        nn.utils.clip_grad_norm_(groups[0], max_norm, foreach=together)
        return
    grads = [[p.grad for p in group if p.grad is not None] for group in groups]
    norms: list[Any] = [nn.utils.get_total_norm(group, foreach=together) for group in grads]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm(whole, foreach=together)
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=together)


def qualified_name(optimizer: Any) -> str:
    """Class of an optimizer, and its implementation where that is not the fused one."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults["fused"]:
        return name
    return f"{name} ({'foreach' if optimizer.defaults['foreach'] else 'loop'})"
