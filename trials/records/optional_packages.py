"""Optional packages, and those that this installation has."""

from importlib.util import find_spec

EXTRAS = ("causal_conv1d", "deepspeed", "flash_attn", "mamba_ssm")
"""Packages that ``Recipe.extras`` can name."""


def importable_extras() -> frozenset[str]:
    """Optional packages that this Python can import."""
    return frozenset(name for name in EXTRAS if find_spec(name) is not None)
