"""Attribution of operators to layers: made-up events of a GPU's kernels and several threads."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from trials.training.profiling.operator_attribution import NODE, Part, rows


@dataclass
class MadeEvent:
    """An event of torch.profiler with the fields that are read."""

    name: str
    start: float
    end: float
    cpu_parent: "MadeEvent | None" = None
    sequence_nr: int = -1
    thread: int = 1
    fwd_thread: int | None = None
    kernels: tuple[Any, ...] = ()
    self_cpu_time_total: float = 0.0
    input_shapes: list[Any] = field(default_factory=list)

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.start, end=self.end)


def kernel(name: str, microseconds: float) -> Any:
    """A kernel on a GPU."""
    return SimpleNamespace(name=name, duration=microseconds)


def a_step_on_a_gpu() -> list[MadeEvent]:
    """A product in an expert: forward and backward on different threads, then its optimizer."""
    whole = MadeEvent(Part("forward", "other").range_name, 0, 100)
    expert = MadeEvent(Part("forward", "experts", "down").range_name, 10, 90, whole)
    # Views that make no node have the number of the node that follows.
    view = MadeEvent("aten::t", 20, 22, expert, 7)
    product = MadeEvent("aten::mm", 30, 40, expert, 7, kernels=(kernel("ampere_gemm", 5.0),))
    custom = MadeEvent("FlashAttnFunc", 41, 45, expert, 8, kernels=(kernel("Flash_Fwd_kernel", 2),))
    node = MadeEvent(f"{NODE}MmBackward0", 110, 150, None, 7, thread=2, fwd_thread=1)
    inner = MadeEvent("aten::mm", 120, 130, node, thread=2, kernels=(kernel("ampere_gemm", 11.0),))
    adding = MadeEvent(
        f"{NODE}torch::autograd::AccumulateGrad", 151, 160, None, thread=2, fwd_thread=0
    )
    add = MadeEvent("aten::add_", 152, 154, adding, thread=2, kernels=(kernel("vectorized", 1.0),))
    update = MadeEvent(Part("optimizer", "optimizer").range_name, 200, 220)
    fused = MadeEvent(
        "aten::_fused_adamw_", 201, 210, update, kernels=(kernel("multi_tensor_apply", 3.0),)
    )
    return [update, fused, whole, expert, view, product, custom, node, inner, adding, add]


def test_kernels_belong_to_the_operators_that_launched_them() -> None:
    """Backward kernels, on another thread, belong to the layer of the forward operator."""
    table = rows(a_step_on_a_gpu(), lambda _: 0, on_gpu=True)
    assert {(r.stage, r.layer, r.kernel): round(r.seconds * 1e6, 6) for r in table} == {
        ("forward", "experts", "matmul down"): 5.0,
        ("forward", "experts", "attention"): 2.0,
        ("backward", "experts", "matmul down"): 11.0,
        ("backward", "experts", "element-wise"): 1.0,
        ("optimizer", "optimizer", "update"): 3.0,
    }


def test_events_outside_a_stage_are_not_in_the_step() -> None:
    """The profiler and other code of the process also make events."""
    stray = [MadeEvent("aten::mm", 0, 5, self_cpu_time_total=5.0)]
    assert rows(stray, lambda _: 0, on_gpu=False) == []


def test_operators_between_recomputed_modules_are_recomputed() -> None:
    """A residual is added between two ranges, so an operator without a range was recomputed too."""
    node = MadeEvent(f"{NODE}MulBackward0", 0, 100, None, 3)
    apply = MadeEvent("MulBackward0", 1, 99, node, 3)
    first = MadeEvent(Part("recompute", "norms").range_name, 10, 20, apply)
    residual = MadeEvent("aten::add", 25, 30, apply, self_cpu_time_total=5.0)
    second = MadeEvent(Part("recompute", "mlp").range_name, 40, 60, apply)
    after = MadeEvent("aten::mul", 70, 80, apply, self_cpu_time_total=10.0)
    events = [node, apply, first, residual, second, after]
    table = rows(events, lambda _: 0, on_gpu=False)
    assert {(r.stage, r.layer): round(r.seconds * 1e6, 6) for r in table if r.seconds} == {
        ("recompute", "other"): 5.0,
        ("backward", "other"): 10.0,
    }
