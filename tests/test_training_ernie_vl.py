"""ERNIE-4.5-VL: tokens of text and of images go to experts of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.image_steps import (
    BATCH,
    IMAGES,
    LENGTH,
    cell_of,
    counted_peak,
    peak_of,
    traced_peak,
)
from builders.long_cases import long_cases
from builders.observations import recipe
from builders.vision import DECODER, ERNIE, TOKENS_PER_IMAGE, of_few_layers, tiny_vision

import orchestrator
from trials.models.build import stock_model
from trials.recipes.recipe import Recipe
from trials.records.compatibility import impossible_on_model
from trials.simulation.recording import Column, Kind
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracing_worker import Tracing
from trials.training.optimizers import construction
from trials.training.tasks.images import MARKS, ROUTED, image_inputs, routed_tokens

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
CHECKPOINTED = recipe("lora", precision="bf16", gradient_checkpointing=True, experts="grouped")
TEXT: dict[str, Any] = ERNIE["text_config"]
IMAGE_TOKENS = IMAGES * TOKENS_PER_IMAGE["ernie4_5_vl_moe"]


@pytest.mark.parametrize(
    ("image_tokens", "settings", "most"),
    [
        (36, CHECKPOINTED, 40),
        *long_cases(
            (
                *((tokens, CHECKPOINTED, 40) for tokens in (4, 20)),
                (12, recipe("full", precision="bf16-mixed", gradient_checkpointing=True), 302),
            )
        ),
    ],
)
def test_a_traced_peak_is_that_of_real_steps_with_few_or_many_images(
    image_tokens: int, settings: Recipe, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and bounds are missing, as of other images of any size."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    cell = cell_of(ERNIE, settings).model_copy(update={"image_tokens": image_tokens})
    shallow = of_few_layers(ERNIE)
    missed = counted_peak(shallow, cell) - traced_peak(shallow, cell)
    assert 0 <= missed <= most * BATCH


@pytest.mark.long
def test_few_layers_and_batch_sizes_determine_a_step() -> None:
    """The first layer has no experts; one of five others is left out."""
    cell = cell_of(ERNIE, CHECKPOINTED)
    request = TraceRequest(cell=cell, model=tiny_vision(ERNIE), target="cpu")
    traced = Tracing().trace(request)
    assert traced.copies == 2
    assert peak_of(traced) == traced_peak(ERNIE, cell)


def flops(widths: list[int]) -> float:
    """FLOPs of a step on a GPU whose experts have these widths, of text and of images."""
    config = ERNIE | {"text_config": TEXT | {"moe_intermediate_size": widths}}
    cell = cell_of(config, recipe("full", precision="bf16"))
    step = TraceableCell(cell, tiny_vision(config), whole=True)
    recorded = step.trace(BATCH, lambda mask: mask.numel()).recording
    return float(recorded.numbers[recorded.kinds == Kind.RUN][:, Column.FLOPS].sum())


def test_tokens_of_images_go_to_their_own_experts() -> None:
    """With those around them; each token goes to two experts of three matrices."""
    layers, active = DECODER["num_hidden_layers"] - 1, TEXT["moe_k"]
    of_token = 3 * active * 3 * 2 * DECODER["hidden_size"] * 16 * layers * BATCH
    routed = IMAGE_TOKENS + MARKS
    assert flops([32, 32]) - flops([32, 16]) == of_token * routed


def test_some_token_is_always_of_text() -> None:
    """The kinds by which a step routes have those of images first."""
    assert [routed_tokens(12, length) for length in (40, 14, 13)] == [14, 13, 12]
    model = stock_model(tiny_vision(ERNIE), cell_of(ERNIE, recipe("full")).recipe, None)
    inputs = image_inputs(model, torch.zeros(BATCH, LENGTH, dtype=torch.int64), 12, 1)
    assert inputs[ROUTED].sum(1).tolist() == [14] * BATCH


@pytest.mark.long
def test_quantised_towers_are_refused(tmp_path: Path) -> None:
    """Its first matrix, whose dtype pixels get, would be quantised, too."""
    reason = impossible_on_model(recipe("qlora"), tiny_vision(ERNIE))
    assert reason is not None
    assert "its tower casts pixels to the dtype of its first matrix" in reason
    settings = recipe("qlora", precision="bf16", experts="grouped", lora_targets=("attention",))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        counted_peak(ERNIE, cell_of(ERNIE, settings))
    path = tmp_path / "ernie.json"
    path.write_text(json.dumps(ERNIE), encoding="utf-8")
    given = {"seq_len": 16, "gpu": "A40", "image_tokens": 4}
    (refusal,) = orchestrator.estimate(str(path), method="qlora", **given).skipped
    assert reason.partition(" with ")[0] in refusal
    (answer,) = orchestrator.estimate(str(path), method="lora", **given).estimated
    assert answer.estimate.image_tokens == 4
