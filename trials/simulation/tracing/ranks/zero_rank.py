"""The first rank of a group that moves nothing, which trains by DeepSpeed's own engine."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from trials.models.weight_placement import DTYPES, quantisation_constants
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.simulation.recording import Held, Kind, Purpose, Segment
from trials.simulation.tracing.ranks.fake_rank import fake_mesh, in_place
from trials.simulation.tracing.ranks.host_tensors import HostTensors
from trials.simulation.tracing.ranks.host_work import NoCompiledAdam, is_on_host
from trials.simulation.tracing.ranks.rank_streams import RankStreams
from trials.simulation.tracing.ranks.rank_tracer import RankTracer
from trials.simulation.tracing.shape_rules import CPU
from trials.simulation.tracing.tracer import NO_NUMBERS
from trials.training.finetune import model_tensors
from trials.training.optimizers.deepspeed_stepper import (
    LOCAL_RANK,
    DeepSpeedStepper,
    deepspeed_library,
    zero_stepper,
)

ZERO = "deepspeed.runtime.zero"
CPU_ADAM = "deepspeed.ops.adam.cpu_adam"
COMPARING = ("partition_parameters", "partitioned_param_coordinator")
"""Modules of ZeRO that compare lists of numbers among the ranks."""
GATHERING = ("parameter_offload", "partitioned_param_coordinator")
"""Modules of ZeRO that gather and free the weights of a module in the order of a set."""


ROOM_BYTES = 2**50
"""Memory that a traced GPU has for copies of its weights; ``host_bytes`` knows of less."""


class _InOrder(dict[Any, None]):
    """A set in the order of its items, not of their addresses, which no two traces share."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        """Add an item."""
        self[item] = None

    def discard(self, item: Any) -> None:
        """Remove an item, if it is there."""
        self.pop(item, None)

    def update(self, items: Iterable[Any]) -> None:  # type: ignore[override] # a set's
        """Add items."""
        super().update(dict.fromkeys(items))


class EngineTracer(RankTracer):  # type: ignore[no-untyped-call]
    """Records steps by DeepSpeed's engine, but not its making and the steps until it is steady.

    Attributes:
        is_silent: whether nothing is recorded now.
        is_updating: whether the engine updates the weights, for which it reads numbers.
        host: tensors that the rank keeps on the host, which is apart from the GPU; None for a CPU.
        loses_weights: whether a recorded step has freed a storage of the model's own, which is not
            among its events.
    """

    def __init__(self, *args: Any, has_host: bool, **options: Any) -> None:
        self.host = HostTensors() if has_host else None
        self.is_silent = True
        self.is_updating = False
        self.loses_weights = False
        self._kept: set[int] = set()
        super().__init__(*args, has_host=has_host, **options)

    def event(self, kind: Kind, name: int, numbers: Sequence[float]) -> None:
        """Record an event, unless silent."""
        if not self.is_silent:
            super().event(kind, name, tuple(numbers))

    def made(self, identity: int, size: int) -> None:
        """Record a new storage, unless silent."""
        if not self.is_silent:
            super().made(identity, size)

    def gone(self, identity: int, size: int) -> None:
        """Record the end of a storage."""
        self.loses_weights |= not self.is_silent and identity in self._kept
        super().gone(identity, size)

    def note_tensor(self, tensor: torch.Tensor) -> int:
        """Note a tensor on the GPU; DeepSpeed keeps shapes of weights on the meta device."""
        if tensor.device.type == "meta":
            return 0
        if self.host is not None and is_on_host(tensor):
            self.host.note(tensor)
            return 0
        return super().note_tensor(tensor)

    def begin(self, segment: Segment, kept: set[int]) -> None:
        """Begin a step, after all storages that outlive the step before.

        Args:
            segment: segment of these storages.
            kept: identities of the model's own storages, which are not among them.
        """
        self.is_silent, self.segment, self._kept = False, segment, kept
        self._names.clear()
        for identity, size in self._sizes.items():
            if identity not in kept:
                self.made(identity, size)

    def _read(self, tensor: torch.Tensor) -> float | bool:
        """Value that the host reads: gradients have a norm of 1, and none overflows."""
        if not self.is_updating and not _is_read_by_engine():
            return super()._read(tensor)
        if self.waits_for(tensor):
            self.event(Kind.WAITED, 0, NO_NUMBERS)
        if tensor.is_floating_point():
            return 1.0
        return False if tensor.dtype == torch.bool else 0


def _is_read_by_engine() -> bool:
    """Whether ZeRO itself reads a number, as of each gradient that goes to the host."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the only way to find the caller
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("torch.", "trials.")):
            return name.startswith(ZERO)
        frame = frame.f_back
    return False


class ZeroRank:
    """First rank of a layout by DeepSpeed's ZeRO.

    Args:
        model: fake model under its recipe, with all weights.
        parallel: the layout.
        recipe: recipe of the model.
        device: device of the model.
        has_streams: whether the device has streams, as a GPU; a CPU's kernels run one by one.

    Attributes:
        is_used: whether the model has an engine, or had one.

    Raises:
        ImportError: DeepSpeed is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallel,
        recipe: Recipe,
        *,
        device: torch.device,
        has_streams: bool,
    ) -> None:
        deepspeed_library(CPU.type)  # here, so that its absence is reported before a trace
        self._model, self._recipe, self._layout = model, recipe, parallel
        self._group = fake_mesh(parallel.gpus, None).get_group()
        self._streams = RankStreams()
        self._device = device
        self._host: HostTensors | None = None
        self._accelerator = (
            _accelerator(self._streams, device, self._pinned) if has_streams else None
        )
        self.is_used = False

    def stepper(self, optimizer: torch.optim.Optimizer) -> DeepSpeedStepper:
        """Stepper of this rank, whose first step makes the engine."""
        self.is_used = True
        return zero_stepper(self._model, optimizer, self._recipe, self._layout, CPU)

    @property
    def has_host(self) -> bool:
        """Whether the host's tensors are apart from the GPU's."""
        return self._device != CPU

    def _pinned(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the tensor itself, counted as one in pinned memory."""
        if self._host is not None:
            self._host.pin(tensor)
        return tensor

    @contextlib.contextmanager
    def traced_by(self, tracer: EngineTracer) -> Iterator[None]:
        """Let DeepSpeed run on fake tensors, and report its streams to a tracer."""
        self._streams.tracer, self._host = tracer, tracer.host
        groups, comm, real = (
            importlib.import_module(f"deepspeed.{name}")
            for name in ("utils.groups", "comm.comm", "accelerator.real_accelerator")
        )
        model: Any = self._model
        world: Any = dist.distributed_c10d._world  # noqa: SLF001 - no public name
        replaced: list[tuple[Any, str, Any]] = [
            (world, "default_pg", self._group),
            (groups, "_WORLD_GROUP", None),
            (comm, "cdb", None),
            # Stage 3 sets a linear of its own, for all models of the process and for good.
            (functional, "linear", functional.linear),
            # The model has its dtype and device; fake parameters cannot change theirs.
            (model, "to", lambda *_, **__: model),
            (model, "bfloat16", lambda: model),
            *((module, name, lambda *_: None) for module, name in _comparisons()),
            (importlib.import_module(CPU_ADAM), "CPUAdamBuilder", NoCompiledAdam),
            (importlib.import_module("cpuinfo"), "get_cpu_info", dict),  # which takes a second
            *((importlib.import_module(f"{ZERO}.{name}"), "set", _InOrder) for name in GATHERING),
        ]
        if self._accelerator is not None:
            replaced += [
                (real, "ds_accelerator", self._accelerator),
                (torch.Tensor, "record_stream", lambda *_: None),
            ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_launcher())
            for place, name, value in replaced:
                stack.enter_context(in_place(place, name, value))
            yield
        self._streams.tracer = None
        if tracer.host is not None:
            tracer.host.close()

    def cast(self) -> None:
        """Give all of the model one dtype, as DeepSpeed does."""
        dtype = DTYPES[self._recipe.compute_dtype]
        for module in self._model.modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - setattr would ask wrappers
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)  # noqa: SLF001 - as above

    def held(self) -> tuple[Held, set[int]]:
        """Storages of the model's own on this rank, and their identities."""
        constants = {id(tensor) for tensor in quantisation_constants(self._model)}
        # Stage 3 gathers weights anew, and holds its shard of each.
        tensors = [getattr(tensor, "ds_tensor", tensor) for tensor in model_tensors(self._model)]
        sizes: dict[int, tuple[int, Purpose]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            purpose = Purpose.QUANTISATION if id(tensor) in constants else Purpose.WEIGHT
            if storage.nbytes() and not (self.has_host and is_on_host(tensor)):
                sizes[storage._cdata] = storage.nbytes(), purpose  # noqa: SLF001 - the one name of a storage
        held_bytes, purposes = np.array(list(sizes.values()), np.int64).reshape(-1, 2).T
        return Held(held_bytes, purposes, np.zeros(len(sizes), np.int64)), set(sizes)


def _comparisons() -> Iterator[tuple[Any, str]]:
    """Functions that compare numbers among the ranks, of which there is one."""
    for module in COMPARING:
        imported = importlib.import_module(f"{ZERO}.{module}")
        yield from ((imported, name) for name in vars(imported) if "same_as_other_ranks" in name)


@contextlib.contextmanager
def _without_launcher() -> Iterator[None]:
    """Take back what DeepSpeed needs of a launcher: other libraries would think there is one."""
    name, value = LOCAL_RANK
    own = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if own is None else {name: own})


def _accelerator(
    streams: RankStreams, device: torch.device, pinned: Callable[..., torch.Tensor]
) -> Any:
    """DeepSpeed's interface to a GPU, whose tensors are fake ones on the CPU."""
    module = importlib.import_module("deepspeed.accelerator.cpu_accelerator")
    kind: Any = module.CPU_Accelerator

    class SimulatedAccelerator(kind):  # type: ignore[misc]
        """A GPU with streams."""

        def is_synchronized_device(self) -> bool:
            """Return False: kernels run after they are launched."""
            return False

        Stream = property(lambda _self: streams.new_stream)
        Event = property(lambda _self: streams.new_event)
        pin_memory = staticmethod(pinned)
        # Else the memory of this machine would decide where weights are flattened.
        available_memory = staticmethod(lambda *_: ROOM_BYTES)

        def stream(self, stream: Any) -> Any:
            """Run operators on a stream."""
            return streams.stream(stream)

        def current_stream(self, device_index: int | None = None) -> Any:
            """Stream that operators run on."""
            del device_index
            return streams.current_stream()

        def default_stream(self, device_index: int | None = None) -> Any:
            """Stream of the computation."""
            del device_index
            return streams.compute_stream

        def current_device_name(self) -> str:
            """Name of the GPU."""
            return str(device)

        def device_name(self, device_index: int | None = None) -> str:
            """Name of the GPU."""
            del device_index
            return str(device)

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            """Whether a tensor is on the GPU."""
            return tensor.device == device

        @property
        def ByteTensor(self) -> Any:  # noqa: N802 - the name in torch
            """Maker of a tensor on the GPU."""
            return partial(torch.tensor, dtype=torch.uint8, device=device)

        @property
        def FloatTensor(self) -> Any:  # noqa: N802 - as above
            """Maker of a tensor on the GPU."""
            return partial(torch.tensor, dtype=torch.float32, device=device)

    return SimulatedAccelerator()
