"""Stand-ins for the GPU and the host that TRL's activation offloading copies between.

TRL's own code decides which activations leave the GPU, when they are freed and when they return.
It gets fake streams and host tensors, which report copies and waits to the tracer.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trials.models.activation_offloading import MODULE, activation_offloading
from trials.recipes.recipe import Recipe
from trials.simulation.recording import COMPUTE_STREAM, COPY_STREAM, Kind, OperatorClass, Wait
from trials.simulation.tracing.tracer import NO_NUMBERS, Tracer
from trials.training.census import HOST_COPY

Offloading = contextlib.AbstractContextManager[object]


class HostLink:
    """Fake device module of a GPU, with one stream for computation and one for copies."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self._compute, self._copies = _Stream(self, copies=False), _Stream(self, copies=True)

    def Stream(self) -> "_Stream":  # noqa: N802 - the name in torch.cuda
        """Stream of the copies, the only one that TRL makes."""
        return self._copies

    def current_stream(self) -> "_Stream":
        """Stream of the computation."""
        return self._compute

    def address(self, storage: torch.UntypedStorage) -> int:
        """Stand-in for the address of a storage, which no other storage of the step gets.

        TRL adds offsets to it.
        """
        name = None if self.tracer is None else self.tracer.name_of(storage)
        return (-storage._cdata if name is None else name + 1) << 40  # noqa: SLF001 - as StorageWatch

    @contextlib.contextmanager
    def stream(self, stream: "_Stream") -> Iterator[None]:
        """Make storages and run copies on a stream."""
        assert self.tracer is not None
        self.tracer.stream = COPY_STREAM if stream.copies else COMPUTE_STREAM
        try:
            yield
        finally:
            self.tracer.stream = COMPUTE_STREAM

    def empty_cache(self) -> None:
        """Do nothing: the replayed allocator keeps its cache between micro-batches."""

    def waits(self, wait: Wait) -> None:
        """Record a mark or a wait of a stream."""
        assert self.tracer is not None
        if wait is Wait.HOST:
            self.tracer.event(Kind.WAITED, 0, NO_NUMBERS)
        else:
            self.tracer.event(Kind.STREAM, int(wait), NO_NUMBERS)

    def copied(self, tensor: Tensor, *, to_host: bool) -> None:
        """Record a copy between GPU and host."""
        assert self.tracer is not None
        moved = float(tensor.numel() * tensor.element_size())
        numbers = (moved, *NO_NUMBERS[1:-1], 1.0)
        self.tracer.event(Kind.RUN, 4 * OperatorClass.HOST_COPY, numbers)
        if to_host and self.tracer.note_operator is not None:
            self.tracer.note_operator(HOST_COPY, tensor)


class _Stream:
    """A fake CUDA stream. Its events are waited for in the order in which they are recorded."""

    def __init__(self, link: HostLink, *, copies: bool) -> None:
        self._link = link
        self.copies = copies

    def record_event(self) -> None:
        """Mark the work until now."""
        self._link.waits(Wait.COPIES_MARKED if self.copies else Wait.COMPUTE_MARKED)

    def wait_event(self, _event: object) -> None:
        """Wait for the oldest mark of the other stream."""
        self._link.waits(Wait.COPIES_FOR_MARK if self.copies else Wait.COMPUTE_FOR_MARK)

    def wait_stream(self, _other: "_Stream") -> None:
        """Wait for all work of the other stream."""
        self._link.waits(Wait.COPIES_FOR_COMPUTE if self.copies else Wait.COMPUTE_FOR_COPIES)

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        if self.copies:
            self._link.waits(Wait.COMPUTE_FOR_COPIES)
        self._link.waits(Wait.HOST)


class _HostTensor:
    """Tensor in pinned memory of the host: a shape alone."""

    def __init__(self, link: HostLink, shape: Any, strides: Any, dtype: torch.dtype) -> None:
        self._link = link
        self._layout = (shape, strides)
        self._dtype = dtype

    def copy_(self, tensor: Tensor, *, non_blocking: bool) -> None:
        del non_blocking
        self._link.copied(tensor, to_host=True)

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        del non_blocking
        tensor = torch.empty_strided(*self._layout, dtype=self._dtype, device=device)
        self._link.copied(tensor, to_host=False)
        return tensor


class _TorchOnGpu:
    """The module torch as TRL's code sees it, with a fake accelerator and tensors on the host."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.accelerator = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def current_accelerator(self) -> torch.device:
        return torch.device("cpu")  # the device of all traced tensors

    def get_device_module(self, _type: str) -> HostLink:
        return self._link

    def empty_like(self, tensor: Tensor, **_: object) -> _HostTensor:
        return _HostTensor(self._link, tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self, elements: int, *, dtype: torch.dtype, **_: object) -> _HostTensor:
        return _HostTensor(self._link, (elements,), (1,), dtype)


def simulated_offloading(model: nn.Module, recipe: Recipe, link: HostLink) -> Offloading:
    """Make TRL's context manager on fake streams.

    Raises:
        ImportError: TRL is not installed.
    """
    if not recipe.activation_offloading:
        return contextlib.nullcontext()
    with _replaced(link):
        context = activation_offloading(model, recipe)
    return _Offloading(link, context)


class _Offloading:
    """TRL's context within that of its stand-ins."""

    def __init__(self, link: HostLink, context: Any) -> None:
        self._link = link
        self._context = context
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(_replaced(self._link))
        self._context.curr_autograd_node = None  # else the last node's tensors outlive the trace
        self._stack.enter_context(self._context)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def _replaced(link: HostLink) -> Iterator[None]:
    """Replace what TRL's code asks of PyTorch, for as long as it runs."""
    library: Any = importlib.import_module(MODULE)
    replacements: list[tuple[Any, str, Callable[..., Any] | _TorchOnGpu]] = [
        (library, "torch", _TorchOnGpu(link)),
        (torch.UntypedStorage, "data_ptr", lambda storage: link.address(storage)),  # noqa: PLW0108 - a bound method would not bind the storage
        # It delays a reuse of the block until the stream has passed.
        (Tensor, "record_stream", lambda _tensor, _stream: None),
    ]
    own = [(place, name, vars(place).get(name)) for place, name, _ in replacements]
    for place, name, stand_in in replacements:
        setattr(place, name, stand_in)
    try:
        yield
    finally:
        for place, name, before in own:
            if before is None:  # inherited
                delattr(place, name)
            else:
                setattr(place, name, before)
