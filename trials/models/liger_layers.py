"""Layers by liger-kernel: RMSNorm, rotary embedding and SwiGLU as Triton kernels."""

import importlib
import sys
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trials.models.fused_head import base_of

# Qualified names of liger-kernel's functions, and what each replaces.
REPLACEMENTS = {
    "LigerRMSNorm.forward": "rms_norm",
    "LigerSwiGLUMLP.forward": "swiglu",
    "liger_rotary_pos_emb": "rope",
}
ROPE = "apply_rotary_pos_emb"


def apply_liger_layers(model: nn.Module) -> None:
    """Replace layers of a model in place, as transformers' Trainer does, but not its loss.

    Raises:
        ImportError: liger-kernel is not installed.
    """
    library: Any = importlib.import_module("liger_kernel.transformers")
    library._apply_liger_kernel_to_instance(  # noqa: SLF001 - the name that transformers calls
        model=base_of(model),
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )


def family_code(model: nn.Module) -> Any:
    """Module of transformers with the code of the model's layers."""
    kinds = type(base_of(model)).__mro__
    # fully_shard gives a model a class of its own, below which is the model's.
    return sys.modules[next(k for k in kinds if not issubclass(k, FSDPModule)).__module__]


def liger_layers_in_use(model: nn.Module) -> tuple[str, ...]:
    """Layers that are liger-kernel's, sorted: ``rms_norm``, ``rope``, ``swiglu``."""
    replaced = [vars(module).get("forward") for module in model.modules()]
    replaced.append(getattr(family_code(model), ROPE, None))
    names = {getattr(function, "__qualname__", "") for function in replaced}
    return tuple(sorted(REPLACEMENTS[name] for name in names & REPLACEMENTS.keys()))
