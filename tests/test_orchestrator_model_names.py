"""Names that people write for models, and the presets of the same shape."""

from pathlib import Path

import pytest

from orchestrator.model_names import BARE_TAGS, named_model, preset_of, shape_text
from trials.records.model import UnknownModelError, presets


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NousResearch/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Llama-3.2-11B-Vision", None),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("gemma3:12b", "gemma-3-12b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("gpt-oss:120b", "gpt-oss-120b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("allenai/Olmo-3-7B-Think", "olmo-3-7b"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80b-a3b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("microsoft/Phi-4-reasoning-plus", "phi-4"),
        ("microsoft/Phi-4-mini-instruct", None),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("allenai/OLMoE-1B-7B-0924", "olmoe-1b-7b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("llama3.1:8b-instruct-q4_K_M", "llama-3.1-8b"),
        ("Llama 3.1 70B", "llama-3.1-70b"),
        ("qwen2.5:7b", "qwen2.5-7b"),
        ("Qwen-2.5-7B", "qwen2.5-7b"),
        ("TheBloke/Llama-2-13B-GPTQ", "llama-2-13b"),
        ("llama3.1", "llama-3.1-8b"),
        ("llama3.1:latest", "llama-3.1-8b"),
        ("llama3.2", "llama-3.2-3b"),
        ("meta-llama/llama3.1", None),
        ("mistral", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", None),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-24b"),
        ("mistralai/Mistral-Small-3.1-24B-Base-2503", "mistral-small-24b"),
        ("mistral-small3.2", "mistral-small-24b"),
        ("mistral-small3.2:24b-instruct-2506-q4_K_M", "mistral-small-24b"),
    ],
)
def test_a_name_has_the_preset_of_its_architecture(name: str, preset: str | None) -> None:
    """Variants of the weights share it; another vocabulary does not."""
    assert preset_of(name) == preset


def test_a_name_on_the_hub_keeps_its_weights_and_its_tokenizer() -> None:
    """Only the shape is that of the preset; a tag of Ollama is no name on the hub."""
    hub = named_model("meta-llama/Llama-3.1-8B-Instruct")
    assert (hub.name, hub.weights) == ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct")
    assert named_model("llama3.1:8b") == presets()["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("name", "has_tower"),
    [
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", True),
        ("mistral-small3.2", True),
        ("google/gemma-3-4b-it", True),
        ("gemma3", True),
        ("google/gemma-3-1b-it", False),
        ("mistralai/Mistral-Small-24B-Instruct-2501", False),
    ],
)
def test_a_vision_tower_that_a_preset_lacks_is_named(name: str, *, has_tower: bool) -> None:
    """The preset has the language part alone."""
    assert ("vision tower is not counted" in (shape_text(name) or "")) is has_tower


def test_bare_tags_name_presets() -> None:
    """A preset that is renamed would leave its tag without a model."""
    assert set(BARE_TAGS.values()) <= presets().keys()


def test_the_shape_is_named_unless_the_name_is_exact(tmp_path: Path) -> None:
    """A path is never a preset, whatever it is named."""
    assert "llama-3.1-8b" in (shape_text("llama3.1:8b") or "")
    folder = tmp_path / "llama-2-7b-hf"
    folder.mkdir()
    for name in ("llama-3.1-8b", "blackmamba-630m", str(folder), "./llama-2-7b-hf", "no-model"):
        assert shape_text(name) is None
    with pytest.raises(UnknownModelError):
        named_model(str(folder))
