"""Packages that a training installs."""

import shlex
from importlib import metadata

from orchestrator.spec.trainer_defaults import TRL_VERSION
from trials.recipes.recipe import Recipe

PINNED = ("transformers", "peft", "bitsandbytes")


def install_lines(recipe: Recipe) -> str:
    """Lines of bash that install TRL and its companions, at the versions of this installation."""
    pinned = [f"trl=={TRL_VERSION}.*", *(f"{name}=={metadata.version(name)}" for name in PINNED)]
    needed = {
        "torchao>=0.18": recipe.optimizer.startswith("torchao"),
        "liger-kernel>=0.8.5": recipe.liger_kernels,
    }
    # These compile against the torch that is installed.
    compiled = {
        "flash-attn>=2.8": recipe.attention == "flash_attention_2",
        "mamba-ssm>=2.3.2": recipe.mamba == "mamba-ssm",
        "causal-conv1d>=1.6": recipe.mamba == "mamba-ssm",
    }
    plain = [*pinned, *(name for name, wanted in needed.items() if wanted)]
    late = [name for name, wanted in compiled.items() if wanted]
    lines = [f"pip install {shlex.join(plain)}"]
    if late:
        lines.append(f"pip install --no-build-isolation {shlex.join(late)}")
    return "\n".join(lines)
