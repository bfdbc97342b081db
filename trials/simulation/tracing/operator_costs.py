"""Costs of operators on a GPU: class of work, FLOPs, bytes, number of kernels.

They follow from the tensors that go in and come out. ``workspace_bytes`` adds the memory that a
kernel takes for itself, which no tensor shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from trials.simulation.recording import Numbers, OperatorClass, Rate

LIBRARY: Any = torch.library.Library("simulated", "DEF")  # type: ignore[no-untyped-call]


def rate(tensor: Tensor) -> Rate:
    """Peak rate that applies to a tensor's dtype."""
    return RATES.get(tensor.dtype, Rate.FP32)


def moved_bytes(args: Sequence[Any], result: object) -> float:
    """Bytes that an operator reads and writes, every tensor once."""
    return float(sum(touched_bytes(t) for t in (*tensors_in(args), *tensors_in(result))))


Described = tuple[OperatorClass, Rate, Numbers]


def workspace_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Bytes that an operator takes while it runs, beyond its results."""
    name = _name(func)
    if name in SORTING and not _only_writes(name, args, kwargs):
        indices = [t for t in tensors_in(args) if t.dtype in (torch.int64, torch.int32)]
        return SORT_BYTES_PER_INDEX * max((t.numel() for t in indices), default=0)
    kernel = KERNELS.get(name)
    return 0 if kernel is None else kernel.workspace_bytes(_in_order(func, args, kwargs))


def _only_writes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator writes to indices without a sum, and so does not sort them."""
    return "index_put" in name and not (args[3] if len(args) > 3 else kwargs.get("accumulate"))


@dataclass(frozen=True, slots=True)
class Tile:
    """Workspace for some rows of an operator at a time (``recording.TileColumn``)."""

    row_bytes: int
    rows: int
    parts: int = 0
    most_rows: int = 0


def workspace(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Numbers:
    """Numbers of the workspace of an operator: its bytes, and those of a tile."""
    tile, kernel = Tile(0, 0), KERNELS.get(_name(func))
    if kernel is not None:
        tile = kernel.tile(_in_order(func, args, kwargs))
    own = workspace_bytes(func, args, kwargs)
    return (float(own), *map(float, astuple(tile)), 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DeclaredKernel:
    """Costs of an opaque kernel, which its tensors do not determine.

    Attributes:
        work: returns its costs, given all arguments and the result.
        workspace_bytes: returns its workspace in bytes, given all arguments.
        tile: returns the tile beside these bytes, given all arguments.
    """

    work: Callable[[Sequence[Any], Any], list[Described]]
    workspace_bytes: Callable[[Sequence[Any]], int] = lambda _args: 0
    tile: Callable[[Sequence[Any]], Tile] = lambda _args: Tile(0, 0)


def declare(signature: str, fake: Any, kernel: DeclaredKernel) -> None:
    """Define an operator with a shape rule and costs, but without an implementation."""
    name = signature.partition("(")[0]
    LIBRARY.define(signature)
    torch.library.register_fake(f"simulated::{name}", fake, lib=LIBRARY)
    KERNELS[f"simulated::{name}"] = kernel


aten = torch.ops.aten
RATES = {torch.bfloat16: Rate.BF16, torch.float16: Rate.FP16}
# Tensors that one launch of PyTorch's multi-tensor kernels takes (ATen's MultiTensorApply.cuh:
# 30 at depth 4), and elements: 320 blocks of 65,536.
TENSORS_PER_LAUNCH = 30
ELEMENTS_PER_LAUNCH = 320 * 65_536
# Kernels behind one operator, where there are several: sorts by radix, scans, partial sums
# (ATen's EmbeddingBackwardKernel.cu has some twenty).
LAUNCHES = {
    "aten::nonzero": 4,
    "aten::sort": 4,
    "aten::argsort": 4,
    "aten::topk": 2,
    "aten::index_put": 8,
    "aten::index_put_": 8,
    "aten::_index_put_impl_": 8,
    "aten::embedding_dense_backward": 20,
    "aten::histc": 3,
    "aten::cumsum": 2,
}
# Operators that touch only the picked rows of a tensor.
PICKING = {
    *("aten::gather", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
    *("aten::index_add", "aten::index_add_"),
}
# And those that read whole rows, several elements at a time (ATen's IndexKernelUtils.cu).
READING_ROWS = {"aten::index", "aten::index_select", "aten::embedding"}
# Elements that the gradient of an embedding moves for each one of its input, if no token repeats:
# it writes and reads the sum of each part of a segment, and writes that of the segment.
SUMMED_ELEMENTS = 4
# Operators that do not read their arguments.
FILLING = {
    *("aten::zero_", "aten::fill_", "aten::zeros_like", "aten::ones_like", "aten::full_like"),
    *("aten::zeros", "aten::ones", "aten::full", "aten::new_zeros", "aten::new_ones"),
    *("aten::new_full", "aten::randn_like", "aten::rand_like"),
}
COPYING = {"aten::copy_", "aten::_foreach_copy_"}
# Losses that read one number of each row of logits, and write one number or one row of zeros.
PICKING_LOSSES = {"aten::nll_loss_forward", "aten::nll_loss_backward"}
# Operators that copy their arguments with another dtype or layout.
CONVERTING = {"aten::_to_copy", "aten::clone", "aten::cat", "aten::slice_backward"}
# Operators that work on rows: class, and tensors whose rows they read more than once.
ROW_WISE = {
    "aten::native_layer_norm": (OperatorClass.NORM, 1),
    "aten::_fused_rms_norm": (OperatorClass.NORM, 1),
    "aten::native_layer_norm_backward": (OperatorClass.NORM_BACKWARD, 2),
    "aten::_fused_rms_norm_backward": (OperatorClass.NORM_BACKWARD, 2),
    "aten::_softmax": (OperatorClass.SOFTMAX, 1),
    "aten::_log_softmax": (OperatorClass.SOFTMAX, 1),
    "aten::_softmax_backward_data": (OperatorClass.SOFTMAX_BACKWARD, 2),
    "aten::_log_softmax_backward_data": (OperatorClass.SOFTMAX_BACKWARD, 2),
}
MAKING_NOTHING = {
    "aten::_unsafe_view",  # a view, though its schema does not say so
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_record_function_enter_new",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
# Operators that sort their indices: keys and values of 8 bytes each, and the sort's workspace.
SORTING = {
    *("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
    "aten::embedding_dense_backward",
}
SORT_BYTES_PER_INDEX = 40


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor; a dimension of stride 0 counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 else 1
    return elements * tensor.element_size()


def describe(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: object
) -> list[Described]:
    """Costs of an operator, one entry per kind of work in order.

    Returns:
        Class, rate of the FLOPs, and numbers in the order of ``Column``, for each kind of work.
    """
    name = _name(func)
    if _is_view(func) or name in MAKING_NOTHING:
        return [(OperatorClass.VIEW, Rate.BF16, (0.0,) * 7)]
    product = PRODUCTS.get(name)
    if product is not None:
        return [product(args, kwargs, result)]
    kernel = KERNELS.get(name)
    if kernel is not None:
        return kernel.work(_in_order(func, args, kwargs), result)
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
    if name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach")):
        return [_many_tensors(func, args, inputs)]
    return _of_memory(func, name, args, inputs, outputs)


def _of_memory(
    func: Any, name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor]
) -> list[Described]:
    written = sum(touched_bytes(t) for t in outputs)
    if name in PICKING | READING_ROWS:
        # Picked rows are read and written; added rows are read once more.
        rows = max((touched_bytes(t) for t in inputs[1:] or inputs), default=0)
        is_mutable = func._schema.is_mutable  # noqa: SLF001 - torch has no other name for it
        adds = name in {"aten::index_add", "aten::index_add_"}
        picked = max(rows, 0 if is_mutable or adds else written)
        moved = (3 if adds else 2) * picked
        elements = 0 if name in READING_ROWS else picked / inputs[0].element_size()
        work = OperatorClass.GATHER if elements else OperatorClass.MEMORY
        return [_moving(work, name, moved, elements)]
    if name in PICKING_LOSSES:
        is_mean = name == "aten::nll_loss_forward" and bool(args[3])
        rows = inputs[0].shape[0] if is_mean and inputs[0].dim() > 1 else 0
        return [_moving(OperatorClass.PICKED_LOSS, name, written, rows)]
    moved = written + sum(touched_bytes(t) for t in inputs)
    if name in COPYING | FILLING:
        moved = written + (touched_bytes(inputs[1]) if name in COPYING else 0)
    if name == "aten::embedding_dense_backward":
        elements = SUMMED_ELEMENTS * inputs[0].numel()
        return [_moving(OperatorClass.GATHER, name, moved, elements)]
    if name in ROW_WISE:
        return _of_rows(name, moved, inputs, outputs)
    reads = torch.Tag.pointwise in func.tags or name in COPYING | CONVERTING
    is_elementwise = reads and name not in FILLING
    if _adds_columns(name, args) or (is_elementwise and _is_scattered(name, inputs, outputs)):
        elements = max((t.numel() for t in (*inputs, *outputs)), default=0)
        return [_moving(OperatorClass.SCATTERED, name, moved, elements)]
    return [_moving(OperatorClass.MEMORY, name, moved)]


def _moving(  # noqa: PLR0913, PLR0917 - the numbers of an operator
    work: OperatorClass,
    name: str,
    moved: float,
    rows: float = 0.0,
    row_bytes: float = 0.0,
    columns: float = 1.0,
) -> Described:
    numbers = (moved, 0.0, rows, row_bytes, columns if rows else 0.0, 0.0, LAUNCHES.get(name, 1))
    return work, Rate.BF16, numbers


def _of_rows(
    name: str, moved: float, inputs: list[Tensor], outputs: list[Tensor]
) -> list[Described]:
    """Costs of a norm or a softmax, and of a kernel beside it.

    Gradients of a norm's weights take one, and so does the product of a softmax's result and its
    gradient.
    """
    work, read = ROW_WISE[name]
    size = inputs[0].shape
    columns = size[-1] if size else 1
    rows, row_bytes = inputs[0].numel() / max(columns, 1), columns * inputs[0].element_size()
    described = [_moving(work, name, moved, rows, read * row_bytes, columns)]
    if work == OperatorClass.NORM_BACKWARD and len(outputs) > 1:
        again = sum(touched_bytes(t) for t in inputs[:2])
        described.append(_moving(OperatorClass.SCATTERED, name, again, inputs[0].numel()))
    if name == "aten::_softmax_backward_data":
        described.insert(0, _moving(OperatorClass.MEMORY, name, moved))
    return described


def _adds_columns(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator adds up along other dimensions than the last."""
    if name not in {"aten::sum", "aten::mean"} or len(args) < 2 or not args[1]:
        return False
    last = args[0].dim() - 1
    return all(one % max(args[0].dim(), 1) != last for one in args[1])


def _is_scattered(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether PyTorch's kernel addresses or converts elements one by one.

    It loads and stores several at a time where all tensors have one dense layout, and needs no
    conversion (ATen's Loops.cuh); of conversions, only those to fewer bits have such a kernel
    (Copy.cu).
    """
    tensors = [t for t in (*inputs, *outputs) if t.dim()]  # others are numbers
    if not tensors:
        return False
    if name == "aten::cat":
        return not all(t.is_contiguous() for t in tensors)
    first = outputs[0] if outputs and outputs[0].dim() else tensors[0]
    if any(_layout(t) != _layout(first) for t in tensors) or not _is_dense(first):
        return True
    widths = {t.dtype: t.element_size() for t in tensors if t.dtype is not torch.bool}
    if len(widths) < 2:
        return False
    return name not in COPYING | CONVERTING or first.element_size() == max(widths.values())


def _layout(tensor: Tensor) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def _is_dense(tensor: Tensor) -> bool:
    extent = 1 + sum((n - 1) * s for n, s in _layout(tensor))
    return extent == tensor.numel()


def _in_order(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the order of the operator's signature; None for omitted ones."""
    further = func._schema.arguments[len(args) :]  # noqa: SLF001 - torch has no other name for it
    return [*args, *(kwargs.get(argument.name) for argument in further)]


@cache
def _name(func: Any) -> str:
    return str(func.name().partition(".")[0])


@cache
def _is_view(func: Any) -> bool:
    """Whether a result is a view of an argument that the operator does not change."""
    returns = func._schema.returns  # noqa: SLF001 - torch has no other name for it
    shares = [r.alias_info for r in returns if r.alias_info is not None]
    return bool(shares) and not any(info.is_write for info in shares)


def _matrix_product(  # noqa: PLR0913, PLR0917 - shape and bytes of a product
    left: torch.Tensor, rows: float, inner: float, columns: float, products: float, moved: float
) -> Described:
    flops = 2.0 * rows * inner * columns * products
    numbers = (moved, flops, rows, inner, columns, products, 1.0)
    return OperatorClass.MATRIX_PRODUCT, rate(left), numbers


def _mm(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    left, right = args[-2:]
    rows, inner = left.shape
    return _matrix_product(left, rows, inner, right.shape[1], 1, moved_bytes(args, result))


def _addmm(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    left, right = args[1:3]
    rows, inner = left.shape
    return _matrix_product(left, rows, inner, right.shape[1], 1, moved_bytes(args, result))


def _bmm(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    left, right = args[-2:]
    products, rows, inner = left.shape
    return _matrix_product(left, rows, inner, right.shape[2], products, moved_bytes(args, result))


def _grouped(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    """Product of tokens (n, inner) and experts (groups, inner, columns), or gradient of these."""
    left, right = args[0], args[1]
    if right.dim() == 3:
        groups, inner, columns = right.shape
        rows = left.shape[0] / groups
    else:
        groups, rows, columns = result.shape
        inner = left.shape[1] / groups
    moved = moved_bytes(args[:2], result)
    _, peak, numbers = _matrix_product(left, rows, inner, columns, groups, moved)
    return OperatorClass.GROUPED_PRODUCT, peak, numbers


def _convolution_backward(
    args: Sequence[Any], _kwargs: dict[str, Any], result: object
) -> Described:
    """Costs of both gradients, each with the multiplications of the forward pass."""
    grad, _, weight = args[:3]
    gradients = len(tensors_in(result))
    flops = 2.0 * grad.numel() * weight[0].numel() * min(gradients, 2)
    return OperatorClass.MEMORY, rate(grad), (moved_bytes(args, result), flops, 0, 0, 0, 0, 1)


def _convolution(args: Sequence[Any], _kwargs: dict[str, Any], result: object) -> Described:
    flops = 2.0 * tensors_in(result)[0].numel() * args[1][0].numel()
    return OperatorClass.MEMORY, rate(args[0]), (moved_bytes(args, result), flops, 0, 0, 0, 0, 1)


def _many_tensors(func: Any, args: Sequence[Any], inputs: list[torch.Tensor]) -> Described:
    """Costs of PyTorch's kernels over lists of tensors, which write the first list."""
    moved = float(sum(touched_bytes(t) for t in inputs))
    first = [t for t in args[0] if isinstance(t, torch.Tensor)]
    written = float(sum(touched_bytes(t) for t in first))
    elements = sum(t.numel() for t in first)
    launches = max(1.0, len(first) / TENSORS_PER_LAUNCH, elements / ELEMENTS_PER_LAUNCH)
    if "fused" in func.name():
        written *= 3  # the weights and both moments
    return OperatorClass.UPDATE, Rate.FP32, (moved + written, 0, 0, 0, 0, 0, launches)


PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any], Any], Described]] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _bmm,
    "aten::_grouped_mm": _grouped,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
KERNELS: dict[str, "DeclaredKernel"] = {}
"""Opaque kernels by operator; ``trials.simulation.tracing.kernels.fused_kernels`` fills it."""
