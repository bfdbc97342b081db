"""Activations that TRL's context manager moves to the host under the trace."""

import numpy as np
import pytest
from builders.observations import recipe, tiny_cell
from torch import Tensor

from gpu_catalog.catalog import load_catalog
from trials.records.model import Model, find_model
from trials.simulation.recording import OperatorClass
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.trace_cache import StepTrace, Traces
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps

A100 = load_catalog().gpu("A100-80GB-SXM")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def no_experts(_: Tensor) -> int:
    """A dense model routes nothing."""
    raise AssertionError


def deep_llama() -> Model:
    """A tiny model with layers enough to repeat."""
    facts = find_model("llama-tiny")
    return facts.model_copy(update={"config": facts.config | {"num_hidden_layers": 20}})


def traced(*, offloads: bool) -> Steps:
    """Steps of a deep tiny model."""
    settings = recipe(
        "full",
        precision="bf16",
        activation_offloading=offloads,
    )
    cell = tiny_cell("llama-tiny", settings, seq_len=64)
    step = TraceableCell(cell, deep_llama(), whole=True).trace(2, no_experts)
    return Steps(StepTrace((2,), (step.recording,), step.held, step.copies))


def test_every_layer_is_traced() -> None:
    """An activation may leave the GPU several layers after its own, so no layer stands for all."""
    settings = recipe("lora", activation_offloading=True)
    cell = tiny_cell("llama-tiny", settings, seq_len=16)
    assert TraceableCell(cell, deep_llama()).repeated_layers.copies == 0


def test_offloading_frees_memory_and_takes_time() -> None:
    """Without checkpoints nearly all of what the layers save leaves the GPU."""
    kept, moved = (traced(offloads=offloads) for offloads in (False, True))
    assert moved.peak_bytes(2) < 0.9 * kept.peak_bytes(2)
    assert not np.isin(kept.operators(2).names, [4 * OperatorClass.HOST_COPY]).any()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_short_sequences_have_one_structure_at_all_traced_batch_sizes(method: str) -> None:
    """TRL leaves small tensors on the GPU: a few tokens are traced in batches large enough."""
    settings = recipe(method, precision="bf16-mixed", activation_offloading=True)
    cell, model = tiny_cell("llama-tiny", settings, seq_len=16), find_model("llama-tiny")
    small, large = TraceRequest(cell=cell, model=model).batch_sizes
    traceable = TraceableCell(cell, model, whole=True)
    first = traceable.trace(small, no_experts).recording
    second = traceable.trace(large, no_experts, first).recording
    assert len(second.kinds) == len(first.kinds)


class StoredTrace(Traces):
    """Traces with one trace."""

    def get(self, request: TraceRequest) -> StepTrace:
        """Trace of the request, made here."""
        step = TraceableCell(request.cell, request.model, whole=True).trace(2, no_experts)
        return StepTrace((2,), (step.recording,), step.held, step.copies)


def test_blocks_of_both_streams_are_reserved_apart() -> None:
    """Reserved memory includes the blocks that only the stream of copies can reuse."""
    settings = recipe("full", precision="bf16", activation_offloading=True)
    simulated = SimulatedCell(
        tiny_cell("llama-tiny", settings, seq_len=64), find_model("llama-tiny"), StoredTrace()
    )
    peaks = simulated.without_limit(2, A100)
    assert peaks.peak_reserved_bytes >= peaks.peak_allocated_bytes
    reserved = peaks.peak_reserved_bytes
    assert simulated.memory(2, A100, reserved).retries == 0
    assert simulated.memory(2, A100, reserved - 2 * 2**20).retries > 0
