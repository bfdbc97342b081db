"""Parameter counts that a recipe implies, from the stock model of transformers.

They follow from shapes alone, independently of the code that converts, quantises and adapts. A
trial compares the built model with them, so that a recipe that did not take hold is an error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from trials.models.adapter_targets import (
    ROUTER_LINEAR,
    excludes,
    is_meant,
    saved_modules,
)
from trials.models.adapters import value_parameters
from trials.models.experts import is_router
from trials.models.weight_placement import language_modules, output_layer, trained_layers
from trials.recipes.recipe import Recipe
from trials.records.built import ParameterCounts


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Weight matrices of one shape.

    Attributes:
        name: name of the matrices as layers.
        inputs: width of a layer's inputs; of an embedding, the size of its vocabulary.
        outputs: width of a layer's outputs.
        count: number of matrices.
        quantised: whether QLoRA quantises them.
        is_outer: whether the layer is the head or an embedding.
        is_bare: whether transformers has them as parameters of a router or of experts.
    """

    name: str
    inputs: int
    outputs: int
    count: int = 1
    quantised: bool = True
    is_outer: bool = False
    is_bare: bool = False

    def is_adapted(self, recipe: Recipe) -> bool:
        """Whether they get adapters; ``all-linear`` adapts bare ones only where they are split."""
        stays_bare = self.is_bare and recipe.has_fused_experts
        return not excludes(recipe, self.name) and any(
            is_meant(target, self.name, is_outer=self.is_outer)
            for target in recipe.lora_targets or ()
            if not (stays_bare and target == "all-linear")
        )

    def adapter_parameters(self, recipe: Recipe) -> int:
        """Parameters of the adapters on all of them.

        A is (rank, inputs), B (outputs, rank); DoRA adds a magnitude for each output. A rotation
        of n inputs has n (n - 1) / 2.
        """
        if recipe.oft_block_size is not None:
            return self.count * self.inputs * (recipe.oft_block_size - 1) // 2
        assert recipe.lora_rank is not None
        magnitudes = self.outputs if recipe.dora else 0
        return self.count * (recipe.lora_rank * (self.inputs + self.outputs) + magnitudes)


def implied_parameters(stock: nn.Module, recipe: Recipe) -> ParameterCounts:
    """Parameter counts of a model under a recipe, in logical elements."""
    own = _own_parameters(stock, recipe)
    values = value_parameters(stock) if recipe.has_value_head else 0
    more = {"total": own.total + values, "trainable": own.trainable + values}
    return own.model_copy(update=more)


def _own_parameters(stock: nn.Module, recipe: Recipe) -> ParameterCounts:
    """Parameter counts without a head of values."""
    total = sum(parameter.numel() for parameter in stock.parameters())  # tied ones once
    if not recipe.has_adapters:
        # Some families freeze parameters of their own, such as the biases that balance experts.
        trained = [stock] if recipe.trained_layers is None else trained_layers(stock, recipe)
        trainable = sum(p.numel() for part in trained for p in part.parameters() if p.requires_grad)
        return ParameterCounts(total=total, trainable=trainable, four_bit=0)
    adaptable = _matrices(stock, recipe, language_modules(stock))
    adapters = sum(m.adapter_parameters(recipe) for m in adaptable if m.is_adapted(recipe))
    matrices = _matrices(stock, recipe, stock.named_modules())
    quantised = sum(m.inputs * m.outputs * m.count for m in matrices if m.quantised)
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


def _matrices(
    stock: nn.Module, recipe: Recipe, modules: Iterable[tuple[str, Any]]
) -> Iterator[_Matrices]:
    head = output_layer(stock)
    for name, module in modules:
        if is_router(module):
            outputs, inputs = module.weight.shape
            name = f"{name}.{ROUTER_LINEAR}"  # noqa: PLW2901 - as a recipe names it
            yield _Matrices(name, inputs, outputs, quantised=False, is_bare=True)
        elif isinstance(module, (nn.Embedding, Conv1D)):  # both hold the transposed matrix
            is_outer = isinstance(module, nn.Embedding)
            inputs, outputs = module.weight.shape
            yield _Matrices(name, inputs, outputs, quantised=not is_outer, is_outer=is_outer)
        elif isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            is_outer = module is head
            yield _Matrices(name, inputs, outputs, quantised=not is_outer, is_outer=is_outer)
        elif isinstance(getattr(module, "down_proj", None), nn.Parameter):
            if recipe.has_fused_experts:
                yield from _fused_matrices(name, module, quantised=recipe.quantised_experts)
            else:
                yield from _expert_matrices(name, module)


def _fused_matrices(name: str, experts: nn.Module, *, quantised: bool) -> Iterator[_Matrices]:
    """Matrices of all experts in two parameters: those before and after the activation."""
    for parameter in experts.parameters(recurse=False):
        if parameter.dim() == 3:
            count, inputs, outputs = parameter.shape
            name_of_all = f"{name}.up_linear"
            yield _Matrices(name_of_all, inputs, outputs, count, quantised, is_bare=True)


def _expert_matrices(name: str, experts: nn.Module) -> Iterator[_Matrices]:
    """Matrices of all experts: three kinds, or two without a gate."""
    count, *shape = experts.down_proj.shape  # type: ignore[misc]
    inner, outer = shape if getattr(experts, "is_transposed", False) else reversed(shape)
    yield _Matrices(f"{name}.down_linear", inner, outer, count)
    yield _Matrices(f"{name}.up_linear", outer, inner, count)
    if hasattr(experts, "gate_up_proj"):
        yield _Matrices(f"{name}.gate_linear", outer, inner, count)
