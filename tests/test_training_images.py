"""Vision-language models: a trace equals a real step, and the tower is frozen."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.image_steps import BATCH, cell_of, counted_peak, peak_of, traced_peak
from builders.long_cases import long_cases
from builders.observations import recipe
from builders.vision import (
    AYA,
    COHERE,
    DECODER,
    DEEPSEEK,
    ERNIE,
    EXAONE,
    GEMMA,
    GEMMA4,
    GLM,
    GLM46,
    GLM_MOE,
    HYBRID,
    IDEFICS3,
    JANUS,
    LFM2,
    LLAMA4,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_NEXT_VIDEO,
    LLAVA_PIXTRAL,
    MISTRAL3,
    MLLAMA,
    ONEVISION,
    PADDLE,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN25,
    QWEN35,
    QWEN35_MOE,
    SMOL,
    TOWER,
    any_size,
    of_few_layers,
    tiny_vision,
)
from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

import orchestrator
from gpu_catalog.errors import UserError
from orchestrator.cli.main import main
from trials.models.build import FamilyError, stock_model
from trials.models.weight_placement import READS_IMAGES, quantise_laid_out
from trials.recipes.recipe import Recipe
from trials.records.compatibility import PADDED_FAMILIES, impossible_on_model
from trials.records.model import UnknownModelError, find_model
from trials.simulation.recording import Column, Kind, OperatorClass
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracing_worker import Tracing
from trials.training.finetune import FineTuning, implied_counts
from trials.training.optimizers import construction

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
CHECKPOINTED = recipe("lora", precision="bf16", gradient_checkpointing=True)
CHUNKED = recipe("qlora", precision="bf16", loss="chunked")
EAGER = recipe("lora", attention="eager")
FULL, MIXED = recipe("full"), recipe("full", precision="bf16-mixed")
QUICK = [
    (GEMMA, CHUNKED),
    (GEMMA4, MIXED),
    (LLAVA, recipe("qlora", precision="bf16-mixed", kbit_preparation=True)),
    (LLAVA_PIXTRAL, CHECKPOINTED),
    (MISTRAL3, FULL),
]
"""Some models of images of one size, each with one of the recipes."""
REST = [
    *((config, CHECKPOINTED) for config in (AYA, COHERE, JANUS, LLAVA_NEXT_VIDEO)),
    *((config, CHUNKED) for config in (DEEPSEEK, IDEFICS3)),
    *((config, FULL) for config in (HYBRID, LFM2, MLLAMA, SMOL)),
    (ONEVISION, MIXED),
    (LLAMA4, recipe("qlora", precision="bf16")),
    (LLAVA_NEXT, EAGER),
    *((config, CHECKPOINTED) for config in (DEEPSEEK, GEMMA, GEMMA4, HYBRID, LFM2, LLAVA_NEXT)),
    *((config, CHECKPOINTED) for config in (LLAMA4, MISTRAL3, MLLAMA, SMOL)),
    *((config, CHUNKED) for config in (GEMMA4, ONEVISION, MLLAMA)),
    *((config, EAGER) for config in (LLAVA, MISTRAL3)),
    *((config, FULL) for config in (GEMMA, LLAVA_NEXT)),
    (GEMMA, recipe("lora", precision="bf16")),
    (LLAMA4, MIXED),
    (LLAVA, recipe("full", precision="bf16-mixed", gradient_checkpointing=True)),
]
QUICK_OF_ANY_SIZE = [(QWEN25, MIXED), (GLM46, CHECKPOINTED), (QWEN3, CHUNKED)]
REST_OF_ANY_SIZE = [
    *((config, FULL) for config in (QWEN2, QWEN3_MOE, QWEN35_MOE, PADDLE)),
    *((config, MIXED) for config in (ERNIE, GLM_MOE)),
    *((config, CHECKPOINTED) for config in (EXAONE, GLM)),
    (QWEN35, recipe("lora")),
    *((config, CHECKPOINTED) for config in (PADDLE, QWEN25, QWEN3)),
    *((config, FULL) for config in (ERNIE, GLM)),
]
ANY_SIZE = [config for config, _ in (*QUICK_OF_ANY_SIZE, *REST_OF_ANY_SIZE)]
LEFT_OUT_BYTES = 40
"""Bytes of each example that a trace of images of any size leaves out: positions and bounds."""


@pytest.fixture(autouse=True, params=[16])
def most_padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are padded to few tokens, so that the tower has not the peak."""
    for family in PADDED_FAMILIES:
        monkeypatch.setitem(PADDED_FAMILIES, family, request.param)


def key_of(part: object) -> str | None:
    """Name of a parameter of a test."""
    if isinstance(part, Recipe):
        return part.key
    return part["model_type"] if isinstance(part, dict) else None


def missed_bytes(config: dict[str, Any], settings: Recipe) -> int:
    """Bytes of the peak of real steps that a trace leaves out."""
    cell = cell_of(config, settings)
    return counted_peak(config, cell) - traced_peak(config, cell)


def left_out_bytes(config: dict[str, Any]) -> int:
    """Most bytes of positions of images that a trace leaves out."""
    return LEFT_OUT_BYTES * BATCH if config in ANY_SIZE else 0


@pytest.mark.parametrize(("config", "settings"), [*QUICK, *QUICK_OF_ANY_SIZE], ids=key_of)
def test_a_traced_peak_is_that_of_real_steps_with_images(
    config: dict[str, Any], settings: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte with images of one size; with those of any size positions are missing."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    missed = missed_bytes(of_few_layers(config), settings)
    assert 0 <= missed <= left_out_bytes(config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "settings"),
    [*QUICK, *QUICK_OF_ANY_SIZE, *REST, *REST_OF_ANY_SIZE],
    ids=key_of,
)
def test_a_traced_peak_of_more_layers_is_that_of_real_steps_with_images(
    config: dict[str, Any], settings: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each recipe of each model."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    assert 0 <= missed_bytes(config, settings) <= left_out_bytes(config)


@pytest.mark.parametrize(
    ("config", "copies"),
    [
        (QWEN3, 1),
        *long_cases(
            (
                *((MISTRAL3, 3), (GEMMA4, 3), (LFM2, 0), (LLAMA4, 1), (QWEN25, 3), (GEMMA, 3)),
                *((LLAVA, 3), (QWEN35, 1), (GLM, 3), (SMOL, 3), (MLLAMA, 0), (LLAVA_NEXT, 3)),
                *((ONEVISION, 3), (HYBRID, 3), (EXAONE, 3), (PADDLE, 3)),
            )
        ),
    ],
    ids=key_of,
)
def test_few_layers_and_batch_sizes_determine_a_step_with_images(
    config: dict[str, Any], copies: int
) -> None:
    """The expanded trace at batch sizes 2 and 4, for a mask 6, has the whole model's peak at 3."""
    cell = cell_of(config, CHECKPOINTED)
    request = TraceRequest(cell=cell, model=tiny_vision(config), target="cpu")
    traced = Tracing().trace(request)
    assert traced.copies == copies
    assert peak_of(traced) == traced_peak(config, cell)


@pytest.mark.parametrize(("attention", "calls"), [("sdpa", BATCH * 9), ("flash_attention_2", 5)])
def test_attention_of_a_tower_is_that_within_each_window(attention: str, calls: int) -> None:
    """FLOPs of 4 x heads x width x patches squared; sdpa is called for each window or image."""
    cell = cell_of(QWEN25, recipe("lora", precision="bf16", attention=attention))
    step = TraceableCell(cell, tiny_vision(QWEN25), target="cuda", whole=True)
    recorded = step.trace(BATCH, lambda mask: mask.numel()).recording
    is_attention = recorded.names // 4 == OperatorClass.ATTENTION_FORWARD
    # One event for the pieces of one length: two of windows, of whole images, two of windows.
    numbers = recorded.numbers[(recorded.kinds == Kind.RUN) & is_attention][:5]
    windows, image = [16, 16, 8, 8], [48]  # of 6 x 8 patches, by windows of 4 x 4
    squares = sum(patches**2 for patches in (*windows, *image, *windows))
    assert numbers[:, Column.FLOPS].sum() == BATCH * 4 * 48 * squares
    assert numbers[:, Column.LAUNCHES].sum() == calls


@pytest.mark.parametrize(("attention", "share"), [("sdpa", 1.0), ("flash_attention_2", 1 / BATCH)])
def test_pixtrals_tower_attends_to_all_images_but_with_flash_attention(
    attention: str, share: float
) -> None:
    """Its mask has a row and a column for each patch of the batch, three batch sizes a trace."""
    cell = cell_of(MISTRAL3, recipe("lora", precision="bf16", attention=attention))
    step = TraceableCell(cell, tiny_vision(MISTRAL3), target="cuda", whole=True)
    recorded = step.trace(BATCH, lambda mask: mask.numel()).recording
    is_attention = recorded.names // 4 == OperatorClass.ATTENTION_FORWARD
    flops = recorded.numbers[(recorded.kinds == Kind.RUN) & is_attention][0, Column.FLOPS]
    patches = BATCH * 4 * 12  # four times as many as tokens
    assert flops == 4 * 48 * patches**2 * share
    sizes = TraceRequest(cell=cell, model=tiny_vision(MISTRAL3), target="cuda").batch_sizes
    assert sizes == ((2, 4, 6) if attention == "sdpa" else (2, 4))


@pytest.mark.parametrize(
    ("most_padded", "config"),
    [
        (12, LFM2),
        *long_cases(((256, GEMMA4), (6, LFM2), (256, LFM2), (12, GEMMA4), (6, GEMMA4))),
    ],
    ids=lambda part: part["model_type"] if isinstance(part, dict) else part,
    indirect=["most_padded"],
)
def test_padding_of_an_image_is_traced(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tokens two images have none, or one by a processor that pads to as many."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    cell = cell_of(config, CHECKPOINTED)
    assert cell.image_tokens == 12
    assert traced_peak(config, cell) == counted_peak(config, cell)


@pytest.mark.parametrize("config", [GEMMA, LLAVA_NEXT], ids=["gemma3", "llava_next"])
def test_the_tower_is_held_and_not_trained(config: dict[str, Any]) -> None:
    """Parameters are those of transformers' class; neither tower nor projector has adapters."""
    model, facts = tiny_vision(config), dict(config)
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(facts.pop("model_type"), **facts)
        )
    whole = sum(p.numel() for p in theirs.parameters())
    language = [theirs.model.language_model, theirs.lm_head]
    trained = {id(p): p.numel() for part in language for p in part.parameters()}
    full = implied_counts(cell_of(config, recipe("full")), model)
    assert (full.total, full.trainable) == (whole, sum(trained.values()))
    lora = cell_of(config, recipe("lora"))
    adapted = implied_counts(lora, model)
    assert adapted.total - adapted.trainable == whole
    assert FineTuning(lora, model, device=torch.device("cpu"), seed=0).implied() == adapted
    names = {
        name
        for name, part in stock_model(model, lora.recipe, None).named_modules()
        if getattr(part, READS_IMAGES, False)
    }
    assert names == {"model.vision_tower", "model.multi_modal_projector"}


@pytest.mark.parametrize("config", [GEMMA, LLAMA4], ids=["gemma3", "llama4"])
def test_4_bit_layers_are_those_of_transformers_in_the_tower_too(config: dict[str, Any]) -> None:
    """QLoRA's quantisation takes the linear layers that bitsandbytes' integration takes."""
    settings = cell_of(config, recipe("qlora", precision="bf16")).recipe
    theirs, ours = (stock_model(tiny_vision(config), settings, None) for _ in range(2))
    keep = get_keys_to_not_convert(theirs)
    replace_with_bnb_linear(theirs, keep, BitsAndBytesConfig(load_in_4bit=True))
    quantise_laid_out(ours, settings, lambda *_: None, lambda *_: (torch.empty(0), None))
    four_bit = [
        {name for name, part in model.named_modules() if type(part).__name__ == "Linear4bit"}
        for model in (theirs, ours)
    ]
    assert four_bit[0] == four_bit[1]
    assert any("vision" in name for name in four_bit[0])


def written(folder: Path, config: dict[str, Any]) -> str:
    """A config.json of a model."""
    path = folder / f"{config.get('model_type')}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        (GEMMA, {}, r"a gemma3 reads images \(vision_config\), .* give .* --image-tokens N"),
        (GEMMA, {"image_tokens": 16}, "image_tokens 16 leave no text in the 16 tokens"),
        (GEMMA, {"image_tokens": 0}, "image_tokens"),
        (GEMMA, {"image_tokens": 4, "seq_len": "max"}, "--image-tokens with --seq-len max"),
        (GEMMA, {"image_tokens": 4, "task": "dpo"}, "task dpo: not estimated with images"),
        (GEMMA, {"image_tokens": 4, "gpus": 2, "strategy": "fsdp2"}, "fsdp2 of a vision-language"),
        (
            GEMMA | {"audio_config": {}},
            {"image_tokens": 4},
            r"a gemma3 reads more than text and images \(audio_config\)",
        ),
        (QWEN2, {"image_tokens": 4, "attention": "eager"}, "eager is not simulated for images of"),
        (
            any_size("video_llama_3", {"model_type": "qwen2"}, {"num_attention_heads": 3}),
            {"image_tokens": 4},
            r"images of 'video_llama_3' have no one size \(its class takes image_grid_thw\)",
        ),
        (
            DECODER | {"model_type": "git", "vision_config": TOWER},
            {"image_tokens": 4, "attention": "eager"},
            "class of 'git' takes images in another way than as pixels of one size",
        ),
        (GEMMA | {"vision_config": 5}, {"image_tokens": 4}, "its vision_config is 5"),
    ],
)
def test_what_does_not_go_with_images_is_refused_before_a_trace(
    config: dict[str, Any], options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    """One line names the option or the part of the model."""
    given = {"seq_len": 16, "gpu": "A40", "method": "lora"} | options
    try:
        (refusal,) = orchestrator.estimate(written(tmp_path, config), **given).skipped
    except UserError as error:
        refusal = str(error)
    assert re.search(line, refusal)
    assert "\n" not in refusal


@pytest.mark.parametrize("command", ["estimate", "check"])
def test_a_wrong_number_of_image_tokens_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model does not ask for the option, which was given."""
    options = ["--model", written(tmp_path, GEMMA), "--gpu", "A40", "--seq-len", "16"]
    with pytest.raises(SystemExit):
        main([command, *options, "--image-tokens", "0"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --image-tokens: must be at least 1, not 0" in line


def test_a_text_model_has_no_image_tokens() -> None:
    """Neither a preset nor its name on the hub; the line names the way out."""
    with pytest.raises(UserError, match="a llama reads text alone: leave --image-tokens out"):
        orchestrator.estimate("llama-tiny", gpu="A40", seq_len=16, image_tokens=4)


def test_a_vision_language_model_is_not_measured(tmp_path: Path) -> None:
    """What finds a model for real steps refuses it; packed rows have no images."""
    with pytest.raises(UnknownModelError, match="which is only estimated"):
        find_model(written(tmp_path, LLAVA))
    settings = recipe("lora", packing=True, examples_per_row=2)
    reason = impossible_on_model(settings, tiny_vision(LLAVA))
    assert reason is not None
    assert reason.startswith("packing: TRL does not pack examples with images")


def test_a_class_that_transformers_lacks_is_refused_by_name() -> None:
    """One that reads images in another way, too."""
    strange = tiny_vision(GEMMA | {"model_type": "gemma9"})
    cell = cell_of(GEMMA, recipe("lora"))
    with pytest.raises(FamilyError, match=r"transformers [0-9.]+ has no model_type 'gemma9'"):
        stock_model(strange, cell.recipe, None)
    text = tiny_vision(GEMMA | {"model_type": "llama"})
    with pytest.raises(FamilyError, match="has no vision-language model of 'llama'"):
        stock_model(text, cell.recipe, None)


def test_estimate_takes_the_config_of_a_vision_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer has the image tokens and what is approximate; check agrees."""
    options = ["--gpu", "A40", "--seq-len", "16", "--image-tokens", "8", "--method", "lora"]
    options += ["--model-config", written(tmp_path, GEMMA), "--batch-size", "2", "--json"]
    assert main(["estimate", *options, "--gradient-checkpointing", "off"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["image_tokens"] == 8
    assert "images" in row["not_compared"]
    assert any("8 tokens of each example come from images" in t for t in row["approximations"])
    assert main(["check", *options, "--gradient-checkpointing", "off"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_gib"] == row["peak_gib"]
    assert main(["estimate", *options, "--export", "x.yaml", "--to", "skypilot"]) == 1
    assert "--export: a training with images is not exported" in capsys.readouterr().err
