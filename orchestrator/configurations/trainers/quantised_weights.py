"""Weights that were quantised before training, in a format of their own."""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.configurations.key_classes import ABSENT, Reading

FORMATS: Mapping[str, tuple[bool, str]] = {
    "gptq": (True, "4 bits in groups of 128"),
    "awq": (True, "4 bits in groups of 128"),
    "nvfp4": (False, "4 bits in groups of 16"),
}
"""Formats by their names: whether constants of NF4 are quantised for as many bits, and theirs.

Each holds 4.1 to 4.5 bits per weight, as NF4 does: 4.13 with quantised constants, else 4.5.
"""
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
