"""Kernels of a step on the shapes of presets, for ``kernel_sweep`` to measure."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kernel_blocks import BLOCKS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trials.records.model import Model

RANK = 16  # of adapters
BACKENDS = {
    "pytorch_flash": SDPBackend.FLASH_ATTENTION,
    "pytorch_cudnn": SDPBackend.CUDNN_ATTENTION,
    "pytorch_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BF16 = torch.bfloat16
NF4_BYTES = 0.5 + 4 / 64  # of a weight: four bits, and a constant in fp32 for each block of 64


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel to measure.

    Attributes:
        table: name of its table.
        columns: what identifies it there, by column.
        make: returns the function to time, with its tensors.
    """

    table: str
    columns: dict[str, str | int | float]
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of an attention: sequences, their tokens, heads, heads of keys, width of a head."""

    batch: int
    length: int
    heads: int
    shared: int
    width: int


def _random(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, dtype=BF16).requires_grad_(grad)


def products(models: list[Model], tokens: int) -> Iterator[Kernel]:
    """Linear layers of the presets: forward, gradient of the input and of the weight."""
    shapes: dict[tuple[int, int], None] = {}
    for model in models:
        names = ("hidden_size", "intermediate_size", "vocab_size")
        hidden, inner, words = (int(model.config.get(name) or 0) for name in names)
        own = ((hidden, hidden), (inner, hidden), (hidden, inner), (words, hidden))
        adapters = ((RANK, hidden), (hidden, RANK), (RANK, inner), (inner, RANK))
        shapes |= dict.fromkeys((*own, *adapters))
    for n, k in (shape for shape in shapes if min(shape)):
        for op, m_n_k in (
            ("linear", (tokens, n, k)),
            ("linear_grad_input", (tokens, k, n)),
            ("linear_grad_weight", (n, k, tokens)),
        ):
            names = dict(zip("mnk", m_n_k, strict=True))
            yield Kernel("gemm_sweep", {"op": op, "dtype": "bf16"} | names, _product(op, *m_n_k))


def _product(op: str, m: int, n: int, k: int) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        # The layouts in which autograd hands the matrices of y = x W^T to the library.
        left = _random(k, m).t() if op == "linear_grad_weight" else _random(m, k)
        right = _random(n, k).t() if op == "linear" else _random(k, n)
        return lambda: left @ right

    return make


def attention(models: list[Model], tokens: int) -> Iterator[Kernel]:
    """Causal attention, forward and backward, by each of PyTorch's fused kernels."""
    heads_of, lengths = {}, (tokens // 8, tokens // 2, 2 * tokens)
    for model in models:
        heads = int(model.config.get("num_attention_heads") or 0)
        shared = int(model.config.get("num_key_value_heads") or heads)
        width = int(model.config.get("head_dim") or 0)
        if heads:
            width = width or int(model.config.get("hidden_size") or 0) // heads
            heads_of |= dict.fromkeys(((heads, heads, width), (heads, shared, width)))
    for (heads, shared, width), length in ((one, length) for length in lengths for one in heads_of):
        sizes = {"batch": max(1, tokens // length), "seq": length, "heads": heads, "kv": shared}
        for kernel, backend in BACKENDS.items():
            columns = {"dtype": "bf16", **sizes, "hd": width, "kernel": kernel}
            for direction in ("forward", "backward"):
                op = {"op": f"attention_{direction}_causal"}
                shape = AttentionShape(sizes["batch"], length, heads, shared, width)
                make = _attention(shape, backend, direction)
                yield Kernel(f"attention_{direction}_sweep", op | columns, make)


def _attention(
    shape: AttentionShape, backend: SDPBackend, direction: str
) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        heads = (shape.heads, shape.shared, shape.shared)
        inputs = [_random(shape.batch, n, shape.length, shape.width, grad=True) for n in heads]
        grouped = shape.heads != shape.shared

        def forward() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

        if direction == "forward":
            return forward
        result = forward()
        grad = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True)

    return make


def blocks(models: list[Model], tokens: int) -> Iterator[Kernel]:
    """Eager blocks: norms, losses, rotary embedding and gated activations."""
    for model in models:
        facts = {k: int(v) for k, v in model.config.items() if isinstance(v, int)}
        hidden, heads = facts.get("hidden_size"), facts.get("num_attention_heads")
        if not (hidden and heads and facts.get("vocab_size") and facts.get("intermediate_size")):
            continue
        shared = {"num_attention_heads": heads, "num_key_value_heads": heads}
        half = {"hidden_size": hidden, "dtype": "torch.bfloat16"}
        options: dict[str, dict[str, Any]] = {
            "cross_entropy": {"vocab_size": facts["vocab_size"]},
            "layer_norm": half,
            "rms_norm": half,
            "softmax": half,
            "rope": half | shared | {"hidden_size": heads * (hidden // heads)},
            "swiglu": half | {"intermediate_size": facts["intermediate_size"], "bsz": 1},
            "embedding": {"V": facts["vocab_size"], "D": hidden, "B": 1},
        }
        for op, sizes in options.items():
            name = "T" if op in {"rope", "swiglu", "embedding"} else "BT"
            for mode in ("forward", "backward"):
                columns = {"op": op, "mode": mode, "x_name": name, "x_value": tokens}
                extra = {"extra_benchmark_config_str": json.dumps(sizes)}
                make = _block(op, mode, sizes | {name: tokens})
                yield Kernel("eager_blocks_sweep", columns | extra, make)


def _block(op: str, mode: str, sizes: dict[str, Any]) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        block = BLOCKS[op](sizes)
        if mode == "forward":
            return block.run
        result = block.run()
        results = result if isinstance(result, tuple) else (result,)
        grads = [torch.ones_like(one) for one in results]
        return lambda: torch.autograd.grad(results, block.inputs, grads, retain_graph=True)

    return make


def dequantisation(models: list[Model]) -> Iterator[Kernel]:
    """NF4 weights of bitsandbytes to bf16."""
    if importlib.util.find_spec("bitsandbytes") is None:
        sys.stderr.write("dequantisation: bitsandbytes is not installed\n")
        return
    shapes = {
        (int(model.config.get("intermediate_size") or 0), int(model.config.get("hidden_size") or 0))
        for model in models
    }
    for rows, columns in sorted(shape for shape in shapes if min(shape)):
        sizes = {"rows": rows, "cols": columns, "bytes": rows * columns * (NF4_BYTES + 2)}
        named: dict[str, str | int | float] = {"op": "dequantise_nf4", "dtype": "bf16"}
        yield Kernel("dequantisation_sweep", named | sizes, _dequantisation(rows, columns))


def _dequantisation(rows: int, columns: int) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: PLC0415 - optional

        packed, state = quantize_4bit(_random(rows, columns), quant_type="nf4")
        return lambda: dequantize_4bit(packed, state)

    return make


def casts(models: list[Model], tokens: int) -> Iterator[Kernel]:
    """Casts of autocast: weights in fp32 to bf16, activations both ways; and transposed copies."""
    sizes = {int(model.config.get("hidden_size") or 0): None for model in models}
    single, half = torch.float32, BF16
    for width in filter(None, sizes):
        for op, dtype, to in (("cast_down", single, half), ("cast_up", half, single)):
            yield _copy(op, tokens, width, lambda x, to=to: x.to(to), dtype, 6)
        yield _copy("transpose", tokens, width, lambda x: x.t().contiguous(), half, 4)
        yield _copy("add", tokens, width, lambda x: x + x, half, 4)
        yield _copy("add_fp32", tokens, width, lambda x: x + x, single, 8)


def _copy(  # noqa: PLR0917 - an operator, its sizes and its bytes
    op: str,
    rows: int,
    columns: int,
    run: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    width: int,
) -> Kernel:
    name = "fp32" if dtype is torch.float32 else "bf16"
    named: dict[str, str | int | float] = {"op": op, "dtype": name, "rows": rows, "cols": columns}

    def make() -> Callable[[], object]:
        x = torch.randn(rows, columns, dtype=dtype)
        return lambda: run(x)

    return Kernel("memory_bound_sweep", named | {"bytes": rows * columns * width}, make)


def optimizers(models: list[Model]) -> Iterator[Kernel]:
    """Steps of PyTorch's AdamW, fused and by foreach, on the weights of a layer in fp32."""
    widths = {int(model.config.get("hidden_size") or 0): None for model in models}
    for width in filter(None, widths):
        for op in ("adamw_fused", "adamw_foreach"):
            named: dict[str, str | int | float] = {"op": op, "dtype": "fp32"}
            sizes = {"rows": 12 * width, "cols": width, "bytes": 28 * 12 * width * width}
            yield Kernel("memory_bound_sweep", named | sizes, _optimizer(op, width))


def _optimizer(op: str, width: int) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        weights = [torch.randn(width, width, requires_grad=True) for _ in range(12)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        chosen = {"fused": op == "adamw_fused", "foreach": op == "adamw_foreach"}
        return torch.optim.AdamW(weights, **chosen).step

    return make


def scans(models: list[Model], tokens: int) -> Iterator[Kernel]:
    """mamba-ssm's selective scan, forward and backward."""
    widths = {
        int(model.config.get("expand") or 2) * int(model.config["hidden_size"])
        for model in models
        if "mamba" in model.name and "hidden_size" in model.config
    }
    if widths and importlib.util.find_spec("mamba_ssm") is None:
        sys.stderr.write("scan: mamba-ssm is not installed\n")
        return
    for width in sorted(widths):
        for mode in ("forward", "backward"):
            columns = {"op": "selective_scan", "dtype": "bf16", "mode": mode, "width": width}
            yield Kernel("scan_sweep", columns | {"tokens": tokens}, _scan(width, tokens, mode))


def _scan(width: int, tokens: int, mode: str) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        from mamba_ssm.ops.selective_scan_interface import (  # noqa: PLC0415 - optional
            selective_scan_fn,
        )

        inputs = [_random(1, width, tokens, grad=True) for _ in range(2)]
        states = [_random(1, 16, tokens, grad=True) for _ in range(2)]
        decay = -torch.rand(width, 16)

        def forward() -> torch.Tensor:
            return selective_scan_fn(*inputs, decay, *states, delta_softplus=True)  # type: ignore[no-any-return]

        if mode == "forward":
            return forward
        result = forward()
        every, grad = [*inputs, *states], torch.randn_like(result)
        return lambda: torch.autograd.grad(result, every, grad, retain_graph=True)

    return make
