"""Optimizers of recipes with the state and kernels they have on a GPU, on fake tensors."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trials.recipes.recipe import Recipe
from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    DeclaredKernel,
    Described,
    declare,
    tensors_in,
    touched_bytes,
)
from trials.training.optimizers.construction import embedding_weights, make_optimizer
from trials.training.optimizers.stepper import LEARNING_RATE
from trials.training.optimizers.torchao_optimizers import torchao_adamw

# bitsandbytes (optim/optimizer.py): elements from which on state is 8-bit, elements per constant,
# and elements from which on state is paged.
SMALLEST_8BIT = 4096
BLOCK = 256
SMALLEST_PAGED = 100_000
# Classes of torchao.optim, and the bytes per element that an update with quantised state takes
# beside it: new codes of both moments; in 4 bits these are int64 before they are packed, and fp32
# moments remain, too. They and the kernels are those of the code that Inductor generates for
# Triton (PyTorch 2.13; torchao 0.18).
TORCHAO = {"torchao_adamw_8bit": ("AdamW8bit", 2), "torchao_adamw_4bit": ("AdamW4bit", 24)}
TORCHAO_KERNELS = 5


def simulated_optimizer(
    model: nn.Module, groups: list[list[nn.Parameter]], recipe: Recipe, device_type: str
) -> torch.optim.Optimizer:
    """Make the optimizer of a recipe as a device of this type runs it."""
    if recipe.optimizer in TORCHAO:
        return _torchao(groups, *TORCHAO[recipe.optimizer])
    if "8bit" in recipe.optimizer or recipe.optimizer.startswith("paged"):
        return _BitsandbytesAdamW(model, groups, recipe, on_gpu=device_type == "cuda")
    return make_optimizer(model, groups, recipe, device_type)


class _BitsandbytesAdamW(torch.optim.Optimizer):
    """State and kernels of bitsandbytes' AdamW in 8 or 32 bits: one kernel per tensor."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[list[nn.Parameter]],
        recipe: Recipe,
        *,
        on_gpu: bool,
    ) -> None:
        super().__init__([{"params": group} for group in groups], {"lr": LEARNING_RATE})
        self._paged = recipe.optimizer.startswith("paged")
        self._is_8bit = "8bit" in recipe.optimizer
        self._in_32_bits = {id(weight) for weight in embedding_weights(model)}
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
        moment_bytes = 1 if self._quantises(parameter) else 4
        torch.ops.simulated.bitsandbytes_adam(parameter.grad, parameter, moments, moment_bytes)

    def _quantises(self, parameter: nn.Parameter) -> bool:
        is_small = parameter.numel() < SMALLEST_8BIT
        return self._is_8bit and not is_small and id(parameter) not in self._in_32_bits

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        if self._paged and parameter.numel() >= SMALLEST_PAGED:
            # Managed memory does not come from PyTorch's allocator.
            return {"paged": True}
        quantises = self._quantises(parameter)
        if quantises and not self._codes and self._has_tables:
            # Both code tables of the 8-bit numbers, on the GPU.
            self._codes = [torch.zeros(256, device=parameter.device) for _ in range(2)]
        dtype = torch.uint8 if quantises else torch.float32
        state = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")}
        if quantises:
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


def _torchao(
    groups: list[list[nn.Parameter]], name: str, bytes_per_element: int
) -> torch.optim.Optimizer:
    """Make torchao's own optimizer, whose update is one operator with the costs of its kernels."""

    def update(p: torch.Tensor, grad: torch.Tensor, _step: Any, *rest: Any) -> None:
        state = [part for moment in rest[:2] for part in _parts(moment)]
        taken = bytes_per_element * p.numel() if len(state) > len(rest[:2]) else 0
        torch.ops.simulated.torchao_adam(grad, p, state, taken)

    made = torchao_adamw(name, [{"params": group} for group in groups], LEARNING_RATE, update)
    from torchao.optim import subclass_4bit, subclass_8bit  # noqa: PLC0415 - optional

    with unset_fake_temporarily():
        for states in (subclass_4bit, subclass_8bit):
            # Values of code tables, which fake tensors do not have; both modules keep them.
            states.get_qmap_signed()
            states.get_qmap_unsigned()
    return made


def _parts(moment: torch.Tensor) -> list[torch.Tensor]:
    names = getattr(moment, "tensor_attrs", None)
    return [moment] if names is None else [getattr(moment, name) for name in names]


def _torchao_work(args: Any, _result: Any) -> list[Described]:
    grad, parameter, state, temporaries = args
    kept = sum(map(touched_bytes, (parameter, *state)))
    moved = float(touched_bytes(grad) + 2 * (kept + temporaries))
    kernels = TORCHAO_KERNELS if temporaries else 1
    return [(OperatorClass.UPDATE, Rate.FP32, (moved, 0, 0, 0, 0, 0, kernels))]


declare(
    "torchao_adam(Tensor grad, Tensor(a!) parameter, Tensor(b!)[] state, int temporaries) -> ()",
    _adam,
    DeclaredKernel(_torchao_work, workspace_bytes=lambda args: args[3]),
)
