"""Packages that a training installs."""

import re
import shlex
from importlib import metadata

from orchestrator.exporting.deepspeed_file import PACKAGE
from orchestrator.exporting.training import TrainingJob
from orchestrator.spec.trainer_defaults import TRL_VERSION

PINNED = ("transformers", "peft", "bitsandbytes")
AXOLOTL_TORCH = "2.13.0"
"""Newest PyTorch that axolotl 0.19 takes; another would be replaced after flash-attn compiled."""
COMPILES = (
    "# Where no wheel fits this PyTorch it compiles, perhaps for hours that are not predicted."
)
AXOLOTL_CCE = (
    "cut-cross-entropy[transformers] @ "
    "git+https://github.com/axolotl-ai-cloud/ml-cross-entropy.git@4dfa522"
)
"""Fork that axolotl's plugin for the loss asks for (integrations/cut_cross_entropy)."""
WITH_TORCH = ("torchvision", "torchaudio")
"""Packages of an image whose PyTorch is replaced, which import that of their own release alone."""


def install_lines(training: TrainingJob, *, has_torch: bool = False) -> str:
    """Lines of bash that install the trainer, and what the recipe and the layout need.

    Args:
        training: the training.
        has_torch: whether the image has a PyTorch, which stays where the trainer takes it; else it
            is that of this installation, whose step was simulated.
    """
    torch = [] if has_torch else [f"torch=={_release('torch')}"]
    configuration = training.configuration
    if configuration is None or configuration.trainer == "TRL":
        return _trl_lines(training, torch)
    recipe, version = training.recipe, f"{configuration.version}.*"
    uses_flash = recipe.attention == "flash_attention_2"
    if configuration.trainer == "axolotl":
        wanted = {"flash-attn": uses_flash, "deepspeed": training.is_by_deepspeed}
        extras = ",".join(name for name, applies in wanted.items() if applies)
        name = f"axolotl{f'[{extras}]' if extras else ''}=={version}"
        builders = ["packaging", "setuptools", "wheel", "ninja", f"torch=={AXOLOTL_TORCH}"]
        lines = _pip([*builders, *(WITH_TORCH if has_torch else ())], [name])
        return f"{lines}\npip install {shlex.quote(AXOLOTL_CCE)}" if recipe.loss == "cce" else lines
    needed = {
        "bitsandbytes": recipe.method == "qlora" or "8bit" in recipe.optimizer,
        "liger-kernel": recipe.liger_kernels or recipe.loss == "liger",
        PACKAGE: training.is_by_deepspeed,
    }
    names = [f"llamafactory=={version}", *torch]
    names += [name for name, wanted in needed.items() if wanted]
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


def _release(package: str) -> str:
    """Release of a package of this installation, without its build, such as ``+cpu``."""
    version = metadata.version(package)
    release = re.match(r"[\d.]*\d", version)
    return version if release is None else release[0]


def _trl_lines(training: TrainingJob, torch: list[str]) -> str:
    """Lines that install TRL and its companions, at the versions of this installation."""
    recipe = training.recipe
    pinned = [f"trl=={TRL_VERSION}.*", *torch]
    pinned += [f"{name}=={_release(name)}" for name in PINNED]
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
        lines.append(COMPILES)
        lines.append(f"pip install --no-build-isolation {shlex.join(compiled)}")
    return "\n".join(lines)
