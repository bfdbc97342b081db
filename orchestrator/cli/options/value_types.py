"""Values of options, converted and checked; a wrong value is an ``ArgumentTypeError``."""

import argparse
import datetime as dt
import math
import re
from pathlib import Path

from trials.recipes.unsimulated_strategies import unsimulated_strategy

STRATEGIES = (
    *("ddp", "fsdp2", "hsdp", "tp"),
    *("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"),
)
"""Those of ``trials.recipes.parallel``, without the import."""


def run_folder(text: str) -> Path | str:
    """A path; an address stays text, as a path would merge its slashes."""
    return text if "://" in text else Path(text)


def date(text: str) -> dt.date:
    """A date, as 2026-11-22."""
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date, as 2026-11-22") from None


def web_address(text: str) -> str:
    """An address of the web."""
    if not re.match(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address, as https://example.org/my/")
    return text


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    from trials.recipes.fields import MOST_COUNTED  # noqa: PLC0415 - help does without pydantic

    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    if value > MOST_COUNTED:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_COUNTED}")
    return value


def above_zero(text: str) -> float:
    """A number greater than 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return value


def norm(text: str) -> float | str:
    """A norm greater than 0, or ``none`` for no clipping."""
    if text == "none":
        return text
    try:
        return above_zero(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; none for no clipping") from None


def count(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, separated by commas, without repetitions."""
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


def not_negative(text: str) -> float:
    """A number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def batch_size(text: str) -> int | str:
    """Examples per step, ``fastest``, or ``largest`` with its synonym ``max``."""
    return _or_word(text, {"fastest": "fastest", "largest": "largest", "max": "largest"})


def seq_lens(text: str) -> int | tuple[int, ...] | str:
    """Tokens per example, several such lengths, or ``max`` for the longest that fits."""
    if "," not in text:
        return _or_word(text, {"max": "max"})
    lengths = tuple(positive(part.strip()) for part in text.split(","))
    if len(set(lengths)) < len(lengths):
        raise argparse.ArgumentTypeError(f"must give each length once, not {text}")
    return lengths


def strategy(text: str) -> str:
    """Strategy of several GPUs; those that are not simulated are refused by name."""
    if text in {"auto", *STRATEGIES}:
        return text
    problem = unsimulated_strategy(text) or f"must be a strategy, not {text!r}"
    names = ", ".join(STRATEGIES)
    raise argparse.ArgumentTypeError(f"{problem}: give {names} or auto")


def largest_or_size(text: str) -> int | str:
    """Examples per step, or ``largest`` with its synonym ``max``."""
    return _or_word(text, {"largest": "largest", "max": "largest"})


def epochs(text: str) -> int | str:
    """Number of epochs, or ``auto``."""
    return _or_word(text, {"auto": "auto"})


def _or_word(text: str, words: dict[str, str]) -> int | str:
    if text in words:
        return words[text]
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {', or '.join(words)}") from None
