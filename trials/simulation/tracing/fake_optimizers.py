"""Optimizers of recipes with the state and kernels they have on a GPU, on fake tensors."""

from typing import Any

import torch
from torch import nn

from trials.recipes.recipe import Recipe
from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    DeclaredKernel,
    Described,
    declare,
    tensors_in,
    touched_bytes,
)
from trials.training.optimizers.construction import make_optimizer
from trials.training.optimizers.stepper import LEARNING_RATE

# bitsandbytes (optim/optimizer.py): elements from which on state is 8-bit, elements per constant,
# and elements from which on state is paged.
SMALLEST_8BIT = 4096
BLOCK = 256
SMALLEST_PAGED = 100_000


def simulated_optimizer(
    groups: list[list[nn.Parameter]], recipe: Recipe, device_type: str
) -> torch.optim.Optimizer:
    """Make the optimizer of a recipe as a device of this type runs it."""
    if "8bit" in recipe.optimizer or recipe.optimizer.startswith("paged"):
        return _BitsandbytesAdamW(groups, recipe, on_gpu=device_type == "cuda")
    return make_optimizer(groups, recipe, device_type)


class _BitsandbytesAdamW(torch.optim.Optimizer):
    """State and kernels of bitsandbytes' AdamW in 8 or 32 bits: one kernel per tensor."""

    def __init__(self, groups: list[list[nn.Parameter]], recipe: Recipe, *, on_gpu: bool) -> None:
        super().__init__([{"params": group} for group in groups], {"lr": LEARNING_RATE})
        self._paged = recipe.optimizer.startswith("paged")
        self._bytes = 1 if "8bit" in recipe.optimizer else 4
        self._has_tables = on_gpu
        self._codes: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with gradients."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)

    def _update(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        moments = [state["state1"], state["state2"]] if "state1" in state else []
        torch.ops.simulated.bitsandbytes_adam(parameter.grad, parameter, moments, self._bytes)

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self._paged and parameter.numel() >= SMALLEST_PAGED:
            # Managed memory does not come from PyTorch's allocator.
            return {"paged": True}
        small = parameter.numel() < SMALLEST_8BIT or self._bytes == 4
        if not small and not self._codes and self._has_tables:
            # Both code tables of the 8-bit numbers, on the GPU.
            self._codes = [torch.zeros(256, device=parameter.device) for _ in range(2)]
        dtype = torch.float32 if small else torch.uint8
        state = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")}
        if not small:
            blocks = -(-parameter.numel() // BLOCK)
            for name in ("absmax1", "absmax2"):
                state[name] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state


def _adam(
    grad: torch.Tensor, parameter: torch.Tensor, moments: list[torch.Tensor], moment_bytes: int
) -> None:
    del grad, parameter, moments, moment_bytes


def _adam_work(args: Any, _result: Any) -> list[Described]:
    grad, parameter, moments, moment_bytes = args
    # Reads and writes of both moments; paged ones are no tensors here.
    paged = 4 * moment_bytes * parameter.numel()
    kept = 2 * sum(map(touched_bytes, moments)) if moments else paged
    moved = float(sum(touched_bytes(t) for t in tensors_in((grad, parameter, parameter))) + kept)
    return [(OperatorClass.UPDATE, Rate.FP32, (moved, 0, 0, 0, 0, 0, 1))]


declare(
    "bitsandbytes_adam(Tensor grad, Tensor(a!) parameter, Tensor(b!)[] moments, int moment_bytes)"
    " -> ()",
    _adam,
    DeclaredKernel(_adam_work),
)
