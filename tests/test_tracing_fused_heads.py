"""Simulated heads fused with the loss: buffers of the real ones, at every batch size."""

from typing import Any

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import recipe, tiny_cell
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trials.devices.live_tensors import LiveTensorCounter
from trials.records.model import find_model
from trials.simulation.recording import Column, Kind, TileColumn, tile_bytes
from trials.simulation.trace_cache import StepTrace, joined
from trials.simulation.tracing.kernels.fused_heads import _ChunkedLogProbs
from trials.simulation.tracing.kernels.label_log_probs import simulated_log_probs
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracer import Tracer
from trials.simulation.whole_step import Steps

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def no_experts(_: Tensor) -> int:
    """A dense model routes nothing."""
    raise AssertionError


@pytest.mark.parametrize(
    ("loss", "method"),
    [
        *(("chunked", "lora"), ("liger", "full")),
        *long_cases((("cce", "lora"), ("chunked", "full"), ("liger", "lora"), ("cce", "full"))),
    ],
)
def test_two_batch_sizes_determine_all_others(loss: str, method: str) -> None:
    """Tiles stop to grow, or grow in steps; the sizes are still those of a trace of their own."""
    settings = (
        recipe("full", precision="bf16")
        if method == "full"
        else recipe("lora", precision="bf16-mixed")
    )
    cell = tiny_cell("llama-tiny", settings.model_copy(update={"loss": loss}), seq_len=512)
    traceable = TraceableCell(cell, find_model(cell.model), whole=True)

    def trace(batch_size: int) -> StepTrace:
        traced = traceable.trace(batch_size, no_experts)
        return StepTrace((batch_size,), (traced.recording,), traced.held, traced.copies)

    steps = Steps(joined([trace(2), trace(4)]))
    for batch_size in (3, 20):
        _, expected = Steps(trace(batch_size)).storages(batch_size)
        _, sizes = steps.storages(batch_size)
        assert np.array_equal(sizes, expected)


def test_log_probabilities_of_labels_take_one_gradient_of_the_logits() -> None:
    """TRL's kernel makes four numbers of each token, and a gradient in the logits' dtype."""
    with FakeTensorMode():
        logits = torch.empty(2, 9, 1000, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(2, 8, dtype=torch.int64)
        with LiveTensorCounter([logits, labels], 2**62) as counter:
            held = counter.current_bytes
            log_probs = simulated_log_probs(logits[:, :-1], labels)
            assert counter.peak_bytes - held == 4 * 4 * 2 * 8
            (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    assert (log_probs.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)


def test_only_the_loss_of_transformers_holds_all_logits() -> None:
    """8 examples of 512 tokens have 8 MiB of bf16 logits."""
    logits = 8 * 512 * find_model("llama-tiny").vocab_size * 2
    largest = {}
    for loss in ("full-logits", "cce"):
        cell = tiny_cell("llama-tiny", recipe("lora", precision="bf16", loss=loss), seq_len=512)
        traced = TraceableCell(cell, find_model(cell.model), whole=True).trace(8, no_experts)
        made = traced.recording.kinds == Kind.MADE
        largest[loss] = traced.recording.numbers[made, Column.BYTES].max()
    assert largest["full-logits"] >= logits
    assert largest["cce"] < logits


@pytest.mark.parametrize(
    ("rows", "parts", "most_rows", "expected"),
    [(1000, 0, 4096, 1000), (8000, 0, 4096, 4096), (8000, 32, 0, 256), (5, 2, 0, 4), (1, 4, 0, 1)],
)
def test_rows_of_a_tile_follow_the_rule_of_its_kernel(
    rows: int, parts: int, most_rows: int, expected: int
) -> None:
    """At most so many rows, or the next power of two of a part's rows."""
    numbers = np.zeros((1, len(Column)))
    numbers[0, [*TileColumn]] = (10, rows, parts, most_rows)
    assert tile_bytes(numbers).tolist() == [10 * expected]


@pytest.fixture
def kernels_without_buffers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's function with tiles that allocate nothing, as its Triton kernels and cuBLAS."""
    from trl.kernels import chunked_logprob  # noqa: PLC0415 - seconds to import

    def nothing(*_args: object, **_kwargs: object) -> None:
        pass

    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        monkeypatch.setattr(chunked_logprob, name, nothing)
    return chunked_logprob.ChunkedLogProbFunction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains_head", [False, True])
def test_declared_buffers_of_the_chunked_loss_are_those_of_trl(
    kernels_without_buffers: Any, dtype: torch.dtype, *, trains_head: bool
) -> None:
    """The peak of forward and backward pass, in bytes beyond the arguments."""
    rows, width, vocabulary = 200, 256, 40_000
    shapes = ((rows, width), (vocabulary, width))

    def arguments() -> list[Tensor]:
        hidden, weight = (torch.ones(shape, dtype=dtype) for shape in shapes)
        return [
            hidden.requires_grad_(),
            weight.requires_grad_(trains_head),
            torch.zeros(rows, dtype=torch.int64),
        ]

    hidden, weight, targets = arguments()
    with LiveTensorCounter([hidden, weight, targets], 2**62) as counter:
        outputs = kernels_without_buffers.apply(
            hidden,
            weight,
            None,
            targets,
            1.0,
            32_768,
            None,
            1.0,
            ("log_probs", "entropy", "is_top1"),
        )
        (-outputs[0].sum()).backward()
        del outputs
    held = sum(t.untyped_storage().nbytes() for t in (hidden, weight, targets))

    with FakeTensorMode():
        fake = arguments()
        with (tracer := Tracer(no_experts, fake, with_workspaces=True)):
            simulated = _ChunkedLogProbs.apply(*fake)
            (-simulated[0].sum()).backward()
            del simulated
    recording = tracer.recording(np.array([], np.int64))
    moves = recording.kinds <= Kind.FREED
    made = recording.kinds == Kind.MADE
    sizes = recording.numbers[:, Column.BYTES] + tile_bytes(recording.numbers)
    by_name = dict(zip(recording.names[made], sizes[made], strict=True))
    live = [
        by_name[name] * (1 if kind == Kind.MADE else -1)
        for kind, name in zip(recording.kinds[moves], recording.names[moves], strict=True)
    ]
    assert np.cumsum(live).max() == pytest.approx(counter.peak_bytes - held, rel=0.001)
