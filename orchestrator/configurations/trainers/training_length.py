"""Batches and length of a training: micro-batch, accumulation, epochs or steps."""

import math

from orchestrator.configurations.key_classes import Reading

Stated = tuple[str, object]
"""A key's name and its value."""


def length_of(
    reading: Reading, *, micro: Stated, accumulation: Stated, epochs: Stated, steps: Stated
) -> None:
    """Add the micro-batch, the effective batch, and epochs or optimizer steps."""
    # A refused size counts as 1, so that mistakes of the length are found beside it.
    micro_batch, micro_batches = (_count(reading, *stated) or 1 for stated in (micro, accumulation))
    options = reading.options
    options["batch_size"] = micro_batch
    options["effective_batch"] = micro_batch * micro_batches
    name, value = steps
    if value not in (None, -1, 0):
        count = _count(reading, name, value)
        if count is not None:
            options["steps"], options["epochs"] = count, 1
        reading.mark(epochs[0], epochs[1], "irrelevant", f"{name} decides")
        return
    name, value = epochs
    if isinstance(value, float) and math.isfinite(value) and value > 0 and value % 1:
        options["epochs"] = math.ceil(value)
        text = f"{math.ceil(value)} epochs, an upper bound: give --examples and --epochs"
        reading.mark(name, value, "assumed", text)
        return
    passes = _count(reading, name, value)
    if passes is not None:
        options["epochs"] = passes


def set_aside(reading: Reading, value: object) -> None:
    """Add what a trainer does not train on but evaluates: a share up to 1, or a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if 0 < value < math.inf:
        reading.options["set_aside"] = value


def _count(reading: Reading, name: str, value: object) -> int | None:
    """A whole number of at least 1; anything else is refused."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        whole = int(value)
        if whole == value and whole > 0:
            return whole
    reading.refuse(name, value, "must be a whole number of at least 1")
    return None
