"""Attention kernel that a configuration names by ``attn_implementation``."""

from collections.abc import Mapping

from orchestrator.configurations.key_classes import Config, Reading

LIKE_FLASH_ATTENTION = ("flash-attn", "flash_attention", "flex_attention", "xformers")
KEY = "attn_implementation"


def attention_of(config: Config, kernels: Mapping[str, str], reading: Reading) -> None:
    """Add the kernel; others of FlashAttention's kind stand for its version 2."""
    kernel = config.get(KEY)
    if kernel is None:
        return
    if isinstance(kernel, str) and kernel in kernels:
        reading.options["attention"] = kernels[kernel]
    elif isinstance(kernel, str) and any(part in kernel for part in LIKE_FLASH_ATTENTION):
        reading.options["attention"] = "flash_attention_2"
        text = "flash_attention_2, which holds as little in memory; its speed differs"
        reading.mark(KEY, kernel, "assumed", text)
    else:
        reading.refuse(KEY, kernel, f"not simulated: use one of {', '.join(kernels)}")
