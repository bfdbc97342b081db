"""Recorder of a step under fake tensors, operation by operation."""

import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    in_kernel_invocation_manager,
)

from trials.devices.storages import StorageWatch, storage_of
from trials.simulation.recording import (
    STREAM,
    UPDATES,
    Column,
    IntArray,
    Kind,
    Numbers,
    Recording,
    Segment,
)
from trials.simulation.tracing.operator_costs import describe, workspace
from trials.simulation.tracing.shape_rules import (
    ShapeEffects,
    first_of,
    grouped_product,
    key_of,
    on_device,
    result_shapes,
)

aten = torch.ops.aten
NO_NUMBERS: Numbers = (0.0,) * len(Column)
UNSCALED = aten._amp_foreach_non_finite_check_and_unscale_.default
LIFTED = aten.lift_fresh.default  # makes a tensor of a Python number, such as a counter
READ_NAME = "aten::_local_scalar_dense"
# Questions to a fake tensor itself, without work on a device.
QUESTIONS = {torch.ops.prim.device.default}
FIND = aten.nonzero.default
ROUTED = {FIND, aten.nonzero_numpy.default}
# Views of single images outside the layers, as many as a batch has images: a trace leaves them out,
# for its structure is that of any batch. They take a microsecond of the host each.
OF_ONE_IMAGE = {aten.slice.Tensor, aten.select.int}
OUTSIDE = {Segment.BEFORE, Segment.AFTER}
# Operators that take masks in place of indices, of which their kernels find the set entries.
MASKED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Operators during which the host reads a result.
WAITING = {"bitsandbytes::int8_vectorwise_quant"}
READ = aten._local_scalar_dense.default  # noqa: SLF001 - the operator's name

# Operators whose shape rule alone gives the fake result. Skipping the rest of FakeTensorMode, which
# other operators need, makes a trace twice as fast.
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
# In-place operators without results: no effect on tensors without values.
UPDATING = {
    aten._fused_adamw_.default,
    aten._foreach_add_.Scalar,
    aten._foreach_add_.List,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
}
GROUPED = aten._grouped_mm.default  # noqa: SLF001 - the operator's name


MASKS = "transformers.masking_utils"
"""Decides on masks of padding or packed examples."""
CHECKS = "transformers.utils.import_utils"
"""Checks that images have as many features as the tokens name (``torch_compilable_check``)."""
KINDS = "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe"
"""Decides whether any token goes to experts of images."""
Effects = dict[Hashable, ShapeEffects]
NO_VALUES = "the next operations depend on the values of a tensor, which an estimate does not have"


class UntraceableError(ValueError):
    """The operations of a step depend on values of tensors, which a trace does not have."""


class UncompiledWatch(StorageWatch):  # type: ignore[no-untyped-call]
    """Watch of steps that are not compiled, so that PyTorch need not guard each dispatch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Tracer(UncompiledWatch):  # type: ignore[no-untyped-call]
    """Records the events of a step.

    Args:
        shares: returns the number of set entries of a routing mask; called once per use.
        already_live: tensors made before the step.
        with_workspaces: whether to record the workspaces that kernels of a GPU take.
        needs_mask: whether examples are padded, or several are in a row.
        note: called with the name and the result of each operator, once for equal arguments.
    """

    def __init__(
        self,
        shares: Callable[[torch.Tensor], int],
        already_live: Sequence[torch.Tensor],
        *,
        with_workspaces: bool,
        needs_mask: bool = False,
        note: Callable[[str, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.note_operator = note
        self._shares = shares
        self._with_workspaces = with_workspaces
        self.needs_mask = needs_mask
        self._names: dict[int, int] = {}
        self.made_in: dict[int | None, Segment] = {}  # by name of the storage
        self._next_name = 0
        self._events: list[tuple[int, int, int, Numbers]] = []
        self._workspaces: list[int] = []
        self._counters: set[int | None] = set()
        self._overflows: int | None = None
        self._following: Segment | None = None
        self._ghosts: list[tuple[int, int, int]] = []
        self.effects: Effects = {}  # by arguments, also of earlier traces of the same model
        self.segment = Segment.BEFORE
        self.image_tokens: int | None = None
        self.entries_of: Callable[[torch.Tensor], int] | None = None
        self.repeats, self.stream = 1, 0  # times that the host launches what is traced once
        self._held = True
        self.note_all(already_live)
        self._held = False

    def made(self, identity: int, size: int) -> None:
        """Record a new storage, unless it was made before the step."""
        if self._held:
            return
        self._names[identity] = self._next_name
        self.event(Kind.MADE, self._next_name, _numbers_of_storage(size, self.stream))
        self.made_in[self._next_name] = self.segment
        self._next_name += 1

    def gone(self, identity: int, size: int) -> None:  # noqa: ARG002 - the base class passes it
        """Record the end of a storage."""
        name = self._names.pop(identity, None)
        if name is not None:
            self.event(Kind.FREED, name, NO_NUMBERS)

    def name_of(self, held: torch.Tensor | torch.UntypedStorage) -> int | None:
        """Name of a storage, or of a tensor's; None for one made before the step."""
        self.report_late()
        return self._names.get(storage_of(held)._cdata)  # noqa: SLF001 - as StorageWatch

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Record that the backward pass has handed a parameter its gradient."""
        assert parameter.grad is not None
        if (name := self.name_of(parameter.grad)) is not None:
            # The sum reads both gradients and writes one.
            moved = 3.0 * parameter.grad.untyped_storage().nbytes()
            self.event(Kind.ACCUMULATED, name, (moved, *NO_NUMBERS[1:-1], 1.0))

    def add_ghost(self, tensor: torch.Tensor, like: int | None, copy: int) -> None:
        """Register the gradient of an untraced parameter as a copy of a traced storage.

        Args:
            tensor: the gradient; no operation made it, but its end is recorded.
            like: name of the traced storage; None to leave the gradient out.
            copy: number of the copy, from 1.
        """
        self._held = True
        identity = self.note_tensor(tensor)
        self._held = False
        if like is None:
            return
        self._names[identity] = self._next_name
        self._ghosts.append((self._next_name, like, copy))
        self._next_name += 1

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on shapes alone and record it."""
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return args[0].fake_device
        if func is READ:
            return self._read(args[0])
        if func is UNSCALED:
            self._overflows = self.note_tensor(args[1])
        if func in MASKED and self.image_tokens is not None:
            args = (args[0], _unmasked(args[1], self._entries), *args[2:])
        # The shape of a mask does not determine the number of its set entries.
        key = None if func in ROUTED else key_of(func, args, kwargs)
        effects = None if key is None else self.effects.get(key)
        if effects is None:
            result, effects = self._evaluated(func, args, kwargs)
            if key is not None:
                self.effects[key] = effects
        else:
            result = _result(func, args, kwargs) if effects.mode is None else effects.results()
        self.note_result(func, args, result)
        if func is LIFTED:
            self._counters.add(self.name_of(result))
        if not (self.image_tokens and self.segment in OUTSIDE and func in OF_ONE_IMAGE):
            self._record_work(effects)
        if effects.waits:
            self.event(Kind.WAITED, 0, NO_NUMBERS)
        return result

    def _evaluated(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ShapeEffects]:
        """Result of an operator, and its effects on all arguments of the same shapes."""
        routed = func in ROUTED
        result = _picked(args[0], self._shares(args[0])) if routed else _result(func, args, kwargs)
        if self.note_operator is not None:
            self.note_operator(func.name(), result)
        taken = workspace(func, args, kwargs) if self._with_workspaces else NO_NUMBERS
        shapes = result_shapes(result, (args, kwargs)) or ()
        waits = routed or func.name() in WAITING
        return result, ShapeEffects(taken, describe(func, args, kwargs, result), waits, *shapes)

    def _entries(self, mask: torch.Tensor) -> torch.Tensor:
        """Indices of all images, or of their tokens, which a kernel finds as ``nonzero`` does."""
        result = _picked(mask, _set_entries(self, mask))
        if self._with_workspaces:  # they are the kernel's own
            self.note_result(FIND, (mask,), result)
        self._record_work(ShapeEffects(NO_NUMBERS, describe(FIND, (mask,), {}, result)))
        self.event(Kind.WAITED, 0, NO_NUMBERS)
        return result

    def _record_work(self, effects: ShapeEffects) -> None:
        """Record the workspace and the costs of an operator."""
        if any(effects.workspace):
            self._workspaces.append(self._next_name)
            self.event(Kind.MADE, self._next_name, effects.workspace)
        for work, rate, numbers in effects.works:
            launches = numbers[Column.LAUNCHES] * self.repeats
            self.event(Kind.RUN, 4 * work + rate, (*numbers[: Column.LAUNCHES], launches))
        if any(effects.workspace):
            self.event(Kind.FREED, self._next_name, NO_NUMBERS)
            self._next_name += 1

    def _read(self, tensor: torch.Tensor) -> float | bool:
        """Value that the host reads from a tensor: 1, after a wait for the device.

        Exceptions: the overflow flag of loss scaling reads 0, and an optimizer's step counters are
        on the host, without a wait. A model's check of its own inputs holds.
        """
        reader = None if self.segment in UPDATES else _reader()
        if self.segment not in UPDATES and reader is None:
            raise UntraceableError(f"{READ_NAME}: {NO_VALUES}")
        if self.waits_for(tensor):
            self.event(Kind.WAITED, 0, NO_NUMBERS)
        if tensor.dtype == torch.bool:
            # Whether nothing is padded, or each row has one example.
            return not (self.needs_mask and reader == MASKS)
        one = tensor.untyped_storage()._cdata != self._overflows  # noqa: SLF001 - as StorageWatch
        return float(one) if tensor.is_floating_point() else int(one)

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether the host waits for the device before it reads a tensor."""
        return self.name_of(tensor) not in self._counters

    def recording(self, gradients: IntArray) -> Recording:
        """Recording of the step, by the names of the storages that hold gradients."""
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

    def pass_on_to(self, segment: Segment) -> None:
        """Begin a segment with the next operation; frees before that belong to the old one."""
        self._following = segment

    def event(self, kind: Kind, name: int, numbers: Numbers) -> None:
        """Record an event, in the segment that has begun."""
        if self._following is not None and kind is not Kind.FREED:
            self.segment, self._following = self._following, None
        self._events.append((kind, name, self.segment, numbers))


def _numbers_of_storage(size: int, stream: int) -> Numbers:
    numbers = [float(size), *NO_NUMBERS[1:]]
    numbers[STREAM] = float(stream)
    return tuple(numbers)


def _picked(mask: torch.Tensor, entries: int) -> torch.Tensor:
    """Indices of so many set entries of a mask, (entries, dimensions)."""
    return mask.new_empty((entries, mask.dim()), dtype=torch.int64)


def _set_entries(tracer: Tracer, mask: torch.Tensor) -> int:
    """Set entries of a mask over the images of a batch, or over its tokens."""
    if tracer.entries_of is not None:
        return tracer.entries_of(mask)
    return len(mask) if mask.dim() == 1 else mask[:, :1].numel() * (tracer.image_tokens or 0)


def _unmasked(
    indices: Sequence[torch.Tensor | None], entries: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | None]:
    """Indices with each mask replaced by those of its set entries."""
    without: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            without.append(index)
        else:
            without += entries(index).unbind(1)
    return without


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an operator.

    Raises:
        UntraceableError: no shape rule gives it.
    """
    try:
        return _shaped_result(func, args, kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UntraceableError(f"{func.name()}: {NO_VALUES}") from error
    except NotImplementedError as error:
        raise UntraceableError(f"{func.name()}: PyTorch has no shape rule for it") from error
    except Exception as error:
        error.add_note(func.name())  # the refusal names the operator
        raise


def _shaped_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an operator by the shapes of its arguments alone."""
    if func is GROUPED and args[0].dtype != torch.bfloat16:
        return grouped_product(*args[:3])
    if func in UPDATING:
        return None
    first = first_of(args) if func in PLAIN and "device" not in kwargs else None
    if first is None:
        return func(*args, **kwargs)
    mode, device = first.fake_mode, first.fake_device
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return on_device(result, mode, device)
    return type(result)(on_device(part, mode, device) for part in result)


def _reader() -> str | None:
    """Module of transformers that reads a number where the host may."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the only way to find the caller
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in {MASKS, CHECKS, KINDS}:
            return str(name)
        frame = frame.f_back
    return None
