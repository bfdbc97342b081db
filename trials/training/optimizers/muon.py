"""Muon as LLaMA-Factory 0.9 has it: momentum made orthogonal, and AdamW for what is no matrix.

After llamafactory/third_party/muon/muon.py, which follows Moonlight (arXiv 2502.16982).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MOMENTUM = 0.95
BETAS = (0.9, 0.999)  # of transformers' Trainer
EPSILON = 1e-8
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_SCALE = 0.2  # root mean square of AdamW's updates, 2502.16982 equation 4
APART = ("embed", "lm_head")
"""Parts of the names of matrices that AdamW updates."""


def muon_groups(model: nn.Module, trainable: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Matrices that Muon updates, then the parameters that AdamW updates; either may be empty."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in trainable:
        is_apart = any(part in names[id(parameter)] for part in APART)
        groups[parameter.dim() != 2 or is_apart].append(parameter)
    return list(groups)


class Muon(torch.optim.Optimizer):
    """Optimizer of the groups of ``muon_groups``, one parameter after another.

    Args:
        groups: groups of parameters: matrices to update by Muon, and others.
        lr: learning rate.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        matrices, others = groups
        super().__init__([matrices | {"is_muon": True}, others | {"is_muon": False}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with gradients."""
        del closure
        for parameter, gradient, group in self._updated():
            update = _muon if group["is_muon"] else _adamw
            update(parameter, gradient, self.state[parameter], group["lr"])

    def _updated(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, parameter.grad, group


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Matrix (n, m) with all singular values near 1, in bf16, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    result: torch.Tensor = matrix.bfloat16()
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        result = result.T
    result = result / (result.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = result @ result.T
        polynomial = b * gram + c * gram @ gram
        result = a * result + polynomial @ result
    return result.T if is_tall else result


def _muon(
    parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
) -> None:
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
    momentum: torch.Tensor = state["momentum"]
    momentum.mul_(MOMENTUM).add_(gradient)
    update = orthogonalised(gradient.add(momentum, alpha=MOMENTUM))
    parameter.mul_(1.0)  # weight decay, which takes its time at 0, too
    parameter.add_(update, alpha=-lr * UPDATE_SCALE * math.sqrt(max(parameter.shape)))


def _adamw(
    parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
) -> None:
    if not state:
        state |= {"step": 0}
        state |= {name: torch.zeros_like(gradient) for name in ("first", "second")}
    state["step"] += 1
    first, second = state["first"], state["second"]
    first.lerp_(gradient, 1 - BETAS[0])
    second.lerp_(gradient.square(), 1 - BETAS[1])
    update = first / (EPSILON + second.sqrt())
    corrections = [1 - beta ** state["step"] for beta in BETAS]
    parameter.mul_(1.0)  # as above
    parameter.add_(update, alpha=-lr * math.sqrt(corrections[1]) / corrections[0])
