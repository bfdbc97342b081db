"""Eager PyTorch blocks that Liger-Kernel's benchmarks measure, as operators of a trace.

Each is built on PyTorch's default device: on the GPU it is run (``kernel_sweep.py``), on meta the
cost rules of the trace see its operators. Shapes and dtypes are
those of Liger-Kernel's ``benchmark/scripts`` and of transformers' Llama. So is what the scripts
measure besides: gradients that no run takes away are added to those of the run before, and some
runs draw the gradient of the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import describe

# Strided elements in whose time a number is drawn: 33.5 million take a B200 58 us, the difference
# of both passes with and without a draw, of LayerNorm and softmax alike.
DRAWN_ELEMENTS = 0.78
Sizes = dict[str, Any]
Work = tuple[OperatorClass, Rate, tuple[float, ...]]


class Script(Enum):
    """What runs a block, by what it measures besides."""

    FIRST = auto()
    """A script of Liger-Kernel for the block alone; ``Block`` says what it adds."""
    SHARED = auto()
    """Liger-Kernel's scripts since 2026: the first result's gradient is drawn in each full run."""
    SWEEP = auto()
    """``kernel_sweep``, which takes every gradient away."""


class _Costs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self.works += describe(func, args, kwargs or {}, result)
        return result


@cache
def block_works(
    name: str, mode: str, sizes: tuple[tuple[str, Any], ...], script: Script = Script.FIRST
) -> tuple[Work, ...] | None:
    """Operators of a block; None for a block or a mode that is not modelled here.

    Args:
        name: name of the block.
        mode: ``forward``, ``backward`` or ``full``, which is both.
        sizes: of the block.
        script: what ran it.
    """
    make = BLOCKS.get(name)
    if make is None or mode not in {"forward", "backward", "full"}:
        return None
    with torch.device("meta"):
        block = make(dict(sizes))
    with _Costs() as forward:
        result = block.run()
    results = result if isinstance(result, tuple) else (result,)
    summed = block.summed
    if script is Script.SHARED and len(results) > 1:
        results, summed = results[:1], block.inputs[:1]
    grads = [torch.empty_like(one, dtype=block.inputs[0].dtype) for one in results]
    with _Costs() as backward:
        new = torch.autograd.grad(results, block.inputs, grads, allow_unused=True)
        for tensor, grad in zip(block.inputs, new, strict=True):
            is_summed = any(tensor is one for one in summed)
            if script is not Script.SWEEP and is_summed and grad is not None:
                grad.add_(torch.empty_like(grad))
    works = {"forward": forward.works, "backward": backward.works}.get(mode)
    chosen = forward.works + backward.works if works is None else works
    draws = block.draws or (script is Script.SHARED and results[0].dim() > 0)
    if draws and mode == "full":
        chosen.append(_drawn(grads[0]))
    return tuple(work for work in chosen if work[0] != OperatorClass.VIEW)


def _drawn(tensor: Tensor) -> Work:
    """Draw of normally distributed numbers."""
    elements = DRAWN_ELEMENTS * tensor.numel()
    numbers = (tensor.nbytes, 0.0, elements, 0.0, 1.0, 0.0, 1.0)
    return OperatorClass.SCATTERED, Rate.BF16, numbers


@dataclass(frozen=True, slots=True)
class Block:
    """A block and the tensors whose gradients it computes.

    Attributes:
        run: returns its result or results.
        inputs: tensors with gradients.
        summed: those whose gradients are added to the ones before.
        draws: whether a run of both passes draws the gradient of the result.
    """

    run: Callable[[], Any]
    inputs: list[Tensor]
    summed: list[Tensor] = field(default_factory=list)
    draws: bool = False


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def _dtype(sizes: Sizes) -> torch.dtype:
    return getattr(torch, str(sizes.get("dtype", "torch.float32")).removeprefix("torch."))  # type: ignore[no-any-return]


def _tokens(sizes: Sizes) -> int:
    return int(
        sizes.get("BT") or sizes.get("M") or sizes.get("bsz", sizes.get("B", 1)) * sizes["T"]
    )


def _cross_entropy(sizes: Sizes) -> Block:
    rows, columns = _tokens(sizes), sizes.get("vocab_size") or sizes["V"]
    logits = _tensor(rows, columns)
    labels = torch.randint(columns, (rows,))
    # Scripts that name the batch B keep the gradient of the logits from run to run.
    summed = [logits] if "B" in sizes else []
    return Block(partial(functional.cross_entropy, logits, labels), [logits], summed)


def _layer_norm(sizes: Sizes) -> Block:
    width, dtype = sizes.get("N") or sizes["hidden_size"], _dtype(sizes)
    x, weight, bias = (_tensor(*s, dtype=dtype) for s in ((_tokens(sizes), width), *2 * [(width,)]))
    run = partial(functional.layer_norm, x, (width,), weight, bias)
    return Block(run, [x, weight, bias], [weight, bias])


def _rms_norm(sizes: Sizes) -> Block:
    width = sizes.get("H") or sizes["hidden_size"]
    norm = LlamaRMSNorm(width)  # its weight in fp32, whatever the input
    x = _tensor(_tokens(sizes), width, dtype=_dtype(sizes))
    return Block(partial(norm, x), [x, norm.weight], [norm.weight])


def _rope(sizes: Sizes) -> Block:
    length = sizes.get("T") or sizes["seq_len"]
    heads = sizes.get("num_q_heads") or sizes["num_attention_heads"]
    shared = sizes.get("num_kv_heads") or sizes["num_key_value_heads"]
    width = (sizes.get("H") or sizes["hidden_size"]) // heads
    dtype = _dtype(sizes)
    queries, keys = (
        _tensor(1, length, number, width, dtype=dtype).transpose(1, 2) for number in (heads, shared)
    )
    angles = torch.empty(1, length, width, dtype=dtype)
    return Block(partial(apply_rotary_pos_emb, queries, keys, angles, angles), [queries, keys])


def _gated(activation: Callable[[Tensor], Tensor], sizes: Sizes) -> Block:
    hidden, inner, dtype = sizes["hidden_size"], sizes["intermediate_size"], _dtype(sizes)
    x = _tensor(_tokens(sizes), hidden, dtype=dtype)
    gate, up, down = (
        _tensor(*shape, dtype=dtype)
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )

    def run() -> Tensor:
        gated = activation(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(gated, down)

    weights = [gate, up, down]
    return Block(run, [x, *weights], weights, draws=True)


def _embedding(sizes: Sizes) -> Block:
    table = _tensor(sizes["V"], sizes["D"], dtype=_dtype(sizes))
    rows = torch.randint(sizes["V"], (sizes["B"] * sizes["T"],))
    return Block(partial(functional.embedding, rows, table), [table], [table], draws=True)


def _softmax(sizes: Sizes) -> Block:
    x = _tensor(_tokens(sizes), sizes.get("N") or sizes["hidden_size"], dtype=_dtype(sizes))
    return Block(partial(torch.softmax, x, -1), [x])


BLOCKS: dict[str, Callable[[Sizes], Block]] = {
    "cross_entropy": _cross_entropy,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": partial(_gated, functional.silu),
    "geglu": partial(_gated, partial(functional.gelu, approximate="tanh")),
    "embedding": _embedding,
    "softmax": _softmax,
}
