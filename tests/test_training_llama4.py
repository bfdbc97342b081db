"""Llama 4: experts that multiply all tokens, traced as its class computes them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.image_steps import BATCH, LENGTH, cell_of, counted_peak, peak_of, traced_peak
from builders.long_cases import long_cases
from builders.observations import cpu, recipe
from builders.vision import DECODER, LLAMA4, SCOUT, tiny_vision
from transformers import AutoConfig, Llama4ForCausalLM, Llama4ForConditionalGeneration

import orchestrator
from gpu_catalog.errors import UserError
from orchestrator.cli.main import main
from orchestrator.spec.trainer_defaults import fields_of_model
from trials.models.build import stock_model
from trials.models.parameter_count import implied_parameters
from trials.recipes.recipe import Recipe
from trials.records.compatibility import impossible_on_model, with_defaults
from trials.simulation.recording import Column, Kind, OperatorClass
from trials.simulation.trace_request import TraceRequest, approximations
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracing_worker import Tracing
from trials.training.finetune import FineTuning
from trials.training.optimizers import construction
from trials.training.profiling.profiler import expert_load

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TEXT: dict[str, Any] = LLAMA4["text_config"]
INTERLEAVED = TEXT | {"interleave_moe_layer_step": 2, "use_qk_norm": False}
"""As Maverick: every second layer has experts."""
CHECKPOINTED = recipe("lora", precision="bf16", gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (TEXT, CHECKPOINTED),
        (INTERLEAVED, recipe("full", precision="bf16-mixed")),
        *long_cases(
            (
                (TEXT, recipe("lora", precision="bf16-mixed", attention="eager")),
                (TEXT, recipe("lora", precision="bf16", lora_targets=("attention", "experts"))),
                (TEXT, recipe("qlora", precision="bf16", quantised_experts=True)),
                (TEXT, recipe("full")),
                (TEXT, recipe("qlora", precision="bf16")),
                (TEXT | {"attention_chunk_size": 8192}, CHECKPOINTED),
                (LLAMA4, recipe("qlora", precision="bf16-mixed", kbit_preparation=True)),
                (LLAMA4, recipe("lora", precision="bf16", lora_targets=("q_proj", "down_proj"))),
            )
        ),
    ],
    ids=lambda part: part.key if isinstance(part, Recipe) else part["model_type"],
)
def test_a_traced_peak_is_that_of_real_steps(
    config: dict[str, Any], settings: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: under chunks of attention, without rotary positions, with a shared expert."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    cell = cell_of(config, settings)
    assert cell.recipe.experts == "all-tokens"
    assert traced_peak(config, cell) == counted_peak(config, cell)


def test_few_layers_determine_a_step_of_text() -> None:
    """Layers with and without rotary positions are a turn; one of four turns is left out."""
    cell = cell_of(TEXT, CHECKPOINTED)
    traced = Tracing().trace(TraceRequest(cell=cell, model=tiny_vision(TEXT), target="cpu"))
    assert traced.copies == 1
    assert peak_of(traced) == traced_peak(TEXT, cell)


def test_products_of_experts_are_those_of_all_of_them() -> None:
    """FLOPs grow with the experts of a layer, though each token is routed to one."""

    def flops(experts: int) -> float:
        config = TEXT | {"num_local_experts": experts}
        cell = cell_of(config, recipe("full", precision="bf16"))
        step = TraceableCell(cell, tiny_vision(config), whole=True)
        recorded = step.trace(BATCH, lambda mask: mask.numel()).recording
        is_product = recorded.names // 4 == OperatorClass.MATRIX_PRODUCT
        runs = recorded.numbers[(recorded.kinds == Kind.RUN) & is_product]
        return float(runs[:, Column.FLOPS].sum())

    hidden, width, layers = DECODER["hidden_size"], DECODER["intermediate_size"], 8
    of_one = 3 * 3 * 2 * BATCH * LENGTH * hidden * width  # three matrices, forward and twice back
    of_router = 3 * 2 * BATCH * LENGTH * hidden
    assert flops(8) - flops(4) == 4 * layers * (of_one + of_router)


def test_only_linear_layers_are_quantised() -> None:
    """Fused experts and the router stay in 16 bits, as bitsandbytes' integration leaves them."""
    cell = cell_of(TEXT, recipe("qlora", precision="bf16"))
    stock = stock_model(tiny_vision(TEXT), cell.recipe, None)
    counts = implied_parameters(stock, cell.recipe)
    linear = [m for m in stock.modules() if type(m) is torch.nn.Linear]
    kept = stock.get_output_embeddings()  # type: ignore[operator]
    assert counts.four_bit == sum(m.weight.numel() for m in linear if m is not kept)


def test_the_class_has_no_other_implementation() -> None:
    """Its own way is taken where none is asked for; no other model has it."""
    for kind in (Llama4ForCausalLM, Llama4ForConditionalGeneration):
        assert not kind._can_set_experts_implementation()
    for settings in (recipe("full"), recipe("qlora"), recipe("lora", lora_targets=("experts",))):
        filled = with_defaults(settings, tiny_vision(TEXT), cpu())
        assert filled.experts == "all-tokens"
    assert with_defaults(recipe("lora"), tiny_vision(TEXT), cpu()).lora_targets == ("attention",)
    mixtral = tiny_vision(
        DECODER | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    reason = impossible_on_model(recipe("full", experts="all-tokens"), mixtral)
    assert reason is not None
    assert reason.startswith("experts all-tokens: mixtral (mixtral) has no such implementation")


def test_a_trainers_file_leaves_experts_to_the_class() -> None:
    """Its fused experts are those of the class; an option of the command line is refused."""
    settings = recipe("lora", experts="grouped", lora_targets=("q_proj",), loss="chunked")
    model = tiny_vision(TEXT)
    filled = fields_of_model(settings, model, {"experts"}, is_of_file=True)
    assert filled == {"experts": "all-tokens", "loss": "full-logits"}
    assert fields_of_model(settings, model, {"experts", "loss"}, is_of_file=False) == {}
    assert impossible_on_model(settings, model) is not None


def test_experts_that_multiply_all_tokens_have_no_load() -> None:
    """A profile counts the tokens routed to each expert; here every expert has all of them."""
    cell = cell_of(TEXT, recipe("lora"))
    tuning = FineTuning(cell, tiny_vision(TEXT), device=torch.device("cpu"), seed=0)
    assert expert_load(tuning, tuning.tokens(1, 0), 1) is None


@pytest.mark.parametrize(("length", "is_masked"), [(15, False), (16, True)])
def test_a_mask_of_chunks_is_an_approximation_from_the_length_of_one(
    length: int, *, is_masked: bool
) -> None:
    """The kernel that takes a mask is traced by what it declares."""
    cell = cell_of(TEXT, CHECKPOINTED).model_copy(update={"seq_len": length})
    lines = approximations(cell, tiny_vision(TEXT), cpu())
    assert any("with a mask" in line for line in lines) is is_masked


def test_scout_has_the_published_number_of_parameters() -> None:
    """109 billion, 17 of the language part's active for a token (Meta's model card)."""
    with torch.device("meta"):
        scout = Llama4ForConditionalGeneration(AutoConfig.for_model(**SCOUT))
    counts = {name: parameter.numel() for name, parameter in scout.named_parameters()}
    assert round(sum(counts.values()) / 1e9) == 109
    language = sum(c for n, c in counts.items() if n.startswith("language_model"))
    experts = sum(c for n, c in counts.items() if ".experts." in n)
    assert round((language - experts * 15 / 16) / 1e9) == 17


def written(folder: Path, config: dict[str, Any]) -> str:
    """A config.json of a model."""
    path = folder / f"{config['model_type']}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"experts": "grouped"}, "experts grouped: transformers has one implementation"),
        ({"experts": "looped"}, "experts looped: transformers has one implementation"),
        ({"lora_targets": "router"}, "lora_targets router: Llama4Router cannot carry an adapter"),
        ({"lora_targets": "all-linear"}, "PEFT adapts router, too, .* and the step fails"),
        ({"loss": "chunked"}, "logits without the hidden states .*and TRL's trainer fails: use"),
        ({"loss": "liger"}, "logits without the hidden states .*and that is not simulated: use"),
        ({"attention": "flash_attention_2"}, "flash_attention_2: .*use eager or sdpa"),
    ],
)
def test_what_its_class_cannot_have_is_refused(
    options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    """One line each, with the alternative."""
    given = {"seq_len": 16, "gpu": "A40", "method": "lora", "batch_size": 1} | options
    given["gradient_checkpointing"] = "off"
    try:
        (refusal,) = orchestrator.estimate(written(tmp_path, TEXT), **given).skipped
    except UserError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert re.search(line, refusal)


@pytest.mark.long
def test_the_answer_says_how_experts_and_loss_are_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default the loss is that of transformers' Trainer, since TRL's fails on the class."""
    options = ["--model-config", written(tmp_path, LLAMA4), "--gpu", "A40", "--seq-len", "16"]
    assert main(["estimate", *options, "--image-tokens", "4", "--method", "qlora"]) == 0
    text = capsys.readouterr().out
    assert "a step takes the time and the activations of 4 experts for each token" in text
    assert "SFTTrainer fails on this class" in text
    assert "Experts are not quantised" in text
