"""A model under a recipe without memory: fake tensors in place of its weights."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel, masking_utils

from trials.models.build import auto_config, stock_model, under_recipe
from trials.models.parameter_count import implied_parameters
from trials.models.reference import reference_recipe, set_evaluating, without_dropout
from trials.models.weight_placement import format_of, language_modules, quantise_laid_out
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import BY_LAYOUT
from trials.records.built import ParameterCounts
from trials.records.cell import Cell
from trials.records.model import Model
from trials.simulation.trace_request import SCANS_WHOLE
from trials.simulation.tracing.layer_repetition import RepeatedLayers, cut, find_repeated_layers
from trials.simulation.tracing.tracer import UntraceableError
from trials.training.census import StepCensus
from trials.training.recipe_check import check_traced

BLOCK = 64  # weights per constant in bitsandbytes' 4-bit layers
FLASH = "flash_attention_2"
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")
NESTED_BLOCK = 256  # constants per outer constant under double quantisation


@dataclass(frozen=True, slots=True)
class FakePlace:
    """Mode and device of fake tensors."""

    mode: FakeTensorMode
    device: torch.device


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model under a recipe whose tensors are all fake.

    Attributes:
        module: the model, in training mode.
        reference: the separate reference model; absent without one.
        recipe: its recipe.
        repeated_layers: its layers that represent more.
        implied: parameter counts that the recipe implies for it.
        parameters: those of the whole model, with the layers that it represents.
    """

    module: nn.Module
    reference: nn.Module | None
    recipe: Recipe
    repeated_layers: RepeatedLayers
    implied: ParameterCounts
    parameters: ParameterCounts

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtypes of its parameters."""
        return [parameter.dtype for parameter in self.module.parameters()]


def fake_model(
    model: Model,
    recipe: Recipe,
    active_experts: int | None,
    place: FakePlace,
    *,
    whole: bool,
) -> FakeModel:
    """Build a model whose tensors are all fake ones, with its reference."""
    made = _fake_module(model, recipe, active_experts, place, whole=whole)
    built, repeated, implied, parameters = made
    reference = None
    if recipe.reference == "separate":
        plain = reference_recipe(recipe)
        reference, *_ = _fake_module(model, plain, active_experts, place, whole=whole)
        set_evaluating(reference)
    return FakeModel(built, reference, recipe, repeated, implied, parameters)


def _fake_module(
    model: Model,
    recipe: Recipe,
    active_experts: int | None,
    place: FakePlace,
    *,
    whole: bool,
) -> tuple[nn.Module, RepeatedLayers, ParameterCounts, ParameterCounts]:
    stands_in = _flash_by_sdpa() if recipe.attention == FLASH else contextlib.nullcontext()
    with stands_in:
        stock = stock_model(model, recipe, active_experts)
    none = RepeatedLayers(first=0, period=1, copies=0, traced=0)
    differ = recipe.activation_offloading or recipe.trained_layers is not None
    repeated = none if whole or differ else find_repeated_layers(stock)
    parameters = implied_parameters(stock, recipe)
    cut(stock, repeated)
    implied = implied_parameters(stock, recipe)
    with torch.device("meta"):
        built = under_recipe(stock, recipe, lambda laid_out: _lay_out(laid_out, recipe))
    without_dropout(built, recipe)
    _fake_all(built, place)
    return built, repeated, implied, parameters


def untraceable(recipe: Recipe) -> str | None:
    """Reason why the steps of a recipe cannot be traced; None if they can."""
    if recipe.offload_optimizer:
        return f"offload_optimizer is not simulated: {BY_LAYOUT}"
    if recipe.compile is not None:
        return f"compile {recipe.compile} is not simulated: leave it out"
    return None


def without_window(model: Model) -> Model:
    """Model without its attention window: FlashAttention-2 takes the window without a mask."""
    if model.window is None or getattr(auto_config(model, None), "layer_types", None):
        return model  # only some layers have a window
    return model.model_copy(update={"config": model.config | {"sliding_window": None}})


def check_positions(model: nn.Module, cell: Cell) -> None:
    """Check that position tables are long enough, which fake tensors never look up."""
    for name, module in language_modules(model):
        is_table = name.endswith(POSITION_TABLES) and isinstance(module, nn.Embedding)
        if is_table and module.num_embeddings < cell.seq_len:
            raise UntraceableError(
                f"seq_len {cell.seq_len}: {cell.model} has positions for {module.num_embeddings} "
                "tokens: give at most this length"
            )


def depends_on_past_lengths(model: nn.Module) -> bool:
    """Whether a model keeps state from earlier lengths: frequencies that grow with them."""
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    return any("dynamic" in kind or "longrope" in kind for kind in kinds)


class TracedCensus(StepCensus):
    """Census of a traced step, with the real kernels in place of those that replace them."""

    def __init__(self, fake: FakeModel, facts: Model) -> None:
        super().__init__(fake.module, fake.reference)
        self._facts = facts
        self._fake = fake

    def note(self, operator: str, result: Any) -> None:
        """Note an operator under the name of the real kernel."""
        uses_flash = self._fake.recipe.attention == FLASH
        names = {
            "simulated::attention": "flash_attn" if uses_flash else "scaled_dot_product",
            "simulated::varlen_attention": "flash_attn::_flash_attn_varlen_forward",
            "simulated::convolved": "causal_conv1d",
        }
        name = operator.partition(".")[0]
        super().note(names.get(name, name), result)

    def check(self, cell: Cell, batch_size: int) -> None:
        """Check that the model and its step are those of the recipe, after the step.

        Raises:
            RecipeError: they are not.
        """
        built = self.built(self._facts, optimizer="")
        stands_in: dict[str, Any] = {}
        if not cell.recipe.packing:  # the rows of a packed batch are one sequence
            stands_in["sequences"] = built.sequences // batch_size
        if cell.recipe.attention == FLASH and built.attention == "sdpa":
            stands_in["attention"] = FLASH
        if built.mamba == "reference" and self._facts.family not in SCANS_WHOLE:
            stands_in["mamba"] = cell.recipe.mamba
        check_traced(cell, built.model_copy(update=stands_in), self._fake.implied)


@contextlib.contextmanager
def _flash_by_sdpa() -> Iterator[None]:
    """Let PyTorch's sdpa, the same kernel, replace FlashAttention-2 without the package.

    It does so for the models that transformers allows FlashAttention-2, with or without sdpa.
    """
    kind: Any = PreTrainedModel
    name = "_check_and_adjust_attn_implementation"
    own = getattr(kind, name)

    def checked(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
        # "sdpa" too: a model passes its own result on to its parts.
        if requested not in {FLASH, "sdpa"}:
            return own(self, requested, *args, **kwargs)  # type: ignore[no-any-return]
        only = self._compatible_flash_implementations
        if not self._supports_flash_attn or (only is not None and FLASH not in only):
            raise ValueError(f"{type(self).__name__} does not support FlashAttention-2")
        return "sdpa"

    setattr(kind, name, checked)
    try:
        yield
    finally:
        setattr(kind, name, own)


@contextlib.contextmanager
def masks_as_ever() -> Iterator[None]:
    """Keep transformers from making masks for fake tensors that it would skip for real ones."""
    own = masking_utils.is_tracing
    masking_utils.is_tracing = lambda _tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = own


class Params4bit(nn.Parameter):
    """Packed weights without values; PEFT recognises 4-bit weights by the name of their class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Params4bit":
        """Return the same weights: a copy would lack their constants."""
        return self


@cache
def _dequantise_fakes() -> None:
    """Let PEFT's DoRA dequantise fake weights, whose class is that of all fake tensors."""
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415 - seconds to import
    from peft.tuners.lora import dora  # noqa: PLC0415 - as above

    own = dora.dequantize_module_weight

    def dequantised(module: Any) -> torch.Tensor:
        weight = module.weight
        state = getattr(weight, "quant_state", None)
        if state is None or not isinstance(weight, FakeTensor):
            return own(module)  # type: ignore[no-any-return]
        return dequantize_4bit(weight.data, state)  # type: ignore[no-any-return]

    dora.dequantize_module_weight = dequantised


def _lay_out(model: nn.Module, recipe: Recipe) -> None:
    if recipe.method == "qlora":
        if recipe.dora:
            _dequantise_fakes()
        quantise_laid_out(model, recipe, _quantised, _quantised_values)


def _quantised(linear: Any, plain: nn.Linear, recipe: Recipe) -> None:
    """Give a bitsandbytes layer the tensors that quantisation would leave, on the meta device."""
    weight = (
        _eight_bit(linear, plain)
        if recipe.quantisation == "int8"
        else _four_bit(plain.weight, recipe)
    )
    del linear.weight
    linear.register_parameter("weight", weight)


def _eight_bit(linear: Any, plain: nn.Linear) -> nn.Parameter:
    rows = plain.weight.shape[0]
    weight: Any = nn.Parameter(plain.weight.detach().to(torch.int8), requires_grad=False)
    # As after a forward pass, which moves both from the weight to the state.
    weight.CB = weight.SCB = None
    linear.state.CB = weight.data
    linear.state.SCB = torch.empty(rows, dtype=torch.float32, device="meta")
    return weight  # type: ignore[no-any-return]


def _quantised_values(weight: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, Any]:
    """Tensors that quantisation of fused experts would leave, on the meta device."""
    if recipe.quantisation == "int8":
        rows = weight.shape[:-1].numel()
        return weight.to(torch.int8), torch.empty(rows, dtype=torch.float32, device="meta")
    packed: Any = _four_bit(weight, recipe)
    return packed.data, packed.quant_state


def _four_bit(plain: torch.Tensor, recipe: Recipe) -> nn.Parameter:
    from bitsandbytes.functional import QuantState  # noqa: PLC0415 - seconds to import

    def single(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    elements = plain.numel()
    packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8, device="meta")
    weight: Any = Params4bit(packed, requires_grad=False)
    blocks = -(-elements // BLOCK)
    nested: dict[str, Any] = {}
    constants = single(blocks)
    if recipe.double_quantisation:
        constants = torch.empty(blocks, dtype=torch.uint8, device="meta")
        outer = QuantState(
            absmax=single(-(-blocks // NESTED_BLOCK)),
            code=single(256),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        nested = {"offset": single(), "state2": outer}
    weight.quant_state = QuantState(
        absmax=constants,
        shape=plain.shape,
        code=single(16),
        blocksize=BLOCK,
        quant_type=recipe.quantisation,
        dtype=plain.dtype,
        **nested,
    )
    # PEFT reads these attributes.
    weight.compress_statistics = recipe.double_quantisation
    weight.quant_type = recipe.quantisation
    return weight  # type: ignore[no-any-return]


def _fake_all(model: nn.Module, place: FakePlace) -> None:
    """Replace every tensor on the meta device by a fake one; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in made:
            made[id(tensor)] = _faked(tensor, place)
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):  # noqa: SLF001 - setattr would register anew
            for name, tensor in held.items():
                held[name] = fake(tensor)  # type: ignore[assignment]
    for parameter in model.parameters():
        _fake_constants(getattr(parameter, "quant_state", None), fake)
    for layer in model.modules():
        _fake_scales(layer, fake)


Faking = Callable[[torch.Tensor | None], torch.Tensor | None]


def _fake_constants(state: Any, fake: Faking) -> None:
    """Replace the constants of a 4-bit weight; None for another weight."""
    if state is None:
        return
    state.absmax, state.code = fake(state.absmax), fake(state.code)
    if state.nested:
        state.offset, outer = fake(state.offset), state.state2
        outer.absmax, outer.code = fake(outer.absmax), fake(outer.code)


def _fake_scales(module: Any, fake: Faking) -> None:
    """Replace the scales of a layer with int8 weights."""
    weight = module._parameters.get("weight")  # noqa: SLF001 - getattr would ask wrappers
    if weight is not None and format_of(weight) == "int8":
        module.state.CB, module.state.SCB = weight.data, fake(module.state.SCB)


def _faked(tensor: torch.Tensor, place: FakePlace) -> torch.Tensor:
    with place.mode:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
        if not isinstance(tensor, nn.Parameter):
            return empty
        parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # attributes that libraries set
    return parameter
