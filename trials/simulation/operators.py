"""What each operator is to a GPU: its kind of work, FLOPs, bytes, the kernels that it launches.

Read off the tensors that go in and come out. What a kernel takes for itself meanwhile, which no
tensor tells, is ``workspace_bytes``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from trials.simulation.events import Numbers, Rate, Work

Described = tuple[Work, Rate, Numbers]
aten = torch.ops.aten
RATES = {torch.bfloat16: Rate.BF16, torch.float16: Rate.FP16}
# Tensors that one launch of PyTorch's multi-tensor kernels takes (ATen's MultiTensorApply.cuh:
# 30 at depth 4), and elements: 320 blocks of 65,536.
TENSORS_PER_LAUNCH = 30
ELEMENTS_PER_LAUNCH = 320 * 65_536
# Kernels behind one operator, where there are several: sorts by radix, scans, partial sums.
LAUNCHES = {
    "aten::nonzero": 4,
    "aten::sort": 4,
    "aten::argsort": 4,
    "aten::topk": 2,
    "aten::index_put": 8,
    "aten::index_put_": 8,
    "aten::_index_put_impl_": 8,
    "aten::embedding_dense_backward": 6,
    "aten::histc": 3,
    "aten::cumsum": 2,
}
# They touch only the rows that are picked, not the whole tensor these are picked from.
PICKING = {
    "aten::index",
    "aten::index_select",
    "aten::embedding",
    "aten::gather",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::index_add",
    "aten::index_add_",
}
MAKING_NOTHING = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_record_function_enter_new",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
# Sorted keys and values of the indices, both in 8 bytes, and as much for the sort itself.
SORTING = {
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::embedding_dense_backward",
}
SORT_BYTES_PER_INDEX = 40


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in arguments or results."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor: what is repeated along a dimension is there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 else 1
    return elements * tensor.element_size()


def describe(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: object
) -> list[Described]:
    """The work that an operator is: of one kind, or of several after one another.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: those given by name.
        result: what it returned.

    Returns:
        Kind, rate of the FLOPs, and numbers as ``Column`` lists them, of each.
    """
    name = _name(func)
    if _is_view(func) or name in MAKING_NOTHING:
        return [(Work.VIEW, Rate.BF16, (0.0,) * 7)]
    product = PRODUCTS.get(name)
    if product is not None:
        return [product(args, kwargs, result)]
    kernel = KERNELS.get(name)
    if kernel is not None:
        return kernel.work(args, result)
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
    if name.startswith(("aten::_foreach", "aten::_fused")):
        return [_many_tensors(func, inputs)]
    return [_of_memory(func, name, inputs, outputs)]


def _of_memory(
    func: Any, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> Described:
    moved = sum(touched_bytes(t) for t in outputs)
    if name in PICKING:
        # Rows are read and written where they are picked, once more where they are added to.
        rows = max((touched_bytes(t) for t in inputs[1:] or inputs), default=0)
        rows = max(rows, 0 if func._schema.is_mutable else moved)  # noqa: SLF001 - torch has no other
        moved = 3 * rows
    else:
        moved += sum(touched_bytes(t) for t in inputs)
    return Work.MEMORY, Rate.BF16, (moved, 0.0, 0.0, 0.0, 0.0, 0.0, LAUNCHES.get(name, 1))


def workspace_bytes(func: Any, args: Sequence[Any]) -> int:
    """Memory that an operator takes while it runs, beyond its results."""
    name = _name(func)
    if name in SORTING:
        indices = [t for t in tensors_in(args) if t.dtype in (torch.int64, torch.int32)]
        return SORT_BYTES_PER_INDEX * max((t.numel() for t in indices), default=0)
    kernel = KERNELS.get(name)
    return 0 if kernel is None else kernel.workspace_bytes(args)


@cache
def _name(func: Any) -> str:
    return str(func.name().partition(".")[0])


@cache
def _is_view(func: Any) -> bool:
    """Whether a result shares the memory of an argument, which stays as it is."""
    returns = func._schema.returns  # noqa: SLF001 - torch has no other name for it
    shares = [r.alias_info for r in returns if r.alias_info is not None]
    return bool(shares) and not any(info.is_write for info in shares)


def _rate(tensor: torch.Tensor) -> Rate:
    return RATES.get(tensor.dtype, Rate.FP32)


def _matrix_product(  # noqa: PLR0913, PLR0917 - its shape and what goes through memory
    left: torch.Tensor, rows: float, inner: float, columns: float, products: float, moved: float
) -> Described:
    flops = 2.0 * rows * inner * columns * products
    numbers = (moved, flops, rows, inner, columns, products, 1.0)
    return Work.MATRIX_PRODUCT, _rate(left), numbers


def _moved(args: Sequence[Any], result: object) -> float:
    return float(sum(touched_bytes(t) for t in (*tensors_in(args), *tensors_in(result))))


def _mm(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    left, right = args[-2:]
    rows, inner = left.shape
    return _matrix_product(left, rows, inner, right.shape[1], 1, _moved(args, result))


def _addmm(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    left, right = args[1:3]
    rows, inner = left.shape
    return _matrix_product(left, rows, inner, right.shape[1], 1, _moved(args, result))


def _bmm(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    left, right = args[-2:]
    products, rows, inner = left.shape
    return _matrix_product(left, rows, inner, right.shape[2], products, _moved(args, result))


def _grouped(args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> Described:
    """Tokens (n, inner) x experts (groups, inner, columns), or the gradients of the experts."""
    left, right = args[0], args[1]
    if right.dim() == 3:
        groups, inner, columns = right.shape
        rows = left.shape[0] / groups
    else:
        groups, rows, columns = result.shape
        inner = left.shape[1] / groups
    return _matrix_product(left, rows, inner, columns, groups, _moved(args[:2], result))


def _convolution(args: Sequence[Any], _kwargs: dict[str, Any], result: object) -> Described:
    flops = 2.0 * tensors_in(result)[0].numel() * args[1][0].numel()
    return Work.MEMORY, _rate(args[0]), (_moved(args, result), flops, 0, 0, 0, 0, 1)


def _many_tensors(func: Any, inputs: list[torch.Tensor]) -> Described:
    """PyTorch's kernels over lists of tensors: read, and written where the first list is."""
    moved = float(sum(touched_bytes(t) for t in inputs))
    lists = max(1, sum("Tensor" in str(a.type) for a in func._schema.arguments))  # noqa: SLF001
    written = moved / lists
    count = len(inputs) / lists
    elements = sum(t.numel() for t in inputs) / lists
    launches = max(1.0, count / TENSORS_PER_LAUNCH, elements / ELEMENTS_PER_LAUNCH)
    if "fused" in func.name():
        written *= 3  # the weights and both moments
    return Work.UPDATE, Rate.FP32, (moved + written, 0, 0, 0, 0, 0, launches)


PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any], Any], Described]] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _bmm,
    "aten::_grouped_mm": _grouped,
    "aten::convolution": _convolution,
    "aten::convolution_backward": lambda args, kwargs, result: _convolution(
        args[1:], kwargs, result
    ),
}
KERNELS: dict[str, "Kernel"] = {}
"""The opaque kernels by operator; ``trials.simulation.kernels`` fills it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is declared of a kernel that no tensor tells of.

    Attributes:
        work: what it is, given arguments and result.
        workspace_bytes: what it takes while it runs, given its arguments.
    """

    work: Callable[[Sequence[Any], Any], list[Described]]
    workspace_bytes: Callable[[Sequence[Any]], int] = lambda _args: 0
