"""Optional packages, and those that this installation has."""

from importlib.util import find_spec

EXTRAS = {
    "causal_conv1d": "gpu",
    "cut_cross_entropy": "cce",
    "deepspeed": "deepspeed",
    "flash_attn": "gpu",
    "liger_kernel": "liger",
    "mamba_ssm": "gpu",
    "torchao": "torchao",
    "trl": "trl",
}
"""Packages that ``Recipe.extras`` can name, and the extra that installs each."""


def importable_extras() -> frozenset[str]:
    """Optional packages that this Python can import."""
    return frozenset(name for name in EXTRAS if find_spec(name) is not None)
