"""Whose operators a profile shows: stage, layer and kernel of each. Pure: it reads events alone.

A forward operator is below the range that its module's hooks opened. A backward operator is below
a node of autograd, which has the sequence number that its forward operator had; so it is that
operator's layer's. An operator below a range that was opened in the backward pass is recomputed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trials.records.profile import Layer, ProfileRow, Stage

Place = tuple[Stage, Layer, str]
RANGE = "step-part|"
NODE = "autograd::engine::evaluate_function: "
ACCUMULATE = "AccumulateGrad"
GROUPED_PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")

# What operators do, by parts of their names, the first that fits. On a GPU a kernel's own name is
# asked where its operator's says nothing.
KERNELS = (
    ("dequantise", ("dequant",)),
    ("attention", ("scaled_dot_product", "flash_attn", "flash_attention", "flash_fwd",
                   "flash_bwd", "efficient_attention")),
    ("scan", ("selective_scan", "mamba", "ssd_chunk")),
    ("convolution", ("conv",)),
    ("matmul", ("aten::mm", "::addmm", "::bmm", "::baddbmm", "_grouped_mm", "grouped_mm_fallback",
                "gemm", "gemv", "aten::mv", "aten::dot", "scaled_mm", "mkldnn_linear", "cutlass")),
    ("softmax", ("softmax",)),
    ("top-k", ("topk", "top_k")),
    ("gather/scatter", ("index", "gather", "scatter", "aten::where", "nonzero", "embedding",
                        "one_hot", "sort", "histc", "bincount", "cumsum", "masked",
                        "repeat_interleave", "searchsorted")),
    ("copy", ("copy", "aten::cat", "aten::stack", "aten::fill_", "aten::zero_", "memcpy", "memset",
              "contiguous", "aten::clone")),
)  # fmt: skip
# They move no data: their own time is the host's.
VIEWS = frozenset(
    {
        "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand",
        "expand_as", "flatten", "is_nonzero", "item", "lift_fresh", "linear", "matmul", "mT",
        "mH", "T", "narrow", "numpy_T", "permute", "reshape", "resize_", "resolve_conj",
        "resolve_neg", "result_type", "select", "select_backward", "set_", "slice",
        "slice_backward", "split", "squeeze", "t", "to", "transpose", "type_as", "unbind",
        "unflatten", "unsafe_split", "unsqueeze", "view", "view_as", "zeros", "zeros_like", "ones",
        "ones_like", "full", "full_like", "new_zeros", "new_empty", "_to_copy", "_reshape_alias",
        "_unsafe_view", "_local_scalar_dense", "as_strided_", "einsum", "softmax", "dropout",
    }
)  # fmt: skip


class LaunchedKernel(Protocol):
    """A kernel that an operator started on a GPU."""

    name: str
    duration: float  # microseconds


class Event(Protocol):
    """What is read of an event of torch.profiler."""

    name: str
    thread: int
    fwd_thread: int | None
    sequence_nr: int
    cpu_parent: "Event | None"
    kernels: Sequence[Any]
    input_shapes: Sequence[Any]
    time_range: Any

    @property
    def self_cpu_time_total(self) -> float:
        """Microseconds, those of the events below it taken off."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where in a step, and in which module.

    Attributes:
        stage, layer: as in a ProfileRow.
        product: what a matrix product in it is: ``gate``, ``up``, ``down``, ``router``, ``adapter``
            or nothing special.
    """

    stage: Stage
    layer: Layer
    product: str = ""

    @property
    def range_name(self) -> str:
        """What its range is called in a profile."""
        return f"{RANGE}{self.stage}|{self.layer}|{self.product}"

    def during(self, stage: Stage) -> "Part":
        """The same module at another time."""
        return Part(stage, self.layer, self.product)


def _of_range(name: str) -> Part:
    stage, layer, product = name.removeprefix(RANGE).split("|")
    return Part(stage, layer, product)  # type: ignore[arg-type] # written by range_name


def rows(
    events: Iterable[Event], flops_of: Callable[[Event], int], *, on_gpu: bool
) -> list[ProfileRow]:
    """The events of one step, added up.

    Args:
        events: those of CPU threads.
        flops_of: floating-point operations of an event; shapes must have been recorded for any.
        on_gpu: count the time of kernels, not that of operators.
    """
    seconds: defaultdict[Place, float] = defaultdict(float)
    calls: defaultdict[Place, int] = defaultdict(int)
    flops: defaultdict[Place, int] = defaultdict(int)
    for event, part in attributed(events):
        named = _timed_kernels(event) if on_gpu else ((event.name, event.self_cpu_time_total),)
        for name, microseconds in named:
            place = (part.stage, part.layer, kernel_of(name, part))
            seconds[place] += microseconds / 1e6
            calls[place] += 1
        flops[part.stage, part.layer, kernel_of(event.name, part)] += flops_of(event)
    places = {place for of in (seconds, flops) for place, value in of.items() if value}
    return [
        ProfileRow(
            stage=place[0],
            layer=place[1],
            kernel=place[2],
            # The clock's rounding can make a parent shorter than its parts.
            seconds=max(0.0, seconds[place]),
            calls=calls[place],
            flops=flops[place],
        )
        for place in sorted(places)
    ]


def _timed_kernels(event: Event) -> Iterator[tuple[str, float]]:
    says_nothing = kernel_of(event.name, Part("forward", "other")) in ("host", "element-wise")
    for kernel in event.kernels:
        own = f"kernel::{kernel.name.lower()}" if says_nothing else event.name
        yield own, kernel.duration


def kernel_of(name: str, part: Part) -> str:
    """What an operator does; a matrix product by its module, where that has several."""
    if part.stage == "optimizer":
        return "update"
    is_no_operator = "::" not in name or name.startswith((NODE, RANGE, "profiler::", "torch::"))
    if is_no_operator or (name.startswith("aten::") and name.removeprefix("aten::") in VIEWS):
        found = "host"
    else:
        fits = (kernel for kernel, words in KERNELS if any(word in name for word in words))
        found = next(fits, "element-wise")
    if part.product == "router":
        return {"matmul": "router", "host": "host", "dequantise": "dequantise"}.get(found, "top-k")
    return f"matmul {part.product}" if found == "matmul" and part.product else found


def attributed(events: Iterable[Event]) -> Iterator[tuple[Event, Part]]:
    """Each event of the steps with the part of them that it belongs to."""
    ordered = sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end))
    parts = _Parts(ordered)
    for event in ordered:
        part = parts.of(event)
        if part is not None:
            yield event, part


class _Parts:
    """Finds the part that an event belongs to. Events are asked for in the order of their start."""

    def __init__(self, ordered: Sequence[Event]) -> None:
        self._known: dict[int, Part | None] = {}
        self._products: defaultdict[int, int] = defaultdict(int)
        self._last_node: dict[int, Part] = {}
        self._recomputing = _recomputed_spans(ordered)
        # The number is that of the next node: the last operator that had it made the node.
        self._forward: dict[tuple[int, int], Part] = {}

    def of(self, event: Event) -> Part | None:
        """None for what is of no step."""
        part = self._found(event)
        self._known[id(event)] = part
        if event.sequence_nr >= 0 and part is not None and part.stage in ("forward", "recompute"):
            self._forward[event.thread, event.sequence_nr] = part
        return part

    def _found(self, event: Event) -> Part | None:
        if event.name.startswith(RANGE):
            return _of_range(event.name)
        if event.name.startswith(NODE):
            return self._of_node(event)
        parent = event.cpu_parent
        above = None if parent is None else self._known.get(id(parent))
        if above is None:
            return None
        span = self._recomputing.get(id(parent))
        if span is not None and span[0] <= event.time_range.start <= span[1]:
            return Part("recompute", "other")
        if event.name in GROUPED_PRODUCTS and above.stage in ("forward", "recompute"):
            # The first product of fused experts is the one their module is named for.
            self._products[id(parent)] += 1
            if self._products[id(parent)] > 1:
                return Part(above.stage, above.layer, "down")
        return above

    def _of_node(self, event: Event) -> Part:
        thread = event.thread if event.fwd_thread is None else event.fwd_thread
        part = self._forward.get((thread, event.sequence_nr))
        if part is None or ACCUMULATE in event.name:
            # A gradient is added right after the node that it comes from.
            part = self._last_node.get(event.thread, Part("backward", "other"))
        self._last_node[event.thread] = part
        return part.during("backward")


def _recomputed_spans(ordered: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """From when to when the parent of recomputed ranges recomputes, by its identity."""
    spans: dict[int, tuple[float, float]] = {}
    for event in ordered:
        if not event.name.startswith(f"{RANGE}recompute|") or event.cpu_parent is None:
            continue
        if event.cpu_parent.name.startswith(RANGE):
            continue
        start, end = spans.get(id(event.cpu_parent), (event.time_range.start, 0.0))
        spans[id(event.cpu_parent)] = (start, max(end, event.time_range.end))
    return spans
