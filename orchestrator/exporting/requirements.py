"""Packages that a training installs."""

import shlex
from importlib import metadata

from orchestrator.exporting.deepspeed_file import PACKAGE
from orchestrator.exporting.training import TrainingJob
from orchestrator.spec.trainer_defaults import TRL_VERSION

PINNED = ("transformers", "peft", "bitsandbytes")


def install_lines(training: TrainingJob) -> str:
    """Lines of bash that install the trainer, and what the recipe and the layout need."""
    configuration = training.configuration
    if configuration is None or configuration.trainer == "TRL":
        return _trl_lines(training)
    recipe, version = training.recipe, f"{configuration.version}.*"
    uses_flash = recipe.attention == "flash_attention_2"
    if configuration.trainer == "axolotl":
        wanted = {"flash-attn": uses_flash, "deepspeed": training.is_by_deepspeed}
        extras = ",".join(name for name, applies in wanted.items() if applies)
        name = f"axolotl{f'[{extras}]' if extras else ''}=={version}"
        return _pip(["packaging", "setuptools", "wheel", "ninja", "torch>=2.11"], [name])
    needed = {
        "bitsandbytes": recipe.method == "qlora" or "8bit" in recipe.optimizer,
        "liger-kernel": recipe.liger_kernels or recipe.loss == "liger",
        PACKAGE: training.is_by_deepspeed,
    }
    names = [f"llamafactory=={version}", *(name for name, wanted in needed.items() if wanted)]
    return _pip(names, ["flash-attn>=2.8"] if uses_flash else [])


def needs_compiler(training: TrainingJob) -> bool:
    """Whether CUDA's compiler must be where a training runs.

    DeepSpeed before 0.19 asks for it when it is imported, and axolotl 0.19 takes no newer one. Its
    AdamW on the CPU is compiled where it runs, with CUDA's headers.
    """
    if training.zero is None:
        return False
    configuration = training.configuration
    is_axolotl = configuration is not None and configuration.trainer == "axolotl"
    return is_axolotl or training.zero.updates_on_host


def _trl_lines(training: TrainingJob) -> str:
    """Lines that install TRL and its companions, at the versions of this installation."""
    recipe = training.recipe
    pinned = [f"trl=={TRL_VERSION}.*", *(f"{name}=={metadata.version(name)}" for name in PINNED)]
    needed = {
        "torchao>=0.18": recipe.optimizer.startswith("torchao"),
        "liger-kernel>=0.8.5": recipe.liger_kernels,
        PACKAGE: training.is_by_deepspeed,
    }
    # These compile against the torch that is installed.
    compiled = {
        "flash-attn>=2.8": recipe.attention == "flash_attention_2",
        "mamba-ssm>=2.3.2": recipe.mamba == "mamba-ssm",
        "causal-conv1d>=1.6": recipe.mamba == "mamba-ssm",
    }
    plain = [*pinned, *(name for name, wanted in needed.items() if wanted)]
    return _pip(plain, [name for name, wanted in compiled.items() if wanted])


def _pip(plain: list[str], compiled: list[str]) -> str:
    lines = [f"pip install {shlex.join(plain)}"]
    if compiled:
        lines.append(f"pip install --no-build-isolation {shlex.join(compiled)}")
    return "\n".join(lines)
