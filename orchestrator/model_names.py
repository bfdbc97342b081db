"""Names that people use for models whose architecture a preset has."""

import re
from pathlib import Path

from trials.records.model import Model, find_model, presets

VARIANTS = re.compile(
    r"-(hf|base|instruct|chat|it|pt|think|thinking|reasoning|v0\.1|bnb-4bit|unsloth"
    r"|0924|1025|1125|2407|2501|2503|2506|2507)(?=-|$)"
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
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{
        f"qwen2.5-coder-{size}": f"qwen2.5-{size}"
        for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
    },
    **{f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("7b", "14b", "32b")},
    "qwq-32b": "qwen2.5-32b",
    "mistral-nemo": "mistral-nemo-12b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
    "mistral-small": "mistral-small-24b",
    "mistral-small-3-24b": "mistral-small-24b",
    "mistral-small-3.1-24b": "mistral-small-24b",
    "mistral-small3.1-24b": "mistral-small-24b",
    "mistral-small-3.2-24b": "mistral-small-24b",
    "mistral-small3.2-24b": "mistral-small-24b",
    "magistral-small": "mistral-small-24b",
    "phi-4-plus": "phi-4",
    "phi-4-14b": "phi-4",
}
"""Models whose layers, shapes and vocabulary are those of a preset of another name."""
BARE_TAGS = {
    "gemma3": "gemma-3-4b",
    "gpt-oss": "gpt-oss-20b",
    "llama2": "llama-2-7b",
    "llama3": "llama-3.1-8b",
    "llama3.1": "llama-3.1-8b",
    "llama3.2": "llama-3.2-3b",
    "llama3.3": "llama-3.1-70b",
    "mistral": "mistral-7b-v0.3",
    "mistral-small3.1": "mistral-small-24b",
    "mistral-small3.2": "mistral-small-24b",
    "mixtral": "mixtral-8x7b",
    "qwen2.5": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
}
"""Tags of Ollama without a size, which stand for one of the sizes; ``:latest`` is the same."""
WITH_TOWER = re.compile(r"gemma-3-(4|12|27)b|gemma-4-31b|mistral-small-?3\.[12](-24b)?")
"""Models whose language part alone is that of a preset: they have a vision tower beside it."""


def preset_of(name: str) -> str | None:
    """Preset with the architecture of a model, by its name on the hub or its tag of Ollama."""
    plain = _plain(name)
    preset = BARE_TAGS.get(_bare(name)) or SAME_ARCHITECTURE.get(plain, plain)
    return preset if preset in presets() else None


def _plain(name: str) -> str:
    """A name without its owner, format and variant, in the spelling of presets."""
    plain = re.sub(r"[:_\s]+", "-", name.strip().rsplit("/", 1)[-1].lower())
    plain = MAKERS.sub(lambda maker: JOINED[maker[1]], FORMATS.sub("", plain))
    while (shorter := VARIANTS.sub("", plain)) != plain:
        plain = shorter
    return plain


def _bare(name: str) -> str:
    return name.strip().removesuffix(":latest")


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
    if preset is None:
        return None
    if any(WITH_TOWER.fullmatch(text) for text in (_plain(name), _bare(name), preset)):
        return (
            f"{name}: the shape of its language part is that of the preset {preset}; the memory of "
            "its vision tower is not counted"
        )
    return f"{name}: its shape is that of the preset {preset}"


def _shape_of(name: str) -> str | None:
    exact = {n for preset in presets().values() for n in (preset.name, *preset.aliases)}
    is_path = name.endswith(".json") or name.startswith((".", "/", "~")) or Path(name).is_dir()
    return None if name in exact or is_path else preset_of(name)
