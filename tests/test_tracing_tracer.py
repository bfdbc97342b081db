"""Traces of code that asks for values which a trace does not have."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.observations import FULL, recipe, tiny_cell
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaMLP

from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.simulation.recording import Kind, Recording, Segment
from trials.simulation.trace_cache import TraceError, Traces, _last_line
from trials.simulation.trace_request import Routing, TraceRequest
from trials.simulation.tracing import tracer as tracer_module
from trials.simulation.tracing import watchdog as watchdog_module
from trials.simulation.tracing.operator_costs import describe
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracer import Tracer, UntraceableError
from trials.simulation.tracing.tracing_worker import refusal, routed_shares
from trials.simulation.tracing.watchdog import watchdog
from trials.training.optimizers.construction import make_optimizer


def no_shares(_: torch.Tensor) -> int:
    """Shares of tokens for code that routes none."""
    raise AssertionError("nothing is routed")


def tracer() -> Tracer:
    """A tracer without any events."""
    return Tracer(no_shares, [], with_workspaces=True)


def test_control_flow_that_depends_on_values_is_refused() -> None:
    """The error names the operator: a read by the host, or a shape that depends on values."""
    with FakeTensorMode(), tracer():
        values = torch.ones(3)
        with pytest.raises(UntraceableError, match="_local_scalar_dense"):
            bool(values.sum() > 0)
        with pytest.raises(UntraceableError, match="unique"):
            torch.unique(values)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_module_that_depends_on_values_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a model of transformers, the error has the operator and its module."""
    own = LlamaMLP.forward

    def doubling(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return own(self, 2 * x if x.sum() > 0 else x)

    monkeypatch.setattr(LlamaMLP, "forward", doubling)
    cell = TraceableCell(tiny_cell(), find_model("llama-tiny"))
    with pytest.raises(UntraceableError, match=r"_local_scalar_dense: .* \(in LlamaMLP\)"):
        cell.trace(2, no_shares)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_operator_and_the_module_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has a limited length and begins with the model."""
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x[..., 1:]))
    model = find_model("llama-tiny")
    with pytest.raises(RuntimeError) as caught:
        TraceableCell(tiny_cell(), model).trace(2, no_shares)
    text = refusal(model, caught.value)
    assert text.startswith("llama-tiny")
    assert "aten::mm: RuntimeError" in text
    assert text.endswith("(in Linear)")
    long = refusal(model, ValueError("\n".join(["of", "many", "lines"] * 1000)))
    assert long.startswith("llama-tiny")
    assert "ValueError: of many" in long
    assert len(long) < 400


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_slow_trace_is_reported_and_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has the model, the time so far and the limits."""
    cell, lines = TraceableCell(tiny_cell(), find_model("llama-tiny")), list[str]()
    monkeypatch.setattr(watchdog_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog_module, "FIRST_REPORT_SECONDS", 0.0)
    with watchdog("llama-tiny, 16 tokens", 600.0, lines.append):
        while not lines:
            cell.trace(2, no_shares)
    assert lines[0].startswith("llama-tiny, 16 tokens")
    assert lines[0].endswith("; limit: 600 CPU seconds or 6 GiB")
    # A trace would do for the limits, but C++ ends the process at an exception in some callbacks.
    monkeypatch.setattr(watchdog_module, "BUSY", 1e9)  # other programs may run
    limited = watchdog("llama-tiny", 0.1, lines.append)
    with pytest.raises(UntraceableError, match="took more than"), limited:
        sum(number < 0 for number in count())  # signals reach Python between its steps
    # Should C++ end the process at the exception, the last words are the reason still.
    printed = (
        f"{capsys.readouterr().err}terminate called after throwing an instance of\n  what():  \n"
    )
    assert _last_line(printed) == "the trace ended early: tracing took more than 0.1 CPU seconds"
    monkeypatch.setattr(watchdog_module, "MOST_GIB", 0.0)
    limited = watchdog("llama-tiny", 600.0, lines.append)
    with pytest.raises(UntraceableError, match="of memory"), limited:
        sum(number < 0 for number in count())  # signals reach Python between its steps


def test_a_process_that_gives_up_a_trace_says_why(tmp_path: Path) -> None:
    """Whether Python or C++ ends it."""
    model = find_model("llama-tiny")
    request = TraceRequest(cell=tiny_cell(), model=model)
    # By either limit: other programs may keep the process from a core.
    limits = r"tracing took more than (0\.02 CPU seconds|0\.1 s)"
    with pytest.raises(TraceError, match=limits):
        Traces(tmp_path, limit_seconds=0.02).get(request)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_reports_of_progress_leave_a_trace_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the running frames keeps no tensor alive, however slow the machine is."""
    cell, lines = TraceableCell(tiny_cell(), find_model("llama-tiny")), list[str]()
    undisturbed = cell.trace(2, no_shares).recording
    monkeypatch.setattr(watchdog_module, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(watchdog_module, "FIRST_REPORT_SECONDS", 0.0)
    with watchdog("llama-tiny", 600.0, lines.append):
        disturbed = cell.trace(2, no_shares).recording
    assert any("now in Llama" in line for line in lines)
    for field in fields(Recording):
        assert np.array_equal(getattr(disturbed, field.name), getattr(undisturbed, field.name))


def test_the_host_reads_the_loss_after_the_backward_pass() -> None:
    """It waits for the loss once per step."""
    with FakeTensorMode(), tracer() as traced:
        loss = torch.ones(())
        traced.segment = Segment.UPDATE
        assert float(loss) == 1.0
    kinds = traced.recording(torch.zeros(0).numpy()).kinds
    assert (kinds == Kind.WAITED).sum() == 1


def test_an_optimizer_waits_for_a_norm_and_not_for_its_counter() -> None:
    """PyTorch's Adafactor reads norms from the GPU; the Trainer's, a recipe's, reads nothing."""
    settings = recipe("full", optimizer="adafactor")
    makers: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
        "AdamW": lambda weight: torch.optim.AdamW([weight], foreach=False),
        "Adafactor of PyTorch": lambda weight: torch.optim.Adafactor([weight], foreach=False),
        "adafactor": lambda weight: make_optimizer(nn.Module(), [[weight]], settings, "cuda"),
    }
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(4, 4))
        weight.grad = torch.ones(4, 4)
        waits = {}
        for name, make in makers.items():
            with tracer() as traced:
                traced.segment = Segment.UPDATE
                make(weight).step()
            kinds = traced.recording(np.zeros(0, np.int64)).kinds
            waits[name] = int((kinds == Kind.WAITED).sum())
    assert waits == {"AdamW": 0, "Adafactor of PyTorch": 2, "adafactor": 0}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "settings", [recipe("qlora", precision="bf16", gradient_checkpointing=True), FULL]
)
def test_cached_shape_rules_give_the_same_events(
    settings: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape rule that is called once gives the same events as one called each time."""
    model = find_model("mixtral-tiny")
    cell = TraceableCell(tiny_cell(model.name, settings), model)

    def traced() -> Recording:
        return cell.trace(4, routed_shares(Routing(), model.experts)).recording

    cached = traced()
    monkeypatch.setattr(tracer_module, "key_of", lambda *_: None)
    uncached = traced()
    for field in fields(Recording):
        assert np.array_equal(getattr(cached, field.name), getattr(uncached, field.name)), (
            field.name
        )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_further_trace_of_a_model_calls_few_shape_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the effects of operators on arguments of known shapes from the first one."""
    described = describe
    calls: list[str] = []

    def counted(func: Any, *args: Any) -> Any:
        calls.append(func.name())
        return described(func, *args)

    monkeypatch.setattr(tracer_module, "describe", counted)
    model = find_model("llama-tiny")
    cell = TraceableCell(tiny_cell(model.name, recipe("lora", max_grad_norm=1.0)), model)
    cell.trace(2, no_shares)
    first = len(calls)
    cell.trace(4, no_shares)
    further = calls[first:]
    assert 0 < len(further) < first
    assert not [name for name in further if name.startswith(("aten::_foreach", "aten::_fused"))]


def test_numbers_of_two_types_are_not_taken_for_each_other() -> None:
    """1 and 1.0 are equal, but adding them gives different dtypes."""
    with FakeTensorMode(), tracer():
        whole = torch.ones(3, dtype=torch.int64)
        dtypes = [(whole + number).dtype for number in (1, 1.0, 1, 1.0)]
        assert dtypes == [torch.int64, torch.float32] * 2
        one, other = whole + 1, whole + 1
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_storages_are_recorded_from_creation_to_release() -> None:
    """The operator that returns a storage creates it, views share it, the last view frees it."""
    with FakeTensorMode(), tracer() as traced:
        one = torch.ones(4)
        view = one.view(2, 2)
        del one
        other = view + view
        del view, other
    recording = traced.recording(torch.zeros(0).numpy())
    moves = [
        (Kind(kind).name, name)
        for kind, name in zip(recording.kinds, recording.names, strict=True)
        if kind <= Kind.FREED
    ]
    assert moves == [("MADE", 0), ("MADE", 1), ("FREED", 0), ("FREED", 1)]


def test_fast_results_are_those_of_fake_tensors() -> None:
    """Shapes, strides and dtypes of a layer's forward and backward pass are equal."""

    def metadata(values: list[torch.Tensor]) -> list[tuple[object, ...]]:
        return [(v.shape, v.stride(), v.dtype, v.untyped_storage().nbytes()) for v in values]

    def step(watch: AbstractContextManager[object]) -> list[torch.Tensor]:
        with FakeTensorMode(), watch:
            layer = nn.Linear(6, 4)
            tokens = torch.ones(2, 3, 6, requires_grad=True)
            hidden = nn.functional.silu(layer(tokens).transpose(1, 2))
            parts = torch.cat([hidden, hidden.float().bfloat16().float()], dim=1)[:, 1:]
            rows = parts.reshape(-1, parts.shape[-1]).index_select(0, torch.zeros(2).long())
            loss = (rows.softmax(-1).pow(2).mean(-1, keepdim=True) / 2).sum()
            loss.backward()
            grads = [layer.weight.grad, layer.bias.grad, tokens.grad]
            return [hidden, parts, rows, loss, *(g for g in grads if g is not None)]

    assert metadata(step(tracer())) == metadata(step(nullcontext()))
