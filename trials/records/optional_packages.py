"""Packages that not every installation has, and which of them this one has."""

from importlib.util import find_spec

EXTRAS = ("causal_conv1d", "deepspeed", "flash_attn", "mamba_ssm")
"""What ``Recipe.extras`` can name."""


def importable_extras() -> frozenset[str]:
    """Those that this Python can import."""
    return frozenset(name for name in EXTRAS if find_spec(name) is not None)
