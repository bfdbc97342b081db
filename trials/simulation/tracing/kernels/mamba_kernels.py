"""Simulated operators for mamba-ssm's kernels: shapes, FLOPs and bytes moved."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trials.models.mamba import PACKAGES
from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import DeclaredKernel, Described, declare, moved_bytes

SCAN_CHUNK = 2048  # tokens per saved state of mamba-ssm's scan (selective_scan.cpp)


def _scan(  # noqa: PLR0913, PLR0917 - the operator's signature
    inputs: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,  # noqa: ARG001 - as above
    c: Tensor,  # noqa: ARG001 - as above
    gate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Selective scan: the output, and the states that its backward pass reads."""
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
    """Gradients of the selective scan."""
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
    """Costs of a scan with this number of passes over its inputs."""

    def work(args: Sequence[Any], result: Any) -> list[Described]:
        # Nine operations per state, channel and token, by the authors' count.
        inputs, a = (args[0], args[2]) if passes == 1 else (args[1], args[3])
        flops = 9.0 * passes * inputs.numel() * a.shape[-1]
        return [(OperatorClass.SCAN, Rate.FP32, (moved_bytes(args, result), flops, 0, 0, 0, 0, 1))]

    return work


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001 - the operator's signature
    """Causal convolution of mamba-ssm."""
    return torch.empty_like(inputs)


def _convolved_backward(
    grad: Tensor,  # noqa: ARG001 - the operator's signature
    inputs: Tensor,  # noqa: ARG001 - as above
    weight: Tensor,
    into: Tensor,  # noqa: ARG001 - as above
) -> tuple[Tensor, Tensor]:
    """Gradients of the causal convolution."""
    single = torch.float32
    return (
        torch.empty_like(weight, dtype=single),
        weight.new_empty(weight.shape[0], dtype=single),
    )


def _memory_bound_work(args: Sequence[Any], result: Any) -> list[Described]:
    """Costs of a kernel that is bound by memory."""
    return [(OperatorClass.MEMORY, Rate.BF16, (moved_bytes(args, result), 0, 0, 0, 0, 0, 1))]


declare(
    "scan(Tensor inputs, Tensor delta, Tensor a, Tensor b, Tensor c, Tensor gate) "
    "-> (Tensor, Tensor, Tensor)",
    _scan,
    DeclaredKernel(_scan_work(1)),
)
declare(
    "scan_backward(Tensor grad, Tensor inputs, Tensor delta, Tensor a, Tensor b, Tensor c, "
    "Tensor states, Tensor out) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_backward,
    DeclaredKernel(_scan_work(2.5)),
)
declare(
    "convolved(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor",
    _convolved,
    DeclaredKernel(_memory_bound_work),
)
declare(
    "convolved_backward(Tensor grad, Tensor inputs, Tensor weight, Tensor into) "
    "-> (Tensor, Tensor)",
    _convolved_backward,
    DeclaredKernel(_memory_bound_work),
)


class _MambaInner(torch.autograd.Function):
    """mamba-ssm's MambaInnerFn, line by line, at its default checkpoint level of 1."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        """Map inputs and gates (batch, 2 x width, length) to (batch, length, hidden)."""
        both, conv_weight, conv_bias, x_weight, delta_weight, out_weight, a, d, delta_bias = tensors
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
        """Recompute convolution and step sizes, then compute all gradients."""
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
    """Step sizes and both projections of the state, computed from the scan's input."""
    batch, width, length = inputs.shape
    rank, state = delta_weight.shape[1], a.shape[1]
    delta = (delta_weight @ low[:, :rank].t()).view(width, batch, length).transpose(0, 1)
    b, c = (
        low[:, start : start + state].view(batch, length, 1, state).permute(0, 2, 3, 1).contiguous()
        for start in (rank, rank + state)
    )
    return delta, b, c


def _mamba_inner_fn(  # noqa: PLR0913, PLR0917 - the signature of mamba-ssm
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
    """Replacement for mamba-ssm's ``mamba_inner_fn``."""
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


def install_simulated_mamba() -> None:
    """Install modules under the names of mamba-ssm's packages, with simulated operators."""
    for name in PACKAGES:
        sys.modules[name] = ModuleType(name)
    sys.modules["mamba_ssm"].mamba_inner_fn = _mamba_inner_fn  # type: ignore[attr-defined]
