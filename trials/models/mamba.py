"""Kernels of Mamba layers: those of mamba-ssm, or transformers' reference in plain PyTorch.

transformers decides when it imports its Mamba code, by whether the packages can be imported. So a
process chooses once, before that import. The operators of a step show which kernels ran.
"""

import importlib
import sys
from collections.abc import Collection

from trials.recipes.fields import Mamba

PACKAGES = ("mamba_ssm", "causal_conv1d")
# Both convolve before they scan: the reference by PyTorch's own operator, mamba-ssm by that of
# causal-conv1d (DaoAILab::_causal_conv1d_fwd_cpp).
REFERENCE_OPERATOR = "aten::convolution"
KERNEL_OPERATOR = "causal_conv1d"


def choose_mamba_kernels(mamba: Mamba) -> None:
    """Choose the kernels of this process's Mamba layers, without any download.

    Raises:
        ImportError: mamba-ssm is chosen, and it or causal-conv1d cannot be imported.
        RuntimeError: the process has made the other choice before.
    """
    hidden = [package for package in PACKAGES if sys.modules.get(package, "unknown") is None]
    if mamba == "mamba-ssm":
        if hidden:
            raise RuntimeError("this process runs Mamba's reference: start another for mamba-ssm")
        for package in PACKAGES:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ImportError(
                    f"mamba: mamba-ssm needs the package {package} ({error}): install the extra "
                    "'gpu', or use mamba: reference"
                ) from None
        return
    if any(sys.modules.get(package) is not None for package in PACKAGES):
        raise RuntimeError("this process has imported mamba-ssm: start another for the reference")
    for package in PACKAGES:
        sys.modules[package] = None  # type: ignore[assignment] # an import raises ImportError


def mamba_in_use(operators: Collection[str]) -> Mamba | None:
    """Kernels that ran, by the operators of a step of a model with Mamba layers.

    None when the operators show neither, or both.
    """
    reference = REFERENCE_OPERATOR in operators
    kernels = any(KERNEL_OPERATOR in operator for operator in operators)
    if reference == kernels:
        return None
    return "reference" if reference else "mamba-ssm"
