"""Simulated layers of liger-kernel: buffers of the real functions, and steps of whole models."""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from builders.observations import recipe, tiny_cell
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trials.devices.live_tensors import LiveTensorCounter
from trials.models.liger_layers import liger_layers_in_use
from trials.recipes.parallel import Parallel
from trials.records.model import find_model
from trials.simulation.recording import Column, Kind
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.kernels import liger_layers as simulated
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracer import Tracer
from trials.simulation.whole_step import Steps
from trials.training.finetune import implied_counts

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
ROWS, WIDTH = 600, 256


def no_experts(_: Tensor) -> int:
    """A dense model routes nothing."""
    raise AssertionError


def peak(
    *,
    liger: bool,
    method: str = "full",
    checkpoints: bool = False,
    layout: Parallel | None = None,
) -> int:
    """Simulated peak of a tiny model."""
    settings = recipe(
        method, precision="bf16-mixed", liger_kernels=liger, gradient_checkpointing=checkpoints
    )
    cell = tiny_cell("llama-tiny", settings, seq_len=512).model_copy(update={"parallel": layout})
    traceable = TraceableCell(cell, find_model(cell.model), whole=True)
    traced = traceable.trace(8, no_experts)
    assert liger_layers_in_use(traceable.model) == (("rms_norm", "swiglu") if liger else ())
    return Steps(StepTrace((8,), (traced.recording,), traced.held, traced.copies)).peak_bytes(8)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_layers_save_less_for_the_backward_pass(method: str) -> None:
    """A norm saves its input and not its steps; SwiGLU and rotation save no results."""
    assert peak(liger=True, method=method) < 0.95 * peak(liger=False, method=method)


def test_few_layers_stand_for_all() -> None:
    """The check of the layers holds in a model that is cut to those that repeat, too."""
    facts = find_model("llama-tiny")
    facts = facts.model_copy(update={"config": facts.config | {"num_hidden_layers": 6}})
    cell = tiny_cell("llama-tiny", recipe("lora", liger_kernels=True), seq_len=16)
    traceable = TraceableCell(cell, facts)
    assert traceable.trace(2, no_experts).copies == 3
    assert traceable.parameters == implied_counts(cell, facts)  # those of all layers


def test_the_layers_go_with_checkpointing() -> None:
    """The check that each layer runs twice holds for them, too."""
    assert peak(liger=True, checkpoints=True) <= peak(liger=False, checkpoints=True)


def test_the_layers_go_with_shards() -> None:
    """The model's own code rotates, though fully_shard gives the model a class of its own."""
    two = Parallel(gpus=2, strategy="fsdp2")
    assert peak(liger=True, layout=two) < 0.95 * peak(liger=False, layout=two)


class _Triton(Loader, MetaPathFinder):
    """Finds modules of a stub: every name is a decorator, and every kernel does nothing."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("triton") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__="3.0.0", next_power_of_2=int)


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything:
    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return lambda *_args, **_kwargs: None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Modules of liger-kernel with a stub in place of Triton."""
    if find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [_Triton(), *sys.meta_path])
    yield lambda name: importlib.import_module(f"liger_kernel.{name}")
    for name in set(sys.modules) - before:
        if name.startswith(("liger_kernel", "triton")):
            del sys.modules[name]


def arguments(name: str) -> list[Tensor]:
    """Arguments of one of the functions."""
    if name == "rms_norm":
        return [torch.ones(ROWS, WIDTH).requires_grad_(), torch.ones(WIDTH).requires_grad_()]
    if name == "swiglu":
        return [torch.ones(ROWS, WIDTH).requires_grad_() for _ in range(2)]
    heads = [torch.ones(2, 64, count, 32).transpose(1, 2).requires_grad_() for count in (8, 4)]
    return [*heads, torch.ones(1, 64, 32), torch.ones(1, 64, 32)]


def run(function: Callable[..., Any], given: list[Tensor]) -> None:
    """Run forward and backward pass behind another operator, as in a model."""
    results = function(*(t * 2 if t.requires_grad else t for t in given))
    results = results if isinstance(results, tuple) else (results,)
    sum((result * result).sum() for result in results).backward()


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])
def test_declared_buffers_are_those_of_the_package(
    package: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of forward and backward pass, in bytes; kernels themselves allocate nothing."""
    ops = package(f"ops.{name}")
    for helper in ("calculate_settings", "_swiglu_tile_settings"):
        monkeypatch.setattr(ops, helper, lambda _columns: (1024, 8), raising=False)
    monkeypatch.setattr(ops, "_should_tile", lambda _columns: False, raising=False)
    monkeypatch.setattr(ops, "_resolve_rotary_dim", lambda *_: 32, raising=False)
    monkeypatch.setattr(simulated, "MULTIPROCESSORS", 1)  # as the package on a CPU
    monkeypatch.setattr(ops, "torch_to_triton_dtype", {torch.float32: None}, raising=False)
    kind, ours = {
        "rms_norm": ("LigerRMSNormFunction", simulated._RmsNorm.apply),
        "swiglu": ("LigerSiLUMulFunction", simulated._SwiGlu.apply),
        "rope": ("LigerRopeFunction", simulated._Rope.apply),
    }[name]
    further = (1e-6,) if name == "rms_norm" else ()
    given = arguments(name)
    with LiveTensorCounter(given, 2**62) as counter:
        run(lambda *tensors: getattr(ops, kind).apply(*tensors, *further), given)
    expected = counter.peak_bytes - sum(t.untyped_storage().nbytes() for t in given)
    with FakeTensorMode():
        given = arguments(name)
        with (tracer := Tracer(no_experts, given, with_workspaces=False)):
            run(ours, given)
    recording = tracer.recording(np.array([], np.int64))
    made = recording.kinds == Kind.MADE
    sizes = dict(zip(recording.names[made], recording.numbers[made, Column.BYTES], strict=True))
    moves = recording.kinds <= Kind.FREED
    live = [
        sizes[storage] * (1 if kind == Kind.MADE else -1)
        for kind, storage in zip(recording.kinds[moves], recording.names[moves], strict=True)
    ]
    assert np.cumsum(live).max() == expected
