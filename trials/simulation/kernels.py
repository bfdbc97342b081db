"""GPU kernels that PyTorch does not trace here: operators whose results have their shapes.

Each stands for the real one: what goes in and out, what autograd keeps of it, what it takes while
it runs, and its work. Nothing is ever computed with them.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trials.simulation.events import Rate, Work
from trials.simulation.operators import KERNELS, RATES, Described, Kernel, tensors_in, touched_bytes

LIBRARY: Any = torch.library.Library("simulated", "DEF")  # type: ignore[no-untyped-call]
SCAN_CHUNK = 2048  # tokens that mamba-ssm's scan keeps one state for (selective_scan.cpp)


def _rate(tensor: Tensor) -> Rate:
    return RATES.get(tensor.dtype, Rate.FP32)


def _moved(args: Sequence[Any], result: object) -> float:
    return float(sum(touched_bytes(t) for t in (*tensors_in(args), *tensors_in(result))))


def declare(signature: str, fake: Any, kernel: Kernel) -> None:
    """Makes an operator that has a shape rule and does nothing else."""
    name = signature.partition("(")[0]
    LIBRARY.define(signature)
    torch.library.register_fake(f"simulated::{name}", fake, lib=LIBRARY)
    KERNELS[f"simulated::{name}"] = kernel


# Attention: FlashAttention-2 (2307.08691) as PyTorch ships it, forward and backward. #


def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001, FBT001 - the operator's signature
    batch, heads, length, _ = query.shape
    # Tokens before heads in memory, as the kernel writes them.
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, length, dtype=torch.float32)


def _attention_backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    grad: Tensor,  # noqa: ARG001 - as above
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,  # noqa: ARG001 - as above
    logsumexp: Tensor,  # noqa: ARG001 - as above
    is_causal: bool,  # noqa: ARG001, FBT001 - as above
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention_flops(query: Tensor, key: Tensor, is_causal: bool) -> float:  # noqa: FBT001 - as above
    """Two products of queries and keys, 4 B H L L D; causal: half of it (2205.14135, App. E)."""
    batch, heads, length, width = query.shape
    return 4.0 * batch * heads * length * key.shape[2] * width * (0.5 if is_causal else 1.0)


def _attention_work(args: Sequence[Any], result: Any) -> list[Described]:
    query, key, *_ = args
    flops = _attention_flops(query, key, args[-1])
    numbers = (_moved(args, result), flops, 0, 0, 0, 0, 1)
    return [(Work.ATTENTION_FORWARD, _rate(query), numbers)]


def _attention_backward_work(args: Sequence[Any], result: Any) -> list[Described]:
    _, query, key, *_ = args
    # Five products where the forward pass has two; three kernels: preparation, products, cast.
    flops = 2.5 * _attention_flops(query, key, args[-1])
    numbers = (_moved(args, result), flops, 0, 0, 0, 0, 3)
    return [(Work.ATTENTION_BACKWARD, _rate(query), numbers)]


def _attention_backward_workspace(args: Sequence[Any]) -> int:
    """What the backward pass takes (PyTorch's flash_api.cpp, mha_bwd).

    The gradient of the queries in fp32 and row sums; with grouped queries, gradients of keys and
    values for every query head.
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
    Kernel(_attention_work),
)
declare(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, bool is_causal) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    Kernel(_attention_backward_work, _attention_backward_workspace),
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


# 4-bit weights: bitsandbytes' own operators; their work is declared here. #


def _four_bit_product(args: Sequence[Any], result: Any) -> list[Described]:
    """What bitsandbytes does for more than a few rows: dequantise all, then multiply.

    First the blocks' constants, where they are quantised in turn: unpacked, then an offset added.
    """
    tokens, packed, shape, _, block = args[:5]
    nested = args[7]
    columns, inner = shape
    rows = tokens.numel() / inner
    plain = float(columns * inner * tokens.element_size())
    blocks = math.ceil(columns * inner / block)
    dequantised = (touched_bytes(packed) + 4.0 * blocks + plain, columns * inner, 0, 0, 0, 0, 1)
    moved = _moved((tokens,), result) + plain
    product = (moved, 2.0 * rows * inner * columns, rows, inner, columns, 1, 1)
    constants = (_moved((nested,), None) + 12.0 * blocks, 0, 0, 0, 0, 0, 2)
    return [
        *([] if nested is None else [(Work.MEMORY, Rate.BF16, constants)]),
        (Work.DEQUANTISATION, Rate.BF16, dequantised),
        (Work.MATRIX_PRODUCT, _rate(tokens), product),
    ]


def _four_bit_workspace(args: Sequence[Any]) -> int:
    """The weights in the tokens' precision, and the constants of their blocks where unpacked."""
    tokens, _, shape, _, block = args[:5]
    elements = math.prod(shape)
    constants = 0 if args[7] is None else 4 * math.ceil(elements / block)
    return int(elements * tokens.element_size() + constants)


def _dequantisation(args: Sequence[Any], result: Any) -> list[Described]:
    moved, weights = _moved(args, result), float(result.numel())
    return [(Work.DEQUANTISATION, Rate.BF16, (moved, weights, 0, 0, 0, 0, 1))]


KERNELS["bitsandbytes::gemm_4bit"] = Kernel(_four_bit_product, _four_bit_workspace)
KERNELS["bitsandbytes::dequantize_4bit"] = Kernel(_dequantisation)


# Mamba: causal-conv1d's convolution and mamba-ssm's selective scan (2312.00752). #


def _scan(  # noqa: PLR0913, PLR0917 - the operator's signature
    inputs: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,  # noqa: ARG001 - as above
    c: Tensor,  # noqa: ARG001 - as above
    gate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, width, length = inputs.shape
    chunks = -(-length // SCAN_CHUNK)
    states = inputs.new_empty(batch, width, chunks, 2 * a.shape[-1], dtype=torch.float32)
    return torch.empty_like(delta), states, torch.empty_like(gate)


def _scan_backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    grad: Tensor,
    inputs: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,  # noqa: ARG001 - as above
    out: Tensor,
) -> tuple[Tensor, ...]:
    del grad
    width = inputs.shape[1]
    single = torch.float32
    return (
        torch.empty_like(inputs),
        torch.empty_like(delta),
        torch.empty_like(a, dtype=single),
        torch.empty_like(b, dtype=single),
        torch.empty_like(c, dtype=single),
        inputs.new_empty(width, dtype=single),
        inputs.new_empty(width, dtype=single),
        torch.empty_like(out),
    )


def _scan_work(passes: float) -> Any:
    def work(args: Sequence[Any], result: Any) -> list[Described]:
        # Nine operations for each state of each channel and token, as the authors count them.
        inputs, a = (args[0], args[2]) if passes == 1 else (args[1], args[3])
        flops = 9.0 * passes * inputs.numel() * a.shape[-1]
        return [(Work.SCAN, Rate.FP32, (_moved(args, result), flops, 0, 0, 0, 0, 1))]

    return work


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(inputs)


def _convolved_backward(
    grad: Tensor,  # noqa: ARG001 - the operator's signature
    inputs: Tensor,  # noqa: ARG001 - as above
    weight: Tensor,
    into: Tensor,  # noqa: ARG001 - as above
) -> tuple[Tensor, Tensor]:
    single = torch.float32
    return (
        torch.empty_like(weight, dtype=single),
        weight.new_empty(weight.shape[0], dtype=single),
    )


def _of_memory(args: Sequence[Any], result: Any) -> list[Described]:
    return [(Work.MEMORY, Rate.BF16, (_moved(args, result), 0, 0, 0, 0, 0, 1))]


declare(
    "scan(Tensor inputs, Tensor delta, Tensor a, Tensor b, Tensor c, Tensor gate) "
    "-> (Tensor, Tensor, Tensor)",
    _scan,
    Kernel(_scan_work(1)),
)
declare(
    "scan_backward(Tensor grad, Tensor inputs, Tensor delta, Tensor a, Tensor b, Tensor c, "
    "Tensor states, Tensor out) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_backward,
    Kernel(_scan_work(2.5)),
)
declare(
    "convolved(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor",
    _convolved,
    Kernel(_of_memory),
)
declare(
    "convolved_backward(Tensor grad, Tensor inputs, Tensor weight, Tensor into) "
    "-> (Tensor, Tensor)",
    _convolved_backward,
    Kernel(_of_memory),
)


class _MambaInner(torch.autograd.Function):
    """mamba-ssm's MambaInnerFn, line by line, at its default checkpoint level of 1."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - the function it stands for
        ctx: Any,
        both: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        x_weight: Tensor,
        delta_weight: Tensor,
        out_weight: Tensor,
        a: Tensor,
        d: Tensor | None,
        delta_bias: Tensor | None,
    ) -> Tensor:
        """Inputs and gates (batch, 2 x width, length) to (batch, length, hidden)."""
        both = both if both.stride(-1) == 1 else both.contiguous()
        conv_weight = conv_weight.squeeze(1)
        inputs, gate = both.chunk(2, dim=1)
        convolved = torch.ops.simulated.convolved(inputs, conv_weight, conv_bias)
        rows = convolved.transpose(1, 2).reshape(-1, convolved.shape[1])
        low = functional.linear(rows, x_weight)
        delta, b, c = _delta_b_c(low, delta_weight, a, inputs)
        out, states, gated = torch.ops.simulated.scan(convolved, delta, a, b, c, gate)
        ctx.save_for_backward(
            both, conv_weight, low, x_weight, delta_weight, out_weight, a, b, c, states, out
        )
        ctx.conv_bias = conv_bias
        ctx.has_skip, ctx.has_delta_bias = d is not None, delta_bias is not None
        return functional.linear(gated.transpose(1, 2), out_weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Works the convolution and delta out again, then goes back."""
        both, conv_weight, low, x_weight, delta_weight, out_weight, a, b, c, states, out = (
            ctx.saved_tensors
        )
        inputs, _ = both.chunk(2, dim=1)
        batch, width, length = inputs.shape
        rank = delta_weight.shape[1]
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        convolved = torch.ops.simulated.convolved(inputs, conv_weight, ctx.conv_bias)
        delta = (delta_weight @ low[:, :rank].t()).view(width, batch, length).transpose(0, 1)
        grad_both = torch.empty_like(both)
        columns = grad.permute(2, 0, 1).reshape(grad.shape[2], -1)
        grad_gated = (out_weight.t() @ columns).view(width, batch, length).transpose(0, 1)
        grad_conv, grad_delta, grad_a, grad_b, grad_c, grad_d, grad_delta_bias, gated = (
            torch.ops.simulated.scan_backward(grad_gated, convolved, delta, a, b, c, states, out)
        )
        grad_out_weight = columns @ gated.transpose(0, 1).reshape(width, -1).t()
        grad_low = torch.empty_like(low)
        grad_low[:, rank : rank + a.shape[1]] = grad_b.transpose(2, 3).reshape(-1, a.shape[1])
        grad_low[:, rank + a.shape[1] :] = grad_c.transpose(2, 3).reshape(-1, a.shape[1])
        rows = grad_delta.transpose(0, 1).reshape(width, -1)
        grad_delta_weight = rows @ low[:, :rank]
        grad_low[:, :rank] = rows.t() @ delta_weight
        flat = grad_conv.transpose(0, 1).reshape(width, -1)
        grad_x_weight = grad_low.t() @ convolved.transpose(1, 2).reshape(-1, width)
        flat = torch.addmm(flat, x_weight.t(), grad_low.t())
        back = flat.view(width, batch, length).transpose(0, 1)
        into, _ = grad_both.chunk(2, dim=1)
        grad_conv_weight, grad_conv_bias = torch.ops.simulated.convolved_backward(
            back, inputs, conv_weight, into
        )
        return (
            grad_both,
            grad_conv_weight.to(conv_weight.dtype).unsqueeze(1),
            None if ctx.conv_bias is None else grad_conv_bias.to(conv_weight.dtype),
            grad_x_weight,
            grad_delta_weight,
            grad_out_weight,
            grad_a,
            grad_d if ctx.has_skip else None,
            grad_delta_bias if ctx.has_delta_bias else None,
        )


def _delta_b_c(
    low: Tensor, delta_weight: Tensor, a: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the scan takes from its input: step sizes and both projections of the state."""
    batch, width, length = inputs.shape
    rank, state = delta_weight.shape[1], a.shape[1]
    delta = (delta_weight @ low[:, :rank].t()).view(width, batch, length).transpose(0, 1)
    b, c = (
        low[:, start : start + state].view(batch, length, 1, state).permute(0, 2, 3, 1).contiguous()
        for start in (rank, rank + state)
    )
    return delta, b, c


def mamba_inner_fn(  # noqa: PLR0913, PLR0917 - the function it stands for
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,  # noqa: N803 - callers name it so
    B: Tensor | None = None,  # noqa: ARG001, N803 - as above
    C: Tensor | None = None,  # noqa: ARG001, N803 - as above
    D: Tensor | None = None,  # noqa: N803 - as above
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,  # noqa: ARG001, FBT001, FBT002 - as above
) -> Tensor:
    """In the place of mamba-ssm's function of this name."""
    out: Tensor = _MambaInner.apply(  # type: ignore[no-untyped-call]
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        out_proj_weight,
        A,
        D,
        delta_bias,
    )
    return out if out_proj_bias is None else out + out_proj_bias.to(out.dtype)


# What PyTorch itself does otherwise on a GPU. #


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """While it lasts, PyTorch's functions that choose kernels by device choose those of a GPU.

    They are exchanged by name: a function mode is off in the backward pass, where checkpoints run
    their layers again.
    """
    exchanged = {
        "scaled_dot_product_attention": _scaled_dot_product_attention,
        "dropout": _dropout,
    }
    own = {name: getattr(functional, name) for name in exchanged}
    for name, function in exchanged.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(functional, name, function)


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
    if query.dtype == torch.float32 and enable_gqa and key.shape[1] < query.shape[1]:
        # FlashAttention takes no fp32 and the memory-efficient kernel no shared heads: PyTorch
        # multiplies step by step, and keeps every score.
        return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]  # noqa: SLF001 - the operator's name
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
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
