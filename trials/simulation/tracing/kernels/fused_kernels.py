"""Simulated operators for GPU kernels that PyTorch cannot trace without a GPU.

Each has the arguments, results, saved tensors, workspace and costs of the real kernel. They never
compute anything.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.kernels.eight_bit_products import eight_bit_products
from trials.simulation.tracing.kernels.label_log_probs import simulated_log_probs
from trials.simulation.tracing.kernels.packed_attention import (
    BACKWARD_BY_FORWARD,
    attention_gradients,
    attention_shape,
    masked_attention,
)
from trials.simulation.tracing.operator_costs import (
    KERNELS,
    DeclaredKernel,
    Described,
    declare,
    moved_bytes,
    rate,
    touched_bytes,
)
from trials.training.tasks import losses


def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001, FBT001 - the operator's signature
    batch, heads, length, _ = query.shape
    # The kernel writes tokens before heads in memory.
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, length, dtype=torch.float32)


def _attention_flops(query: Tensor, key: Tensor, is_causal: bool) -> float:  # noqa: FBT001 - as above
    """FLOPs of two products, 4 B H L L D; half of them if causal (2205.14135, App. E)."""
    batch, heads, length, width = query.shape
    return 4.0 * batch * heads * length * key.shape[2] * width * (0.5 if is_causal else 1.0)


def _attention_work(args: Sequence[Any], result: Any) -> list[Described]:
    query, key, *_ = args
    flops = _attention_flops(query, key, args[-1])
    numbers = (moved_bytes(args, result), flops, *attention_shape(query, key), 1)
    return [(OperatorClass.ATTENTION_FORWARD, rate(query), numbers)]


def _attention_backward_work(args: Sequence[Any], result: Any) -> list[Described]:
    _, query, key, *_ = args
    # Five products to two in the forward pass; three kernels: preparation, products, cast.
    flops = BACKWARD_BY_FORWARD * _attention_flops(query, key, args[-1])
    numbers = (moved_bytes(args, result), flops, *attention_shape(query, key), 3)
    return [(OperatorClass.ATTENTION_BACKWARD, rate(query), numbers)]


def _attention_backward_workspace(args: Sequence[Any]) -> int:
    """Workspace of the backward pass in bytes (PyTorch's flash_api.cpp, mha_bwd).

    It holds the gradient of the queries in fp32 and row sums; with grouped queries, also gradients
    of keys and values for every query head.
    """
    _, query, key, *_ = args
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    accumulated = 4 * batch * heads * rounded * (-(-width // 32) * 32 + 1)
    grouped = key.shape[1] != heads
    return int(accumulated) + (2 * batch * key.shape[2] * heads * width * 2 if grouped else 0)


declare(
    "attention(Tensor query, Tensor key, Tensor value, bool is_causal) -> (Tensor, Tensor)",
    _attention,
    DeclaredKernel(_attention_work),
)
declare(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, bool is_causal) -> (Tensor, Tensor, Tensor)",
    attention_gradients,
    DeclaredKernel(_attention_backward_work, _attention_backward_workspace),
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:  # noqa: FBT001 - autograd passes no keywords
        out, logsumexp = torch.ops.simulated.attention(query, key, value, is_causal)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.is_causal = is_causal
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = torch.ops.simulated.attention_backward(grads[0], *ctx.saved_tensors, ctx.is_causal)
        return (*back, None)


def _four_bit_product(args: Sequence[Any], result: Any) -> list[Described]:
    """Costs of bitsandbytes' product for more than a few rows: dequantise all, then multiply.

    Under double quantisation, two kernels first unpack the blocks' constants and add an offset.
    """
    tokens, packed, shape, _, block = args[:5]
    nested = args[7]
    columns, inner = shape
    rows = tokens.numel() / inner
    plain = float(columns * inner * tokens.element_size())
    blocks = math.ceil(columns * inner / block)
    dequantised = (touched_bytes(packed) + 4.0 * blocks + plain, columns * inner, 0, 0, 0, 0, 1)
    moved = moved_bytes((tokens,), result) + plain
    product = (moved, 2.0 * rows * inner * columns, rows, inner, columns, 1, 1)
    constants = (moved_bytes((nested,), None) + 12.0 * blocks, 0, 0, 0, 0, 0, 2)
    return [
        *([] if nested is None else [(OperatorClass.MEMORY, Rate.BF16, constants)]),
        (OperatorClass.DEQUANTISATION, Rate.BF16, dequantised),
        (OperatorClass.MATRIX_PRODUCT, rate(tokens), product),
    ]


def _four_bit_workspace(args: Sequence[Any]) -> int:
    """Bytes of the weights in the tokens' precision, and of the blocks' constants if unpacked."""
    tokens, _, shape, _, block = args[:5]
    elements = math.prod(shape)
    constants = 0 if args[7] is None else 4 * math.ceil(elements / block)
    return int(elements * tokens.element_size() + constants)


def _dequantisation(args: Sequence[Any], result: Any) -> list[Described]:
    moved, weights = moved_bytes(args, result), float(result.numel())
    return [(OperatorClass.DEQUANTISATION, Rate.BF16, (moved, weights, 0, 0, 0, 0, 1))]


KERNELS["bitsandbytes::gemm_4bit"] = DeclaredKernel(_four_bit_product, _four_bit_workspace)
KERNELS["bitsandbytes::dequantize_4bit"] = DeclaredKernel(_dequantisation)


# Functions that autocast runs in fp32 on CUDA but not on a CPU (ATen's autocast_mode.h), as far as
# models of transformers call them.
FP32_UNDER_AUTOCAST: dict[Any, tuple[str, ...]] = {
    functional: ("layer_norm", "group_norm", "softmax", "log_softmax", "softplus"),
    torch: ("cumsum", "exp", "log", "log_softmax", "norm", "pow", "prod", "rsqrt", "softmax"),
    Tensor: ("cumsum", "exp", "log", "log_softmax", "norm", "pow", "prod", "rsqrt", "softmax"),
}


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let PyTorch's functions that choose kernels by device choose those of a GPU.

    The functions are replaced by name: a TorchFunctionMode is inactive in the backward pass, where
    checkpoints recompute their layers.
    """
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (functional, "scaled_dot_product_attention", _scaled_dot_product_attention),
        (functional, "dropout", _dropout),
        *eight_bit_products(),
        (losses, "label_log_probs", simulated_log_probs),
        *(
            (place, name, _in_fp32(getattr(place, name)))
            for place, names in FP32_UNDER_AUTOCAST.items()
            for name in names
        ),
    ]
    own = [(place, name, vars(place).get(name)) for place, name, _ in replacements]
    for place, name, function in replacements:
        setattr(place, name, function)
    try:
        yield
    finally:
        for place, name, before in own:
            if before is None:  # a method that the class inherits
                delattr(place, name)
            else:
                setattr(place, name, before)


@contextlib.contextmanager
def flash_by_sdpa() -> Iterator[None]:
    """Drop the cap on scores and the window's mask, which FlashAttention-2 has in its kernel."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - seconds to import

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flash(  # noqa: PLR0913, PLR0917 - the signature of transformers' functions
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> Any:
        del softcap, attention_mask
        return own(module, query, key, value, None, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = flash
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function take its tensors in fp32 under autocast, as CUDA's autocast does."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _single, (args, kwargs))
        return function(*args, **kwargs)

    return run


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor


def _scaled_dot_product_attention(  # noqa: PLR0913, PLR0917 - PyTorch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as above
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 - as above
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        # As autocast does for PyTorch's own function, which this one stands in for.
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_grouped = enable_gqa and key.shape[1] < query.shape[1]
    if is_grouped and (attn_mask is not None or query.dtype == torch.float32):
        # FlashAttention takes no mask and no fp32, and the memory-efficient kernel no grouped
        # queries: PyTorch falls back to plain products, and keeps every score.
        return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]  # noqa: SLF001 - the operator's name
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    if attn_mask is not None:
        return masked_attention(query, key, value, attn_mask, dropout_p, scale)
    return _Attention.apply(query, key, value, is_causal)  # type: ignore[no-any-return,no-untyped-call]


def _dropout(
    input: Tensor,  # noqa: A002 - PyTorch's signature
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - as above
    inplace: bool = False,  # noqa: FBT001, FBT002 - as above
) -> Tensor:
    if not training or p == 0.0 or inplace:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, train=True)[0]
