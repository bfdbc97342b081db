"""Results and costs of operators by the shapes of their arguments, computed once per trace.

A step runs few different operators many times. A shape rule of PyTorch takes a tenth of a
millisecond or more, a new fake tensor a tenth of that.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from trials.simulation.recording import Numbers
from trials.simulation.tracing.operator_costs import Described, tensors_in

CPU = torch.device("cpu")
GPU_BESIDE_HOST = torch.device("cpu", 1)
"""Device of a simulated GPU's tensors where the host has some, too, which are on the CPU."""
Shape = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class ShapeEffects:
    """Effects of an operator on tensors of given shapes.

    Attributes:
        workspace: numbers of its workspace while it runs, as of a storage.
        works: its costs, one per kind of work.
        waits: whether the host waits for the device after it.
        mode: mode of its fake results; absent where the shape rule must run each time: for views,
            and for operators that change an argument.
        kind: type of its results, tuple or list; absent for a single tensor.
        shapes: shapes of its results in order; absent for a missing one.
    """

    workspace: Numbers
    works: list[Described]
    waits: bool = False
    mode: FakeTensorMode | None = None
    kind: type | None = None
    shapes: tuple[Shape | None, ...] = ()

    def results(self) -> Any:
        """New fake tensors with the shapes of its results."""
        mode = self.mode
        assert mode is not None
        fakes = [None if shape is None else new_fake(shape, mode) for shape in self.shapes]
        return fakes[0] if self.kind is None else self.kind(fakes)


def new_fake(shape: Shape, mode: FakeTensorMode) -> FakeTensor:
    """New fake tensor, made without PyTorch's shape rules."""
    size, strides, dtype, device = shape
    with no_dispatch():
        meta = torch.empty_strided(size, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def first_of(args: tuple[Any, ...]) -> FakeTensor | None:
    """First argument; None unless all tensors among the arguments are fake, on one device."""
    first = args[0]
    if isinstance(first, (list, tuple)):
        first = first[0]
    if not isinstance(first, FakeTensor):
        return None
    device = first.fake_device
    for arg in args:
        for value in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(value, torch.Tensor) and (
                not isinstance(value, FakeTensor) or value.fake_device != device
            ):
                return None
    return first


def on_device(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """The result of a shape rule as a fake tensor on a device; one that is fake as it is."""
    return tensor if isinstance(tensor, FakeTensor) else FakeTensor(mode, tensor, device)


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """New fake tensor with the shape and dtype of another, without a dispatch."""
    assert isinstance(tensor, FakeTensor)
    return new_fake(shape_of(tensor), tensor.fake_mode)


def shape_of(tensor: FakeTensor) -> Shape:
    """Size, strides, dtype and device of a tensor: all that a shape rule reads."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)


def key_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
    """Key that determines effects of an operator; None where nothing does."""
    try:
        parts = (func, *map(_part, args), *((name, _part(v)) for name, v in kwargs.items()))
        hash(parts)
    except TypeError:
        return None
    return parts


def _part(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor):
            raise TypeError("a tensor with values has no key")
        return shape_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_part, value))
    return (type(value), value)  # 1, 1.0 and True are equal, but differ for a shape rule


def result_shapes(
    results: Any, given: Iterable[object]
) -> tuple[FakeTensorMode, type | None, tuple[Shape | None, ...]] | None:
    """Mode, type and shapes of results that can be made anew; None where they cannot.

    Views and operators that change an argument return its storage.
    """
    many = type(results) in {tuple, list}
    listed = list(results) if many else [results]
    tensors = [result for result in listed if result is not None]
    if not tensors or not all(_is_plain(tensor) for tensor in tensors):
        return None
    storages = [tensor.untyped_storage() for tensor in (*tensors_in(given), *tensors)]
    fresh = {storage._cdata for storage in storages[-len(tensors) :]}  # noqa: SLF001 - the one name of a storage
    old = {storage._cdata for storage in storages[: -len(tensors)]}  # noqa: SLF001 - as above
    if len(fresh) < len(tensors) or fresh & old:
        return None
    shapes = tuple(None if result is None else shape_of(result) for result in listed)
    return tensors[0].fake_mode, type(results) if many else None, shapes


def _is_plain(tensor: object) -> bool:
    """Whether shape alone determines a tensor: it has no value, and fills its whole storage."""
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return False
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size() * (extent if tensor.numel() else 0)
    is_whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size
    return is_whole and tensor.constant is None and tensor.fake_device.type == CPU.type


def grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Result of a grouped product in a dtype with kernels but without a shape rule.

    Args:
        left: tokens (n, inner), or (rows, n).
        right: matrices (groups, inner, columns), or tokens (n, columns).
        offsets: end of each group among the tokens, (groups,).
    """
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
