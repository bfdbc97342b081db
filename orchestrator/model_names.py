"""Names that people use for models whose architecture a preset has."""

import re
from pathlib import Path

from trials.records.model import Model, find_model, presets

VARIANTS = re.compile(
    r"-(hf|base|instruct|chat|it|pt|think|thinking|reasoning|v0\.1|bnb-4bit|unsloth"
    r"|0924|1025|1125|2501|2503|2506|2507)(?=-|$)"
)
"""Parts of a name that change weights alone."""
FORMATS = re.compile(r"-(q\d+(-\w+)*|f?p?16|gguf|awq|gptq|latest)$")
"""Formats of weights at the end of a name, as in Ollama's tags."""
MAKERS = re.compile(r"^(meta-llama|llama|qwen|mistral|gemma|phi|olmo)-?(?=\d)")
JOINED = {
    **{maker: f"{maker}-" for maker in ("llama", "mistral", "gemma", "phi", "olmo")},
    "meta-llama": "llama-",
    "qwen": "qwen",
}
"""Makers' names directly before a version."""
SAME_ARCHITECTURE = {
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "hermes-3-llama-3.1-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "hermes-3-llama-3.1-8b": "llama-3.1-8b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
    "mistral-small": "mistral-small-24b",
    "mistral-small-3-24b": "mistral-small-24b",
    "magistral-small": "mistral-small-24b",
    "phi-4-plus": "phi-4",
    "phi-4-14b": "phi-4",
}
"""Models whose layers, shapes and vocabulary are those of a preset of another name."""


def preset_of(name: str) -> str | None:
    """Preset with the architecture of a model, by its name on the hub or its tag of Ollama."""
    plain = re.sub(r"[:_\s]+", "-", name.strip().rsplit("/", 1)[-1].lower())
    plain = MAKERS.sub(lambda maker: JOINED[maker[1]], FORMATS.sub("", plain))
    while (shorter := VARIANTS.sub("", plain)) != plain:
        plain = shorter
    preset = SAME_ARCHITECTURE.get(plain, plain)
    return preset if preset in presets() else None


def named_model(name: str, *, reads_images: bool = False) -> Model:
    """Find a model by a name as people write it, or as ``find_model`` does.

    A name on the hub stays that of the weights and of the tokenizer. Presets read text alone.

    Raises:
        UnknownModelError: there is no such model.
    """
    preset = None if reads_images else _shape_of(name)
    if preset is None:
        return find_model(name, reads_images=reads_images)
    model = presets()[preset]
    return model.model_copy(update={"weights": name}) if "/" in name else model


def shape_text(name: str) -> str | None:
    """Line that names the preset whose shape a model has; None where the name is exact."""
    preset = _shape_of(name)
    return None if preset is None else f"{name}: its shape is that of the preset {preset}"


def _shape_of(name: str) -> str | None:
    exact = {n for preset in presets().values() for n in (preset.name, *preset.aliases)}
    is_path = name.endswith(".json") or name.startswith((".", "/", "~")) or Path(name).is_dir()
    return None if name in exact or is_path else preset_of(name)
