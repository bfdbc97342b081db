"""Placement of weights on the device: random ones drawn there, quantised layer by layer."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from trials.models.experts import is_fused, is_router, linear_with
from trials.recipes.fields import SCORE, Dtype
from trials.recipes.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Inputs from which on LLM.int8 multiplies a column in 16 bits (BitsAndBytesConfig's default).
OUTLIER_THRESHOLD = 6.0
READS_IMAGES = "_reads_images"
"""Attribute of the modules of a vision-language model that its language part does not have."""
QuantisedValues = Callable[[torch.Tensor, Recipe], tuple[torch.Tensor, Any]]
"""Quantised values of a weight under a recipe, and bitsandbytes' constants of them."""


class LayersError(ValueError):
    """A model does not have the layers that a recipe trains."""


class QuantisationError(ValueError):
    """A linear layer of the model cannot be quantised."""


def autocast_to(dtype: Dtype | None, device_type: str) -> torch.autocast:
    """Autocast of products to a dtype on a kind of device; None for none."""
    return torch.autocast(device_type, DTYPES[dtype or "bf16"], enabled=dtype is not None)


class Destination:
    """Place of a model's weights while it is built: one device, whole.

    Args:
        device: device on which they are drawn, or to which they are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def keep(self, part: nn.Module) -> None:
        """Take a part of the model whose weights have just been placed on the device."""

    def restore(self, part: nn.Module) -> None:
        """Give a part its whole weights, before it is divided among ranks."""


def place(model: nn.Module, recipe: Recipe, destination: Destination) -> None:
    """Place weights at their destination layer by layer, quantised for a QLoRA recipe."""
    tied = _tied_parameters(model)
    head = output_layer(model)
    with torch.no_grad():
        for part in _parts(model):
            if any(t.is_meta for t in (*part.parameters(), *part.buffers())):
                _draw(model, part, destination.device, tied)
            else:
                part.to(destination.device)
            if recipe.method == "qlora":
                _quantise_linears(part, recipe, keep=head, quantise=_quantise)
            if recipe.quantised_experts:
                quantise_experts(part, recipe, _quantised_values)
            destination.keep(part)
    if recipe.method == "qlora":
        _declare_quantised(model, recipe)


def quantise_laid_out(
    model: nn.Module,
    recipe: Recipe,
    quantise: Callable[[Any, nn.Linear, Recipe], None],
    values: QuantisedValues,
) -> None:
    """Quantise a model without weights: its weights are then quantised ones, without values.

    Args:
        model: model on the meta device.
        recipe: a QLoRA recipe.
        quantise: gives a bitsandbytes layer, the first argument, a substitute for the quantised
            weights of the linear layer.
        values: substitute for the quantised values of fused experts, and their constants.
    """
    head = output_layer(model)
    _quantise_linears(model, recipe, keep=head, quantise=quantise)
    if recipe.quantised_experts:
        quantise_experts(model, recipe, values)
    _declare_quantised(model, recipe)


def _declare_quantised(model: nn.Module, recipe: Recipe) -> None:
    # PEFT adds adapters for quantised layers only to models with this attribute.
    bits = 8 if recipe.quantisation == "int8" else 4
    setattr(model, f"is_loaded_in_{bits}bit", True)


def output_layer(model: nn.Module) -> nn.Module | None:
    """Head of a language model, or the layer ``score`` of a reward model."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return getattr(model, SCORE, None) if head is None else head


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Every decoder layer, then the whole model for its other modules."""
    yield from decoder_layers(model)
    yield model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Decoder layers of the language part in order, which gradient checkpointing recomputes."""
    kind = GradientCheckpointingLayer
    return [module for _, module in language_modules(model) if isinstance(module, kind)]


def language_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of a model, without the vision tower and the projector of its images."""
    frozen = [module for module in model.modules() if getattr(module, READS_IMAGES, False)]
    within = {id(module) for part in frozen for module in part.modules()}
    return ((name, module) for name, module in model.named_modules() if id(module) not in within)


def freeze_vision(model: nn.Module) -> None:
    """Freeze all of a vision-language model but its language part, in place."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    kept = [decoder, *([] if (head := output_layer(model)) is None else [head])]
    language = {id(module) for part in kept for module in part.modules()}
    above = {id(m) for m in model.modules() if any(part in set(m.modules()) for part in kept)}
    for parent in [module for module in model.modules() if id(module) in above - language]:
        for parameter in parent.parameters(recurse=False):
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's own signature
        for child in parent.children():
            if id(child) not in above | language:
                setattr(child, READS_IMAGES, True)
                child.requires_grad_(False)  # noqa: FBT003 - torch's own signature


def trained_layers(model: nn.Module, recipe: Recipe) -> list[nn.Module]:
    """Decoder layers that a recipe with ``trained_layers`` trains.

    They are those of LLaMA-Factory (model/adapter.py, ``_setup_freeze_tuning``).

    Raises:
        LayersError: the layers of the model cannot be spread so.
    """
    layers, wanted = decoder_layers(model), recipe.trained_layers
    assert wanted is not None
    if not recipe.spread_layers:
        return layers[-wanted:] if wanted > 0 else layers[:-wanted]
    if len(layers) % wanted:
        raise LayersError(
            f"trained_layers {wanted} with spread_layers: the model has {len(layers)} layers, no "
            "multiple of it: use a divisor"
        )
    stretch = len(layers) // wanted
    return layers[stretch - 1 :: stretch]


def freeze_layers(model: nn.Module, recipe: Recipe) -> None:
    """Freeze all but the trained layers of a recipe, and give these the dtype of trained weights.

    Raises:
        LayersError: as ``trained_layers``.
    """
    model.requires_grad_(False)  # noqa: FBT003 - torch's own signature
    dtype = DTYPES[recipe.trained_dtype]
    for layer in trained_layers(model, recipe):
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)  # noqa: FBT003 - as above


@dataclass(slots=True)
class _Tied:
    """A parameter that several modules share: on the meta device, and drawn once."""

    laid_out: nn.Parameter
    drawn: nn.Parameter | None = None


def _tied_parameters(model: nn.Module) -> dict[int, _Tied]:
    """Parameters that more than one module holds, by identity."""
    held = [p for module in model.modules() for p in module.parameters(recurse=False)]
    counts = Counter(id(parameter) for parameter in held)
    return {id(p): _Tied(p) for p in held if counts[id(p)] > 1}


def _draw(model: nn.Module, part: nn.Module, device: torch.device, tied: dict[int, _Tied]) -> None:
    """Draw random weights for the modules of a part without any, by the model's own rules."""
    drawn = []
    for module in part.modules():
        fresh = False
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            shared = tied.get(id(parameter))
            weights = None if shared is None else shared.drawn
            if weights is None:
                # Parameters without a rule of the class get the distribution of linear layers.
                values = torch.empty_like(parameter, device=device).normal_(std=0.02)
                weights = nn.Parameter(values, parameter.requires_grad)
                fresh = True
            if shared is not None:
                shared.drawn = weights
            setattr(module, name, weights)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)  # noqa: SLF001 - setattr would register it anew
                fresh = True
        if fresh:
            drawn.append(module)
    for module in reversed(drawn):  # children first: a mixer redraws weights of its parts
        model._init_weights(module)  # type: ignore[operator] # noqa: SLF001 - the class's own rules


def _quantise_linears(
    module: nn.Module,
    recipe: Recipe,
    *,
    keep: nn.Module | None,
    quantise: Callable[[Any, nn.Linear, Recipe], None],
) -> None:
    """Replace linear layers by their quantised form.

    They are those that transformers quantises with bitsandbytes: of class nn.Linear itself, or
    Conv1D (integrations/bitsandbytes.py). The head and routers keep their precision: routers of
    transformers are no linear layers, and they are small.

    Raises:
        QuantisationError: transformers does not quantise a linear layer of the model.
    """
    for name, child in module.named_children():
        if child is keep or _is_quantised_layer(child):
            continue
        if type(child) is not nn.Linear and not isinstance(child, Conv1D):
            if isinstance(child, nn.Linear) and not is_router(child):
                raise QuantisationError(
                    f"method qlora: transformers' bitsandbytes integration leaves {name} "
                    f"({type(child).__name__}) unquantised: use method lora or full"
                )
            _quantise_linears(child, recipe, keep=keep, quantise=quantise)
            continue
        plain = _as_linear(child)
        linear = _quantised_layer(plain, recipe, DTYPES[recipe.compute_dtype])
        quantise(linear, plain, recipe)
        if hasattr(child, READS_IMAGES):  # a projector of one layer
            setattr(linear, READS_IMAGES, True)
        setattr(module, name, linear)


def _as_linear(layer: nn.Module) -> nn.Linear:
    """A linear layer as nn.Linear; Conv1D, that of GPT-2, holds the transposed matrix."""
    if isinstance(layer, nn.Linear):
        return layer
    assert isinstance(layer, Conv1D)
    return linear_with(nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias)


def _is_quantised_layer(module: nn.Module) -> bool:
    """Whether a module is a quantised linear layer of bitsandbytes."""
    import bitsandbytes as bnb  # noqa: PLC0415 - seconds, and only quantised weights need it

    return isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))


def _quantised_layer(plain: nn.Linear, recipe: Recipe, compute_dtype: torch.dtype) -> Any:
    """Layer of bitsandbytes for a linear layer, with its bias but without weights.

    Args:
        plain: linear layer.
        recipe: a QLoRA recipe.
        compute_dtype: dtype of products with 4-bit weights; those with int8 keep that of inputs.
    """
    import bitsandbytes as bnb  # noqa: PLC0415 - as above

    shape = {
        "input_features": plain.in_features,
        "output_features": plain.out_features,
        "bias": plain.bias is not None,
        "device": "meta",
    }
    if recipe.quantisation == "int8":
        layer = bnb.nn.Linear8bitLt(**shape, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
    else:
        layer = bnb.nn.Linear4bit(
            **shape,
            compute_dtype=compute_dtype,
            compress_statistics=recipe.double_quantisation,
            quant_type=recipe.quantisation,
        )
    layer.bias = plain.bias
    return layer


def _quantise(layer: Any, plain: nn.Linear, recipe: Recipe) -> None:
    """Give a layer of bitsandbytes the quantised weights of a linear layer, on its device."""
    import bitsandbytes as bnb  # noqa: PLC0415 - as above

    weight, device = plain.weight.data, plain.weight.device
    if recipe.quantisation == "int8":
        # bitsandbytes quantises to 8 bits on the way from the host to a device.
        on_host = weight.to("cpu")
        layer.weight = bnb.nn.Int8Params(on_host, requires_grad=False, has_fp16_weights=False)
    else:
        layer.weight = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=recipe.double_quantisation,
            quant_type=recipe.quantisation,
        )
    layer.to(device)


class EightBitParametrization(nn.Module):
    """Dequantises int8 values (experts, outputs, inputs) by their rows, in fp32, as axolotl does.

    Args:
        scales: (experts x outputs,) scales of the rows.
    """

    def __init__(self, scales: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scales", scales)

    @torch.no_grad()
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weights (experts, outputs, inputs)."""
        import bitsandbytes as bnb  # noqa: PLC0415 - as above

        rows = values.reshape(-1, values.shape[-1])
        weights: torch.Tensor = bnb.functional.int8_vectorwise_dequant(rows, self.scales)
        return weights.reshape(values.shape)


def quantise_experts(part: nn.Module, recipe: Recipe, values: QuantisedValues) -> None:
    """Quantise the fused matrices of experts, each of which is dequantised where it is read.

    This is what bitsandbytes' ``replace_parameter_4bit`` and axolotl's ``quantize_moe_experts``
    (axolotl/monkeypatch/moe_quant.py) make of them.
    """
    from bitsandbytes.nn import parametrize as bnb  # noqa: PLC0415 - as above

    for module in [module for module in part.modules() if is_fused(module)]:
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() != 3:
                continue
            quantised, constants = values(weight.detach(), recipe)
            stored: Any = nn.Parameter(quantised, requires_grad=False)
            if recipe.quantisation == "int8":
                rule: nn.Module = EightBitParametrization(constants)
            else:
                rule = bnb.Bnb4bitParametrization(constants)
                stored.quant_state = constants  # where those of linear layers have it
            setattr(module, name, stored)
            parametrize.register_parametrization(module, name, rule, unsafe=True)
            # They keep a matrix from being dequantised twice in a pass.
            bnb._register_parametrization_hooks(module, name)  # noqa: SLF001 - it has no other name


def _quantised_values(weight: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, Any]:
    import bitsandbytes as bnb  # noqa: PLC0415 - as above

    if recipe.quantisation == "int8":
        rows = weight.to(torch.float16).flatten(0, -2)  # on a CPU it takes no more dimensions
        values, scales, _ = bnb.functional.int8_vectorwise_quant(rows)
        return values.reshape(weight.shape), scales
    return bnb.functional.quantize_4bit(  # type: ignore[no-any-return]
        weight, compress_statistics=recipe.double_quantisation, quant_type=recipe.quantisation
    )


def format_of(parameter: torch.Tensor) -> str | None:
    """Format of a quantised parameter, as ``Recipe.quantisation`` names it; None for another."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return str(state.quant_type)
    return "int8" if parameter.dtype == torch.int8 else None


def quantisation_constants(model: nn.Module) -> Iterator[torch.Tensor]:
    """Constants of the quantised weights of a model, which are neither parameters nor buffers."""
    for parameter in model.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
            if state.nested:
                yield from (state.offset, state.state2.absmax, state.state2.code)
    for layer in model.modules():
        module: Any = layer
        weight: Any = module._parameters.get("weight")  # noqa: SLF001 - getattr would ask wrappers
        if weight is not None and format_of(weight) == "int8":
            # The first forward pass moves the scales of the rows from the weight to the layer.
            yield weight.SCB if weight.SCB is not None else module.state.SCB
