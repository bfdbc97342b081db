"""What an operator returns and is, by the shapes it is given: asked of PyTorch once in a trace.

A step runs few different operators, each many times; a shape rule of PyTorch's takes a tenth of a
millisecond and more, a new fake tensor a tenth of that.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from trials.simulation.tracing.operator_costs import Described, tensors_in

CPU = torch.device("cpu")
Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class ShapeEffects:
    """What an operator does with tensors of some shapes.

    Attributes:
        workspace: bytes that it takes while it runs.
        works: the work that it is.
        mode: of its results; absent where they must be asked for each time.
        kind: what these are in, a tuple or a list; absent for a lone one.
        shapes: theirs, in order; absent for one that there is not.
    """

    workspace: int
    works: list[Described]
    mode: FakeTensorMode | None = None
    kind: type | None = None
    shapes: tuple[Shape | None, ...] = ()

    def results(self) -> Any:
        """New tensors like those it returned."""
        mode = self.mode
        assert mode is not None
        fakes = [None if shape is None else new_fake(shape, mode) for shape in self.shapes]
        return fakes[0] if self.kind is None else self.kind(fakes)


def new_fake(shape: Shape, mode: FakeTensorMode) -> FakeTensor:
    """A new fake tensor on the CPU, past all that PyTorch would do to find out its shape."""
    size, strides, dtype = shape
    with no_dispatch():
        meta = torch.empty_strided(size, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, CPU)


def shape_of(tensor: torch.Tensor) -> Shape:
    """All that a shape rule asks of a tensor."""
    return (tensor.shape, tensor.stride(), tensor.dtype)


def key_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
    """What the results' shapes follow from; None where they are to be asked for."""
    if not _makes_new(func):
        return None
    try:
        parts = (func, *map(_part, args), *((name, _part(v)) for name, v in kwargs.items()))
        hash(parts)
    except TypeError:
        return None
    return parts


def _part(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor):
            raise TypeError("it has values")
        return shape_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_part, value))
    return (type(value), value)  # 1, 1.0 and True are equal, and not the same to a shape rule


@cache
def _makes_new(func: Any) -> bool:
    """Whether an operator leaves what it is given as it is, and returns nothing of it."""
    schema = func._schema  # noqa: SLF001 - torch has no other name for it
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def told_shapes(
    results: Any, given: Iterable[object]
) -> tuple[FakeTensorMode, type | None, tuple[Shape | None, ...]] | None:
    """Mode, kind and shapes of results, of which new ones can be made; None where they cannot.

    Some return what they were given, whatever their schema says (``_unsafe_view``).

    Args:
        results: of an operator.
        given: its arguments.
    """
    many = type(results) in {tuple, list}
    listed = list(results) if many else [results]
    tensors = [each for each in listed if each is not None]
    if not tensors or not all(_is_plain(each) for each in tensors):
        return None
    storages = [each.untyped_storage() for each in (*tensors_in(given), *tensors)]
    fresh = {storage._cdata for storage in storages[-len(tensors) :]}  # noqa: SLF001 - the one name of a storage
    old = {storage._cdata for storage in storages[: -len(tensors)]}  # noqa: SLF001 - as above
    if len(fresh) < len(tensors) or fresh & old:
        return None
    shapes = tuple(None if each is None else shape_of(each) for each in listed)
    return tensors[0].fake_mode, type(results) if many else None, shapes


def _is_plain(tensor: object) -> bool:
    """Whether a tensor is told by its shape alone: no value is known, and all its storage is it."""
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return False
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size() * (extent if tensor.numel() else 0)
    is_whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size
    return is_whole and tensor.constant is None and tensor.fake_device == CPU
