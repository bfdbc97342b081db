"""LLM.int8 of bitsandbytes as on a GPU (bitsandbytes 0.50.2, backends/cuda/ops.py).

Inputs have no outliers here: their number depends on values. bitsandbytes multiplies columns of the
inputs with outliers in 16 bits, beside the product in 8 bits.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    KERNELS,
    DeclaredKernel,
    Described,
    moved_bytes,
)


@cache
def install_eight_bit_products() -> None:
    """Give the operators of LLM.int8 shape rules that know no outliers, and costs."""
    import bitsandbytes  # noqa: F401, PLC0415 - defines the operators; seconds to import

    for name, rule, kernel in (
        ("int8_vectorwise_quant", _quantised, DeclaredKernel(_quantisation, _comparison_bytes)),
        ("int8_mixed_scaled_mm", _product, DeclaredKernel(_scaled_product, _unscaled_bytes)),
    ):
        torch.library.register_fake(f"bitsandbytes::{name}", rule, allow_override=True)
        KERNELS[f"bitsandbytes::{name}"] = kernel


def eight_bit_products() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Functions of bitsandbytes to replace by those that it calls on a GPU; none if not in use."""
    library = sys.modules.get("bitsandbytes")
    return [] if library is None else [(library, "matmul", _matmul)]


def _matmul(  # noqa: PLR0913, PLR0917 - bitsandbytes' signature
    inputs: Tensor,
    weights: Tensor,
    out: Tensor | None = None,
    state: Any = None,
    threshold: float = 0.0,  # noqa: ARG001 - the layer's state has it
    bias: Tensor | None = None,
) -> Any:
    from bitsandbytes.autograd._functions import MatMul8bitLt  # noqa: PLC0415 - as above

    return MatMul8bitLt.apply(inputs, weights, out, bias, state)


def _quantised(inputs: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001 - the operator's signature
    return (
        inputs.new_empty(inputs.shape, dtype=torch.int8),
        inputs.new_empty(inputs.shape[0], dtype=torch.float32),
        inputs.new_empty(0, dtype=torch.int64),  # columns with outliers
    )


def _comparison_bytes(args: Sequence[Any]) -> int:
    """Bytes of absolute values in fp16 and of their comparison with the threshold."""
    return 3 * int(args[0].numel())


def _quantisation(args: Sequence[Any], result: Any) -> list[Described]:
    # Seven passes: absolute values, comparison, whether any is true, scales with numbers, zeroes.
    moved = moved_bytes(args, result) + 8.0 * args[0].numel()
    return [(OperatorClass.MEMORY, Rate.BF16, (moved, 0.0, 0.0, 0.0, 0.0, 0.0, 7))]


def _product(  # noqa: PLR0913, PLR0917 - the operator's signature
    inputs: Tensor,
    numbers: Tensor,
    weights: Tensor,
    row_scales: Tensor,  # noqa: ARG001 - as above
    column_scales: Tensor,  # noqa: ARG001 - as above
    outlier_columns: Tensor | None = None,  # noqa: ARG001 - as above
    bias: Tensor | None = None,  # noqa: ARG001 - as above
) -> tuple[Tensor, Tensor]:
    shape = (*numbers.shape[:-1], weights.shape[0])
    return inputs.new_empty(shape), inputs.new_empty(0)


def _unscaled_bytes(args: Sequence[Any]) -> int:
    """Bytes of the product in int32, and of its fp16 form where the result has another dtype."""
    inputs, numbers, weights = args[:3]
    elements = math.prod(numbers.shape[:-1]) * weights.shape[0]
    return int(elements * (4 if inputs.dtype == torch.float16 else 6))


def _scaled_product(args: Sequence[Any], result: Any) -> list[Described]:
    """Costs of the product in 8 bits, at the rate of fp16, and of its scaling."""
    inputs, numbers, weights = args[:3]
    columns, inner = weights.shape
    rows = numbers.numel() / inner
    entries = rows * columns
    product = (moved_bytes((numbers, weights), None) + 4.0 * entries, 2.0 * entries * inner)
    # Read in int32, written in fp16; then read and written again in another dtype.
    is_cast = inputs.dtype != torch.float16
    scaled = 6.0 * entries + (2.0 * entries + moved_bytes((), result) if is_cast else 0.0)
    return [
        (OperatorClass.MATRIX_PRODUCT, Rate.FP16, (*product, rows, inner, columns, 1, 1)),
        (OperatorClass.MEMORY, Rate.BF16, (scaled, 0.0, 0.0, 0.0, 0.0, 0.0, 1 + is_cast)),
    ]
