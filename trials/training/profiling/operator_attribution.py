"""Attribution of profiled operators to stages, layers and kernels. Pure: it reads events alone.

A forward operator is below the range that the hooks of its module opened. A backward operator is
below a node of autograd with the sequence number of its forward operator, and so belongs to the
layer of that operator. An operator below a range that opened in the backward pass is recomputed.
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

# Classes of operators by parts of their names; the first match counts. On a GPU the kernel's own
# name decides where that of its operator is not specific.
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
# Operators that move no data: their time is that of the host.
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


class Event(Protocol):
    """Attributes of a torch.profiler event that attribution reads."""

    name: str
    thread: int
    fwd_thread: int | None
    sequence_nr: int
    cpu_parent: "Event | None"
    kernels: Sequence[Any]  # launched on the GPU; each has a name, and a duration in microseconds
    input_shapes: Sequence[Any]
    time_range: Any

    @property
    def self_cpu_time_total(self) -> float:
        """Microseconds without those of the events below it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Position of an operator: stage, layer and role of the module.

    Attributes:
        stage, layer: as in a ProfileRow.
        product: role of a matrix product in it: ``gate``, ``up``, ``down``, ``router``, ``adapter``
            or empty.
    """

    stage: Stage
    layer: Layer
    product: str = ""

    @property
    def range_name(self) -> str:
        """Name of its range in a profile."""
        return f"{RANGE}{self.stage}|{self.layer}|{self.product}"

    def during(self, stage: Stage) -> "Part":
        """The same module in another stage."""
        return Part(stage, self.layer, self.product)


def rows(
    events: Iterable[Event], flops_of: Callable[[Event], int], *, on_gpu: bool
) -> list[ProfileRow]:
    """Sum the events of one step by stage, layer and kernel.

    Args:
        events: events of CPU threads.
        flops_of: returns the floating-point operations of an event, which needs recorded shapes.
        on_gpu: whether to count the time of kernels instead of operators.
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
    places = {place for sums in (seconds, flops) for place, value in sums.items() if value}
    return [
        ProfileRow(
            stage=place[0],
            layer=place[1],
            kernel=place[2],
            # Rounding of the clock can make a parent shorter than its parts.
            seconds=max(0.0, seconds[place]),
            calls=calls[place],
            flops=flops[place],
        )
        for place in sorted(places)
    ]


def _timed_kernels(event: Event) -> Iterator[tuple[str, float]]:
    is_generic = kernel_of(event.name, Part("forward", "other")) in ("host", "element-wise")
    for kernel in event.kernels:
        name = f"kernel::{kernel.name.lower()}" if is_generic else event.name
        yield name, kernel.duration


def kernel_of(name: str, part: Part) -> str:
    """Class of an operator; a matrix product has the role of its module, if that has several."""
    if part.stage == "optimizer":
        return "update"
    is_no_operator = "::" not in name or name.startswith((NODE, RANGE, "profiler::", "torch::"))
    if is_no_operator or (name.startswith("aten::") and name.removeprefix("aten::") in VIEWS):
        kernel_class = "host"
    else:
        fits = (kernel for kernel, words in KERNELS if any(word in name for word in words))
        kernel_class = next(fits, "element-wise")
    if part.product == "router":
        return {"matmul": "router", "host": "host", "dequantise": "dequantise"}.get(
            kernel_class, "top-k"
        )
    is_role = kernel_class == "matmul" and part.product
    return f"matmul {part.product}" if is_role else kernel_class


def attributed(events: Iterable[Event]) -> Iterator[tuple[Event, Part]]:
    """Events of the steps with the parts that they belong to, in the order of their start."""
    ordered = sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end))
    parts = _Parts(ordered)
    for event in ordered:
        part = parts.of(event)
        if part is not None:
            yield event, part


class _Parts:
    """Finds the part of an event. Callers pass events in the order of their start."""

    def __init__(self, ordered: Sequence[Event]) -> None:
        self._parts: dict[int, Part | None] = {}
        self._products: defaultdict[int, int] = defaultdict(int)
        self._last_node: dict[int, Part] = {}
        self._recomputing = _recomputed_spans(ordered)
        # Operators have the sequence number of the next node, so the last one with a number made
        # that node.
        self._forward: dict[tuple[int, int], Part] = {}

    def of(self, event: Event) -> Part | None:
        """Part of an event; None outside all steps."""
        part = self._locate(event)
        self._parts[id(event)] = part
        if event.sequence_nr >= 0 and part is not None and part.stage in ("forward", "recompute"):
            self._forward[event.thread, event.sequence_nr] = part
        return part

    def _locate(self, event: Event) -> Part | None:
        if event.name.startswith(RANGE):
            return Part(*event.name.removeprefix(RANGE).split("|"))  # type: ignore[arg-type] # by range_name
        if event.name.startswith(NODE):
            return self._of_node(event)
        parent = event.cpu_parent
        above = None if parent is None else self._parts.get(id(parent))
        if above is None:
            return None
        span = self._recomputing.get(id(parent))
        if span is not None and span[0] <= event.time_range.start <= span[1]:
            return Part("recompute", "other")
        if event.name in GROUPED_PRODUCTS and above.stage in ("forward", "recompute"):
            # The first product of fused experts has the role of their module, the second is down.
            self._products[id(parent)] += 1
            if self._products[id(parent)] > 1:
                return Part(above.stage, above.layer, "down")
        return above

    def _of_node(self, event: Event) -> Part:
        thread = event.thread if event.fwd_thread is None else event.fwd_thread
        part = self._forward.get((thread, event.sequence_nr))
        if part is None or ACCUMULATE in event.name:
            # A gradient is accumulated right after the node that computed it.
            part = self._last_node.get(event.thread, Part("backward", "other"))
        self._last_node[event.thread] = part
        return part.during("backward")


def _recomputed_spans(ordered: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """Start and end of recomputation below each parent of recomputed ranges, by identity."""
    spans: dict[int, tuple[float, float]] = {}
    for event in ordered:
        if not event.name.startswith(f"{RANGE}recompute|") or event.cpu_parent is None:
            continue
        if event.cpu_parent.name.startswith(RANGE):
            continue
        start, end = spans.get(id(event.cpu_parent), (event.time_range.start, 0.0))
        spans[id(event.cpu_parent)] = (start, max(end, event.time_range.end))
    return spans
