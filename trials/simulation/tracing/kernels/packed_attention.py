"""Simulated attention within packed examples.

It is FlashAttention-2's kernel for examples of varying length, or PyTorch's memory-efficient kernel
with a mask.

Sources: flash-attn 2.8.3, ``flash_attn_interface.py`` and ``flash_api.cpp`` (``mha_varlen_fwd``,
``mha_varlen_bwd``); PyTorch's ``attention.cpp`` and ``attention_backward.cu``.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.simulation.recording import OperatorClass
from trials.simulation.tracing.operator_costs import (
    KERNELS,
    DeclaredKernel,
    Described,
    declare,
    moved_bytes,
    rate,
)

ROWS_PER_BLOCK = 128  # of queries, by which the varlen kernel shifts each example's rows
EFFICIENT_BLOCK = 64  # width that the memory-efficient kernel rounds up to
BACKWARD_BY_FORWARD = 2.5  # five products to two in the forward pass


def masked_attention(  # noqa: PLR0913, PLR0917 - arguments of PyTorch's function
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Attention with a mask, (batch, heads, length, width).

    PyTorch makes a bias in the dtype of the queries of a boolean mask, in every layer. The backward
    pass needs it.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask.logical_not(), -torch.inf, torch.zeros((), dtype=query.dtype))
    bias = mask.expand(*query.shape[:3], key.shape[2])
    attention = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001 - its name
    return attention(query, key, value, bias, True, dropout, scale=scale)[0]  # type: ignore[no-any-return]  # noqa: FBT003 - the operator's signature


def attention_shape(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Queries, width, keys and heads of all examples, in the order of ``Column``.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads of keys, keys, width).
    """
    batch, heads, length, width = query.shape
    return length, width, key.shape[2], batch * heads


def _masked_flops(query: Tensor, key: Tensor) -> float:
    """FLOPs of two products of all queries with all keys: the kernel skips no masked block."""
    batch, heads, length, width = query.shape
    return 4.0 * batch * heads * length * key.shape[2] * width


def _masked_work(args: Sequence[Any], result: Any) -> list[Described]:
    query, key, *_ = args
    numbers = (
        moved_bytes(args, result),
        _masked_flops(query, key),
        *attention_shape(query, key),
        1,
    )
    return [(OperatorClass.ATTENTION_FORWARD, rate(query), numbers)]


def _masked_backward_work(args: Sequence[Any], result: Any) -> list[Described]:
    _, query, key, *_ = args
    flops = BACKWARD_BY_FORWARD * _masked_flops(query, key)
    numbers = (moved_bytes(args, result), flops, *attention_shape(query, key), 2)
    return [(OperatorClass.ATTENTION_BACKWARD, rate(query), numbers)]


def _masked_backward_workspace(args: Sequence[Any]) -> int:
    """Row sums in fp32, and the gradient of queries in fp32 where it is not that already.

    The last block of queries counts as if it ended with them, so that sizes are polynomials.
    """
    query = args[1]
    batch, heads, length, width = query.shape
    rounded = -(-width // EFFICIENT_BLOCK) * EFFICIENT_BLOCK
    sums = 0 if query.dtype == torch.float32 else 4 * batch * heads * length * rounded
    return int(4 * batch * heads * length + sums)


_MASKED = "aten::_scaled_dot_product_efficient_attention"
KERNELS[_MASKED] = DeclaredKernel(_masked_work)
KERNELS[f"{_MASKED}_backward"] = DeclaredKernel(_masked_backward_work, _masked_backward_workspace)


def _varlen(
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - the operator's signature
    value: Tensor,
    bounds: Tensor,  # noqa: ARG001 - as above
    is_causal: bool,  # noqa: ARG001, FBT001 - as above
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, value.shape[-1])
    normalisers = query.new_empty(heads, tokens, dtype=torch.float32)
    return out, normalisers, query.new_empty(2, dtype=torch.int64)


def attention_gradients(
    grad: Tensor,  # noqa: ARG001 - the operator's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, as each fused attention makes them."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _varlen_flops(query: Tensor, bounds: Tensor, is_causal: bool) -> float:  # noqa: FBT001 - as above
    """FLOPs of two products within each of equally long examples; half of them if causal."""
    tokens, heads, width = query.shape
    examples = bounds.numel() - 1
    return 4.0 * heads * width * tokens * tokens / examples * (0.5 if is_causal else 1.0)


def _varlen_shape(query: Tensor, bounds: Tensor) -> tuple[float, int, float, int]:
    """Queries of an example, width, keys and heads of all examples, in the order of ``Column``."""
    tokens, heads, width = query.shape
    examples = bounds.numel() - 1
    return tokens / examples, width, tokens / examples, heads * examples


def _varlen_work(args: Sequence[Any], result: Any) -> list[Described]:
    query, _, _, bounds, is_causal = args
    flops = _varlen_flops(query, bounds, is_causal)
    numbers = (moved_bytes(args, result), flops, *_varlen_shape(query, bounds), 1)
    return [(OperatorClass.ATTENTION_FORWARD, rate(query), numbers)]


def _varlen_backward_work(args: Sequence[Any], result: Any) -> list[Described]:
    query, bounds, is_causal = args[1], args[7], args[8]
    flops = BACKWARD_BY_FORWARD * _varlen_flops(query, bounds, is_causal)
    # Three kernels: preparation, products, cast.
    numbers = (moved_bytes(args, result), flops, *_varlen_shape(query, bounds), 3)
    return [(OperatorClass.ATTENTION_BACKWARD, rate(query), numbers)]


def _varlen_backward_workspace(args: Sequence[Any]) -> int:
    """Gradient of the queries in fp32 and row sums, with a block of rows more for each example.

    With grouped queries, also the gradients of keys and values for every query head.
    """
    query, key, bounds = args[1], args[2], args[7]
    tokens, heads, width = query.shape
    rows = tokens + ROWS_PER_BLOCK * (bounds.numel() - 1)
    accumulated = 4 * heads * rows * (-(-width // 32) * 32 + 1)
    grouped = key.shape[1] != heads
    return int(accumulated) + (2 * query.element_size() * tokens * heads * width if grouped else 0)


declare(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor bounds, bool is_causal) "
    "-> (Tensor, Tensor, Tensor)",
    _varlen,
    DeclaredKernel(_varlen_work),
)
declare(
    "varlen_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor normalisers, Tensor state, Tensor bounds, bool is_causal) -> (Tensor, Tensor, Tensor)",
    attention_gradients,
    DeclaredKernel(_varlen_backward_work, _varlen_backward_workspace),
)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd passes no keywords
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        is_causal: bool,  # noqa: FBT001 - as above
    ) -> Tensor:
        out, *state = torch.ops.simulated.varlen_attention(query, key, value, bounds, is_causal)
        ctx.save_for_backward(query, key, value, out, *state, bounds)
        ctx.is_causal = is_causal
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = torch.ops.simulated.varlen_attention_backward(
            grads[0], *ctx.saved_tensors, ctx.is_causal
        )
        return (*back, None, None)


def _flash_varlen(  # noqa: PLR0913 - arguments of FlashAttention's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,  # noqa: ARG001 - as above
    causal: bool = False,
    **_: Any,
) -> Tensor:
    return _VarlenAttention.apply(query, key, value, cu_seqlens_q, causal)  # type: ignore[no-any-return,no-untyped-call]


@contextlib.contextmanager
def varlen_by_simulation() -> Iterator[None]:
    """Let models with sdpa run transformers' code for FlashAttention-2 on simulated kernels."""
    from transformers import modeling_flash_attention_utils as utils  # noqa: PLC0415 - seconds
    from transformers.integrations.flash_attention import flash_attention_forward  # noqa: PLC0415
    from transformers.masking_utils import (  # noqa: PLC0415 - as above
        ALL_MASK_ATTENTION_FUNCTIONS,
        flash_attention_mask,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - as above

    functions = (None, _flash_varlen, None, None, None)
    process = utils._lazy_define_process_function(_flash_varlen)  # noqa: SLF001 - no other name
    own_import = utils.lazy_import_flash_attention
    replaced = (
        (ALL_ATTENTION_FUNCTIONS, flash_attention_forward),
        (ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask),
    )
    own = [(functions_of, functions_of["sdpa"]) for functions_of, _ in replaced]
    utils.lazy_import_flash_attention = lambda *_args, **_kwargs: (functions, (process, process))
    for functions_of, function in replaced:
        functions_of["sdpa"] = function
    try:
        yield
    finally:
        utils.lazy_import_flash_attention = own_import
        for functions_of, function in own:
            functions_of["sdpa"] = function
