"""The load-balancing loss of routers: part of the step, checked, and traced."""

from typing import Any

import pytest
import torch
from builders.families import refusal_of, tiny_model
from builders.image_steps import cell_of, counted_peak, traced_peak
from builders.observations import cpu, recipe, tiny_cell
from builders.vision import QWEN3_MOE, QWEN35_MOE, of_few_layers, tiny_vision
from transformers import CONFIG_MAPPING

from trials.records.compatibility import ROUTER_LOSS_FAMILIES, has_router_loss, with_defaults
from trials.records.model import find_model
from trials.training.finetune import FineTuning
from trials.training.optimizers import construction
from trials.training.recipe_check import departures

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of families about their configurations
]
MODEL = find_model("mixtral-tiny")
OF_IMAGES = {config["model_type"]: tiny_vision(config) for config in (QWEN3_MOE, QWEN35_MOE)}
LEFT_OUT_BYTES = 120
ADAPTED = {"lora_targets": ("experts", "router"), "gradient_checkpointing": True}


def tuning(*, router_loss: bool, active: int = 2) -> FineTuning:
    """Adapters on looped experts and their routers."""
    settings = with_defaults(recipe("lora", router_loss=router_loss, **ADAPTED), MODEL, cpu())
    cell = tiny_cell(MODEL.name, settings, active=active, seq_len=8)
    return FineTuning(cell, MODEL, device=torch.device("cpu"), seed=0)


def test_a_step_without_the_loss_does_not_pass_for_one_with_it() -> None:
    """The model must have computed it in a pass with gradients."""
    has, lacks = tuning(router_loss=True), tuning(router_loss=False)
    wanted = with_defaults(recipe("lora", router_loss=True, **ADAPTED), MODEL, cpu())
    assert departures(wanted, has.built(), has.implied()) == []
    (line,) = departures(wanted, lacks.built(), lacks.implied())
    assert "load-balancing" in line


def test_the_loss_counts_the_experts_that_the_cell_activates() -> None:
    """With balanced routing it is the number of active experts, times the coefficient."""
    coefficient = CONFIG_MAPPING["mixtral"]().router_aux_loss_coef
    for active in (2, 8):
        has, lacks = (tuning(router_loss=on, active=active) for on in (True, False))
        tokens = has.tokens(2)
        added = has.step(tokens) - lacks.step(tokens)
        assert added == pytest.approx(coefficient * active, rel=0.2)


@pytest.mark.parametrize("family", ROUTER_LOSS_FAMILIES)
def test_trl_adds_the_loss_for_the_listed_families(family: str) -> None:
    """Its condition is both fields; its fused head reads the number of experts, too."""
    config = CONFIG_MAPPING[family]().get_text_config()
    assert config.output_router_logits is False
    assert config.router_aux_loss_coef > 0
    assert config.num_experts > 1


@pytest.mark.long
@pytest.mark.parametrize("loss", ["full-logits", "chunked"])
@pytest.mark.parametrize("family", ROUTER_LOSS_FAMILIES)
def test_the_listed_families_are_traced_with_the_loss(family: str, loss: str) -> None:
    """The trace checks that it took hold."""
    model = OF_IMAGES.get(family) or tiny_model(family)
    assert model is not None
    assert refusal_of(model, recipe("full", precision="bf16", loss=loss, router_loss=True)) is None


@pytest.mark.parametrize("loss", ["full-logits", "chunked"])
@pytest.mark.parametrize("config", [QWEN3_MOE, QWEN35_MOE], ids=lambda each: each["model_type"])
def test_the_loss_of_a_model_with_images_takes_the_memory_of_real_steps(
    config: dict[str, Any], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL decides by the language part; a trace of images of any size lacks a few bytes."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    cell = cell_of(config, recipe("full", loss=loss, router_loss="auto"))
    assert cell.recipe.router_loss is True
    shallow = of_few_layers(config)
    missed = counted_peak(shallow, cell) - traced_peak(shallow, cell)
    assert 0 <= missed <= LEFT_OUT_BYTES


def test_a_coefficient_of_zero_in_the_language_part_is_no_loss() -> None:
    """The configuration of a model with images has it there."""
    text = QWEN3_MOE["text_config"] | {"router_aux_loss_coef": 0}
    assert has_router_loss(tiny_vision(QWEN3_MOE))
    assert not has_router_loss(tiny_vision(QWEN3_MOE | {"text_config": text}))
