"""Simulated layers of liger-kernel: its autograd functions with declared Triton kernels.

They save, allocate and overwrite what the functions of liger-kernel 0.8.5 do (ops/rms_norm.py,
ops/swiglu.py, ops/rope.py).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trials.models.liger_layers import ROPE, family_code
from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    DeclaredKernel,
    Described,
    declare,
    tensors_in,
    touched_bytes,
)

# Rows of the partial sums of a norm's gradient, one for each multiprocessor: those of an H100. A
# trace serves any GPU, and 100 rows more or less are a few MB at most.
MULTIPROCESSORS = 132


def _no_result(*_: Any) -> None:
    """Shape rule of a kernel that overwrites its arguments."""


def _moving(written_again: int) -> DeclaredKernel:
    """Kernel that reads or writes every tensor once, and writes some of the last ones again."""

    def work(args: Sequence[Any], _result: Any) -> list[Described]:
        tensors = tensors_in(args)
        overwritten = tensors[len(tensors) - written_again :]
        moved = float(sum(map(touched_bytes, (*tensors, *overwritten))))
        return [(OperatorClass.MEMORY, Rate.BF16, (moved, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0))]

    return DeclaredKernel(work)


declare(
    "liger_rms_norm(Tensor x, Tensor w, Tensor(a!) rstd, Tensor(b!) y) -> ()",
    _no_result,
    _moving(0),
)
declare(
    "liger_rms_norm_backward(Tensor x, Tensor w, Tensor rstd, Tensor? dw, Tensor(a!) dy) -> ()",
    _no_result,
    _moving(1),
)
declare("liger_swiglu(Tensor a, Tensor b, Tensor(a!) c) -> ()", _no_result, _moving(0))
declare(
    "liger_swiglu_backward(Tensor dc, Tensor(a!) a, Tensor(b!) b) -> ()", _no_result, _moving(2)
)
declare(
    "liger_rope(Tensor cos, Tensor sin, Tensor(a!) q, Tensor(b!) k) -> ()", _no_result, _moving(2)
)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        y = torch.empty_like(rows)
        rstd = rows.new_empty(rows.shape[0], dtype=torch.float32)
        torch.ops.simulated.liger_rms_norm(rows, weight, rstd, y)
        ctx.save_for_backward(rows, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight, rstd = ctx.saved_tensors
        dy = grads[0].contiguous()
        partial = None
        if ctx.needs_input_grad[1]:
            shape = (MULTIPROCESSORS, rows.shape[1])
            partial = weight.new_empty(shape, dtype=torch.float32)
        torch.ops.simulated.liger_rms_norm_backward(
            rows, weight, rstd, partial, dy.view(-1, rows.shape[1])
        )
        return dy, None if partial is None else partial.sum(dim=0).to(weight.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        c = torch.empty_like(a)
        torch.ops.simulated.liger_swiglu(a, b, c)
        ctx.save_for_backward(a, b)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        torch.ops.simulated.liger_swiglu_backward(grads[0].contiguous(), a, b)
        return a.view(a.shape), b.view(b.shape)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_rotated(*grads, *ctx.saved_tensors), None, None)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (heads.transpose(1, 2).contiguous() for heads in (q, k))
    torch.ops.simulated.liger_rope(cos, sin, q, k)
    return q.transpose(1, 2), k.transpose(1, 2)


class LigerRMSNorm:
    """Stand-in of liger-kernel's class of this name."""

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise hidden states (..., width)."""
        return _RmsNorm.apply(hidden_states, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class LigerSwiGLUMLP:
    """Stand-in of liger-kernel's class of this name."""

    gate_proj: Callable[[Tensor], Tensor]
    up_proj: Callable[[Tensor], Tensor]
    down_proj: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states (..., width) to hidden states."""
        return self.down_proj(_SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]


def liger_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Any:
    """Rotate queries and keys (batch, heads, length, width) in place."""
    return _Rope.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]


def give_liger_layers(model: nn.Module) -> None:
    """Give a model simulated layers for those that liger-kernel replaces, but the rotation."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            vars(module)["forward"] = LigerRMSNorm.forward.__get__(module)
        elif all(hasattr(module, f"{name}_proj") for name in ("gate", "up", "down")):
            vars(module)["forward"] = LigerSwiGLUMLP.forward.__get__(module)


@contextlib.contextmanager
def liger_rope(model: nn.Module) -> Iterator[None]:
    """Let the model's family rotate as liger-kernel does; a function of all its models."""
    code = family_code(model)
    own = getattr(code, ROPE)
    setattr(code, ROPE, liger_rotary_pos_emb)
    try:
        yield
    finally:
        setattr(code, ROPE, own)
