"""Weights that were quantised before training, and experts that axolotl quantises."""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.configurations.key_classes import ABSENT, Config, Reading
from orchestrator.configurations.trainers.axolotl_keys import EXPERT_KERNELS

FORMATS: Mapping[str, tuple[bool, str]] = {
    "gptq": (True, "4 bits in groups of 128"),
    "awq": (True, "4 bits in groups of 128"),
    "nvfp4": (False, "4 bits in groups of 16"),
}
"""Formats by their names: whether constants of NF4 are quantised for as many bits, and theirs.

Each holds 4.1 to 4.5 bits per weight, as NF4 does: 4.13 with quantised constants, else 4.5.
"""
BNB_DEFAULTS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
OTHERS = ("aqlm", "gguf")
"""Formats of other widths."""
OTHER_BITS = re.compile(r"(?:int|w)(?:2|3|8)(?!\d)|(?<!\d)(?:2|3|8)-?bits?\b")


def format_of(model: str) -> str | None:
    """Format of a model's weights, by its name; None where it names none."""
    name = model.lower()
    return next((form for form in (*FORMATS, *OTHERS) if form in name), None)


def read_format(reading: Reading, *, key: str, value: object, form: str) -> None:
    """Read adapters on weights of a format as adapters on NF4 weights, which are as large.

    Both are dequantised for each product. Experts are quantised, too.

    Args:
        reading: the configuration so far; its method is known.
        key: key that names the format.
        value: value of the key.
        form: the format.
    """
    options = reading.options
    model = str(options.get("model", ABSENT)).lower()
    if form not in FORMATS or OTHER_BITS.search(model):
        reading.refuse(key, value, f"{form} weights of other than 4 bits are not simulated")
    elif options.get("method") != "lora":
        text = "weights quantised beforehand take adapters, and no quantisation on top"
        reading.refuse(key, value, text)
    else:
        double, width = FORMATS[form]
        changed: dict[str, Any] = {
            "method": "qlora",
            "quantisation": "nf4",
            "double_quantisation": double,
            "quantised_experts": True,
        }
        options |= changed
        text = f"NF4 in place of {form}'s {width}: as large, and dequantised for each product"
        reading.mark(key, value, "assumed", text)


def read_expert_kernels(config: Config, reading: Reading) -> None:
    """Read the product of a model's experts, by transformers or by kernels of axolotl."""
    for name in ("experts_implementation", "expert_backend"):
        kernel = config.get(name)
        if kernel in ("scattermoe", "sonicmoe"):
            reading.mark(name, kernel, "assumed", EXPERT_KERNELS)
        elif kernel not in (None, "grouped_mm", "builtin"):
            reading.refuse(name, kernel, "not simulated: use grouped_mm")


def read_quantised_experts(config: Config, reading: Reading) -> None:
    """Read the quantisation of fused experts, which only axolotl's own option does."""
    options, quantises = reading.options, config.get("quantize_moe_experts")
    if not quantises:
        return
    options["quantised_experts"] = True
    if config.get("load_in_8bit") and config.get("gradient_checkpointing"):
        # Its hook does not run where checkpointing stops early, as bitsandbytes' for 4 bits does.
        assumption = (
            "a layer's dequantised experts are freed after its pass; axolotl 0.19 keeps those of "
            "models without shared experts, in fp32: use load_in_4bit for them"
        )
        reading.mark("quantize_moe_experts", quantises, "assumed", assumption)
    text = None
    if options["method"] != "qlora":  # schemas/config.py:1951
        text = "axolotl needs load_in_4bit or load_in_8bit with it"
    elif config.get("lora_target_linear"):
        text = "axolotl refuses it with lora_target_linear: name the layers"
    elif BNB_DEFAULTS | (config.get("bnb_config_kwargs") or {}) != BNB_DEFAULTS:
        text = "with bnb_config_kwargs, which axolotl does not apply to experts, not simulated"
    if text:
        reading.refuse("quantize_moe_experts", quantises, text)
