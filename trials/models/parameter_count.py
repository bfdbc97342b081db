"""Parameter counts that a recipe implies, from the stock model of transformers.

They follow from shapes alone, independently of the code that converts, quantises and adapts. A
trial compares the built model with them, so that a recipe that did not take hold is an error.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trials.models.adapter_targets import (
    EXPERT_LINEARS,
    ROUTER_LINEAR,
    excludes,
    is_meant,
    saved_modules,
)
from trials.models.experts import is_router
from trials.recipes.recipe import Recipe
from trials.records.observation import ParameterCounts


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Weight matrices of one shape.

    Attributes:
        name: name of the matrices as linear layers.
        inputs_and_outputs: sum of both dimensions.
        elements: elements of one matrix.
        count: number of matrices.
        quantised: whether QLoRA quantises them.
    """

    name: str
    inputs_and_outputs: int
    elements: int
    count: int
    quantised: bool


def implied_parameters(stock: nn.Module, recipe: Recipe) -> ParameterCounts:
    """Parameter counts of a model under a recipe, in logical elements."""
    total = sum(parameter.numel() for parameter in stock.parameters())  # tied ones once
    if recipe.lora_rank is None:
        # Some families freeze parameters of their own, such as the biases that balance experts.
        trainable = sum(p.numel() for p in stock.parameters() if p.requires_grad)
        return ParameterCounts(total=total, trainable=trainable, four_bit=0)
    matrices = list(_matrices(stock))
    # A (rank, inputs) and B (outputs, rank) beside each adapted matrix.
    adapters = sum(
        recipe.lora_rank * m.inputs_and_outputs * m.count
        for m in matrices
        if any(is_meant(target, m.name) for target in recipe.lora_targets or ())
        and not excludes(recipe, m.name)
    )
    quantised = sum(m.elements * m.count for m in matrices if m.quantised)
    copies = sum(
        parameter.numel()
        for name in saved_modules(stock, recipe)
        for parameter in stock.get_submodule(name).parameters()
    )
    return ParameterCounts(
        total=total + adapters + copies,
        trainable=adapters + copies,
        four_bit=quantised if recipe.quantisation in {"nf4", "fp4"} else 0,
        eight_bit=quantised if recipe.quantisation == "int8" else 0,
    )


def _matrices(stock: nn.Module) -> Iterator[_Matrices]:
    head = stock.get_output_embeddings()  # type: ignore[operator]
    for name, module in stock.named_modules():
        if is_router(module):
            yield _one(f"{name}.{ROUTER_LINEAR}", module.weight, quantised=False)
        elif isinstance(module, (nn.Linear, Conv1D)):
            if module is not head:
                yield _one(name, module.weight, quantised=True)
        elif isinstance(getattr(module, "down_proj", None), nn.Parameter):
            yield from _expert_matrices(name, module)


def _one(name: str, weight: torch.Tensor, *, quantised: bool) -> _Matrices:
    return _Matrices(name, sum(weight.shape), weight.numel(), 1, quantised)


def _expert_matrices(name: str, experts: nn.Module) -> Iterator[_Matrices]:
    """Matrices of all experts: three kinds, or two without a gate, equal up to transposition."""
    count, *shape = experts.down_proj.shape  # type: ignore[misc]
    gated = hasattr(experts, "gate_up_proj")
    for linear in sorted(EXPERT_LINEARS):
        if gated or linear != "gate_linear":
            yield _Matrices(
                name=f"{name}.{linear}",
                inputs_and_outputs=sum(shape),
                elements=shape[0] * shape[1],
                count=count,
                quantised=True,
            )
