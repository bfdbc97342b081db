"""Records what a step does, operation by operation, under fake tensors."""

import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from trials.devices.storages import StorageWatch
from trials.simulation.recording import UPDATES, Column, IntArray, Kind, Numbers, Recording, Segment
from trials.simulation.tracing.operator_costs import describe, workspace_bytes
from trials.simulation.tracing.shape_rules import (
    CPU,
    ShapeEffects,
    key_of,
    new_fake,
    shape_of,
    told_shapes,
)

aten = torch.ops.aten
NO_NUMBERS: Numbers = (0.0,) * len(Column)
UNSCALED = aten._amp_foreach_non_finite_check_and_unscale_.default
LIFTED = aten.lift_fresh.default  # a number that Python made a tensor of, as counters are
READ_NAME = "aten::_local_scalar_dense"
# What the model's code asks of a fake tensor itself; no work of a device.
QUESTIONS = {torch.ops.prim.device.default}
ROUTED = {aten.nonzero.default, aten.nonzero_numpy.default}
READ = aten._local_scalar_dense.default  # noqa: SLF001 - the operator's name


# Operators whose shape rule alone gives the result of a fake tensor. Going past the rest of what
# fake tensors do (which is needed for others) traces twice as fast.
PLAIN_NAMES = (
    "mm addmm bmm silu silu_backward neg rsqrt view _unsafe_view unsqueeze squeeze expand slice "
    "transpose t permute select detach alias unbind clone _to_copy cat sum mean pow index mul add "
    "sub div add_ mul_ eq topk _softmax _softmax_backward_data index_add_ index_select zeros_like "
    "empty_like ones_like slice_backward"
)
PLAIN = {
    getattr(getattr(aten, name), overload)
    for name in PLAIN_NAMES.split()
    for overload in getattr(aten, name).overloads()
}
# They change tensors in place and return none: nothing to do where there are no values.
UPDATING = {
    aten._fused_adamw_.default,
    aten._foreach_add_.Scalar,
    aten._foreach_add_.List,
    aten._foreach_mul_.Scalar,
}
GROUPED = aten._grouped_mm.default  # noqa: SLF001 - the operator's name


NO_VALUES = "what follows depends on the values of a tensor, which an estimate has not"


class UntraceableError(ValueError):
    """A step's course depends on the values of tensors, which a trace does not have."""


class Tracer(StorageWatch):  # type: ignore[no-untyped-call]
    """Records the events of a step.

    Args:
        shares: tells how many of a mask's entries are set where the code asks for them: routing.
            Given the mask; called once for each time it is asked.
        already_live: tensors that were there before.
        with_workspaces: record what kernels take for themselves, as those of a GPU do.
    """

    def __init__(
        self,
        shares: Callable[[torch.Tensor], int],
        already_live: Sequence[torch.Tensor],
        *,
        with_workspaces: bool,
    ) -> None:
        super().__init__()
        self._shares = shares
        self._with_workspaces = with_workspaces
        self._names: dict[int, int] = {}
        self._next_name = 0
        self._events: list[tuple[int, int, int, Numbers]] = []
        self._workspaces: list[int] = []
        self._counters: set[int | None] = set()
        self._overflows: int | None = None
        self._following: Segment | None = None
        self._ghosts: list[tuple[int, int, int]] = []
        self._told: dict[Hashable, ShapeEffects] = {}
        self.segment = Segment.BEFORE
        self._held = True
        self.note_all(already_live)
        self._held = False

    def made(self, identity: int, size: int) -> None:
        """A storage: an event of its own, unless it was there before."""
        if self._held:
            return
        self._names[identity] = self._next_name
        self._event(Kind.MADE, self._next_name, (float(size), *NO_NUMBERS[1:]))
        self._next_name += 1

    def gone(self, identity: int, size: int) -> None:  # noqa: ARG002 - told when it was made
        """Its end."""
        name = self._names.pop(identity, None)
        if name is not None:
            self._event(Kind.FREED, name, NO_NUMBERS)

    def name_of(self, tensor: torch.Tensor) -> int | None:
        """The name of a tensor's storage; None for one that was there before."""
        return self._names.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as StorageWatch

    def add_ghost(self, tensor: torch.Tensor, like: int, copy: int) -> None:
        """Takes a tensor nobody made for the copy of a storage; its end is the copy's."""
        self._held = True
        identity = self.note_tensor(tensor)
        self._held = False
        self._names[identity] = self._next_name
        self._ghosts.append((self._next_name, like, copy))
        self._next_name += 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation on shapes alone and records it."""
        del types
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return args[0].fake_device
        if func is READ:
            return self._read(args[0])
        if func is UNSCALED:
            self._overflows = self.note_tensor(args[1])
        key = key_of(func, args, kwargs)
        told = None if key is None else self._told.get(key)
        if told is None or told.mode is None:
            result, told = self._asked(func, args, kwargs)
            if key is not None:
                self._told[key] = told
        else:
            result = told.results()
        self.note(result)
        if func is LIFTED:
            self._counters.add(self.name_of(result))
        self._works(told)
        if func in ROUTED:
            self._event(Kind.WAITED, 0, NO_NUMBERS)
        return result

    def _asked(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ShapeEffects]:
        """The result of an operator, and what is known of all that are given the same shapes."""
        try:
            result = self._result(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UntraceableError(f"{func.name()}: {NO_VALUES}") from error
        except Exception as error:
            error.add_note(func.name())  # whoever tells of it names the operator
            raise
        workspace = workspace_bytes(func, args, kwargs) if self._with_workspaces else 0
        works = describe(func, args, kwargs, result)
        # How many are picked is not told by the shape of a mask.
        shapes = None if func in ROUTED else told_shapes(result, (args, kwargs))
        return result, ShapeEffects(workspace, works, *(shapes or ()))

    def _works(self, told: ShapeEffects) -> None:
        """What an operator is to the device."""
        if told.workspace > 0:
            self._workspaces.append(self._next_name)
            self._event(Kind.MADE, self._next_name, (float(told.workspace), *NO_NUMBERS[1:]))
        for work, rate, numbers in told.works:
            self._event(Kind.RUN, 4 * work + rate, numbers)
        if told.workspace > 0:
            self._event(Kind.FREED, self._next_name, NO_NUMBERS)
            self._next_name += 1

    def _read(self, tensor: torch.Tensor) -> float | bool:
        """What the host is told when it reads a number: 1, and it waits for it.

        But nothing overflows; and an optimizer's counters of steps are on the host.
        """
        if self.segment not in UPDATES and not _asked_about_masks():
            raise UntraceableError(f"{READ_NAME}: {NO_VALUES}")
        if self.name_of(tensor) not in self._counters:
            self._event(Kind.WAITED, 0, NO_NUMBERS)
        if tensor.dtype == torch.bool:
            return True  # nothing is padded, nothing packed
        overflow = tensor.untyped_storage()._cdata == self._overflows  # noqa: SLF001 - as StorageWatch
        one = 0 if overflow else 1
        return float(one) if tensor.is_floating_point() else one

    def recording(self, gradients: IntArray) -> Recording:
        """What was recorded.

        Args:
            gradients: the names of the storages of gradients.
        """
        kinds, names, segments, numbers = zip(*self._events, strict=True)
        return Recording(
            kinds=np.array(kinds, np.int64),
            names=np.array(names, np.int64),
            segments=np.array(segments, np.int64),
            numbers=np.array(numbers, np.float64),
            ghosts=np.array(self._ghosts, np.int64).reshape(-1, 3),
            gradients=gradients,
            workspaces=np.array(self._workspaces, np.int64),
        )

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in ROUTED:
            return self._routed(args[0])
        if func is GROUPED and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args[:3])
        if func in UPDATING:
            return None
        mode = _mode_of(args) if func in PLAIN and "device" not in kwargs else None
        if mode is None:
            return func(*args, **kwargs)
        with in_kernel_invocation_manager(mode):
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _fake(result, mode)
        return type(result)(_fake(each, mode) for each in result)

    def _routed(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.new_empty((self._shares(mask), mask.dim()), dtype=torch.int64)

    def pass_on_to(self, segment: Segment) -> None:
        """Another segment begins with the next operation; what goes first is still of the old."""
        self._following = segment

    def _event(self, kind: Kind, name: int, numbers: Numbers) -> None:
        if self._following is not None and kind is not Kind.FREED:
            self.segment, self._following = self._following, None
        self._events.append((kind, name, self.segment, numbers))


def _asked_about_masks() -> bool:
    """Whether a number is read to see if masks are needed: that nothing is padded is known."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the way to see who asks
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.masking_utils":
            return True
        frame = frame.f_back
    return False


def _mode_of(args: tuple[Any, ...]) -> FakeTensorMode | None:
    """The mode of the first argument; None unless every tensor among them is a fake one."""
    first = args[0]
    if isinstance(first, (list, tuple)):
        first = first[0]
    for arg in args:
        for each in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor):
                return None
    return first.fake_mode if isinstance(first, FakeTensor) else None


def _fake(result: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    return result if isinstance(result, FakeTensor) else FakeTensor(mode, result, CPU)


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new fake tensor of the shape and dtype of one, fast."""
    assert isinstance(tensor, FakeTensor)
    return new_fake(shape_of(tensor), tensor.fake_mode)


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """The result of a grouped product in a dtype that has kernels but no shape rule.

    Of tokens and the matrices of their groups, or of each group's tokens.
    """
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
