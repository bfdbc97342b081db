"""The simulated peak of memory equals that of real steps on the CPU, to the byte."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import recipe, tiny_cell
from torch.utils._python_dispatch import TorchDispatchMode

from trials.devices.live_tensors import LiveTensorCounter
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.model import find_model
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps
from trials.training.finetune import FineTuning
from trials.training.optimizers import construction

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LLAMA, MIXTRAL, BLACKMAMBA = "llama-tiny", "mixtral-tiny", "blackmamba-tiny"
QWEN, OLMOE = "qwen3-moe-tiny", "olmoe-tiny"
BATCH, LENGTH = 3, 24
LOSS_SCALE_BYTES = 8  # made in the first step and kept; a trace makes it in each


@pytest.fixture(autouse=True)
def weights_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that moves no token to another expert: the second step routes as the first."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)


class RoutedTokens(TorchDispatchMode):
    """A hook that records the tokens of each expert in a real step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.nonzero.default:
            self.counts.append(result.shape[0])
        return result


def counted_peak(cell: Cell) -> tuple[int, list[int]]:
    """Peak bytes of two real steps, and the tokens of each expert in order."""
    tuning = FineTuning(cell, find_model(cell.model), device=torch.device("cpu"), seed=0)
    tokens = tuning.tokens(BATCH)
    with RoutedTokens() as routed:
        tuning.step(tokens)
    tuning.start_over()
    with LiveTensorCounter([*tuning.tensors(), tokens], 2**62) as counter:
        for _ in range(2):
            tuning.step(tokens)
    return counter.peak_bytes, routed.counts


def simulated_peak(cell: Cell, counts: list[int]) -> int:
    """Peak bytes of the same two steps, traced with the same tokens per expert."""
    following = iter(counts)
    traced = TraceableCell(cell, find_model(cell.model), target="cpu", whole=True).trace(
        BATCH, lambda _: next(following)
    )
    steps = Steps(StepTrace((BATCH,), (traced.recording,), traced.held, traced.copies))
    _, sizes = steps.storages(BATCH)
    return int(steps.held.sizes.sum() + np.cumsum(sizes).max())


CELLS = [
    (LLAMA, recipe("full")),
    (LLAMA, recipe("lora", precision="bf16", gradient_checkpointing=True)),
    (LLAMA, recipe("lora", lora_dropout=0.1)),
    (LLAMA, recipe("lora", lora_rank=None, oft_block_size=8)),
    (LLAMA, recipe("qlora", precision="bf16-mixed", lora_rank=None, oft_block_size=8)),
    (MIXTRAL, recipe("lora", precision="bf16", lora_rank=None, oft_block_size=32)),
    (LLAMA, recipe("qlora", double_quantisation=False, gradient_checkpointing=True)),
    (LLAMA, recipe("full", precision="bf16", attention="eager")),
    (LLAMA, recipe("full", precision="bf16", optimizer="adafactor")),
    (LLAMA, recipe("full", optimizer="sgd")),
    (LLAMA, recipe("full", optimizer="adamw_8bit")),
    (LLAMA, recipe("full", trained_layers=1, precision="bf16-mixed")),
    (LLAMA, recipe("full", trained_layers=-1, gradient_checkpointing=True)),
    (LLAMA, recipe("lora", optimizer="muon", precision="bf16")),
    (LLAMA, recipe("full", loss="dft", precision="bf16")),
    (LLAMA, recipe("full", loss="eaft", precision="bf16-mixed")),
    (LLAMA, recipe("full", precision="bf16-mixed", max_grad_norm=1.0)),
    (LLAMA, recipe("full", optimizer="adamw_loop")),
    (LLAMA, recipe("qlora", precision="fp32-mixed-load", adapter_dtype="bf16")),
    (LLAMA, recipe("qlora", precision="bf16", kbit_preparation=True)),
    (LLAMA, recipe("qlora", precision="bf16", quantisation="fp4")),
    (LLAMA, recipe("lora", task="reward", loss="full-logits", precision="bf16-mixed")),
    (MIXTRAL, recipe("full")),
    (MIXTRAL, recipe("full", experts="looped", precision="bf16")),
    (OLMOE, recipe("full", gradient_checkpointing=True)),
    (OLMOE, recipe("full", gradient_checkpointing="reentrant")),
    (MIXTRAL, recipe("qlora", quantisation="int8")),
    (LLAMA, recipe("qlora", quantisation="int8", gradient_checkpointing="reentrant")),
    (QWEN, recipe("qlora", experts="grouped", lora_targets=("all-linear",))),
    (MIXTRAL, recipe("qlora", precision="bf16", quantised_experts=True)),
    (OLMOE, recipe("qlora", precision="bf16", quantised_experts=True, quantisation="int8")),
    (BLACKMAMBA, recipe("full")),
    (BLACKMAMBA, recipe("lora", lora_targets=("experts", "router"), gradient_checkpointing=True)),
]

REST = [
    (LLAMA, recipe("full", gradient_checkpointing=True)),
    (LLAMA, recipe("full", precision="bf16-mixed", gradient_checkpointing="reentrant")),
    (BLACKMAMBA, recipe("full", gradient_checkpointing="reentrant")),
    (LLAMA, recipe("qlora", precision="bf16")),
    (LLAMA, recipe("full", optimizer="adafactor")),
    (LLAMA, recipe("full", optimizer="muon")),
    (LLAMA, recipe("lora", loss="eaft", gradient_checkpointing=True)),
    (LLAMA, recipe("lora", precision="bf16", adapter_dtype="fp32")),
    (LLAMA, recipe("lora", precision="bf16-mixed", gradient_checkpointing=True)),
    (LLAMA, recipe("qlora", precision="bf16", quantisation="int8", gradient_checkpointing=True)),
    (LLAMA, recipe("full", task="reward", loss="full-logits", gradient_checkpointing=True)),
    (MIXTRAL, recipe("lora")),
    (MIXTRAL, recipe("qlora", precision="bf16", gradient_checkpointing=True)),
    (QWEN, recipe("qlora")),
    (QWEN, recipe("qlora", quantised_experts=True, gradient_checkpointing=True)),
]
"""Cells that share each of their options with one of those, which every run of the tests counts."""

# The updates of these are compiled, which takes up to a minute.
COMPILED = [
    pytest.param(
        LLAMA,
        recipe("full", optimizer=f"torchao_adamw_{bits}bit"),
        marks=[pytest.mark.long, pytest.mark.filterwarnings("ignore")],
    )
    for bits in (8, 4)
]


@pytest.mark.parametrize(
    ("model", "settings"),
    [*CELLS, *long_cases(REST), *COMPILED],
    ids=lambda each: getattr(each, "key", each),
)
def test_a_simulated_peak_is_the_counted_one_to_the_byte(model: str, settings: Recipe) -> None:
    """This holds for every family and recipe axis at tiny size."""
    cell = tiny_cell(model, settings, seq_len=LENGTH)
    counted, routed = counted_peak(cell)
    assert simulated_peak(cell, routed) == counted


def test_a_simulated_fp16_peak_differs_by_the_loss_scale() -> None:
    """A real run keeps the scale from its first step, a trace makes it anew."""
    cell = tiny_cell(LLAMA, recipe("full", precision="fp16"), seq_len=LENGTH)
    counted, routed = counted_peak(cell)
    assert simulated_peak(cell, routed) - counted == LOSS_SCALE_BYTES
