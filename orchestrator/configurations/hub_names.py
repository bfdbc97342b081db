"""Names on the hub of models whose architecture a preset has."""

import re

from trials.records.model import presets

VARIANTS = re.compile(r"-(hf|base|instruct|chat|it|2507|v0\.1|bnb-4bit|unsloth)(?=-|$)")
"""Parts of a name that change weights alone."""

SAME_ARCHITECTURE = {
    "meta-llama-3-8b": "llama-3.1-8b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "llama-3-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "hermes-3-llama-3.1-8b": "llama-3.1-8b",
    "qwen3-30b-a3b-thinking": "qwen3-30b-a3b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "qwen3-4b-thinking": "qwen3-4b",
}
"""Models whose layers, shapes and vocabulary are those of a preset of another name."""


def preset_of(hub_name: str) -> str | None:
    """Preset with the architecture of a model on the hub, or None."""
    plain = hub_name.rsplit("/", 1)[-1].lower()
    while (shorter := VARIANTS.sub("", plain)) != plain:
        plain = shorter
    name = SAME_ARCHITECTURE.get(plain, plain)
    return name if name in presets() else None
