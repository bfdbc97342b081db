"""Token counts without a tokenizer: from the characters of a text, by rates of a vocabulary.

The rates were fitted on 2026-11-23 to tokenizers that packages of PyPI contain (llama-models,
mistral-common, dashscope), on licences, documentation, source code, LaTeX in docstrings, and
translations of a user interface into 13 languages. Errors are the largest on the five corpora in
``tests/data/corpora``, on which nothing was fitted; ``make trainers`` measures them again.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trials.child_process.token_counter import RenderedExample, TokenCounts

MESSAGE_TOKENS = 5
"""Tokens that a chat template adds to a message: those of Llama 3's and of ChatML."""
SPECIAL_TOKENS = 1
"""Special tokens of a text."""
FEWEST_TOKENS = 8_000  # of a vocabulary; smaller ones are of models for tests
ALIKE = 0.05  # relative difference of two sizes that counts as one vocabulary
UNMEASURED = 2.0  # factor of the error of the next vocabulary, where none of its size was measured
LONG_WORD = 7
LATIN = "A-Za-z\u00c0-\u024f\u1e00-\u1eff"
PIECES = re.compile(
    rf"[\t -/:-@\[-`{{-~]?([{LATIN}]+)|([0-9]{{1,3}})|( ?[!-/:-@\[-`{{-~]+)"
    r"|(\s*\n\s*|[ \t]{2,})|([^\x00-\x7f])"
)
SCRIPTS = (
    (0x024F, 0),  # symbols
    (0x058F, 1),  # Greek, Cyrillic, Armenian
    (0x08FF, 2),  # Hebrew, Arabic
    (0x1FFF, 3),  # Indic and Southeast Asian
    (0x2E7F, 0),  # punctuation and symbols
    (0xABFF, 4),  # Chinese, Japanese
    (0xD7FF, 5),  # Korean
    (0x10FFFF, 4),
)
"""Last code points of ranges, and the rate of their characters among those of scripts."""
KINDS = 13
FIRST_SCRIPT = 7


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rates of tokens in a text of a tokenizer.

    Attributes:
        name: tokenizer that they were fitted to.
        size: number of its tokens.
        rates: tokens of a word, of each of its letters after the seventh, of a number, of each of
            its further digits, of a run of marks, of each further mark, of a break, of a symbol or
            an accented letter, and of a character of each script.
        error: largest relative error on the corpora.
    """

    name: str
    size: int
    rates: tuple[float, ...]
    error: float

    def tokens(self, text: str) -> float:
        """Approximate number of tokens of a text."""
        counts = _counts(text)
        return sum(rate * count for rate, count in zip(self.rates, counts, strict=True))

    def tokens_of(self, example: RenderedExample) -> int:
        """Approximate number of tokens of an example, special tokens included."""
        if isinstance(example, str):
            return round(self.tokens(example)) + SPECIAL_TOKENS if example else 0
        texts = [_content(message) for message in example]
        return round(sum(map(self.tokens, texts))) + MESSAGE_TOKENS * len(texts)

    def __str__(self) -> str:
        return f"rates of {self.name}'s tokenizer"


VOCABULARIES = (
    Vocabulary(
        "Mistral 7B v0.1",
        32_000,
        (1, 0.073, 0.932, 1.84, 1.45, 0.146, 2.223, 3.453, 0.439, 1.115, 1.257, 1.083, 1.337),
        0.15,
    ),
    Vocabulary(
        "Llama 3",
        128_256,
        (1, 0.045, 1.076, 0.361, 1.142, 0.074, 1.218, 1.452, 0.302, 0.374, 0.609, 0.707, 0.647),
        0.13,
    ),
    Vocabulary(
        "Mistral Nemo",
        131_072,
        (1, 0.095, 0.911, 1.702, 1.05, 0.108, 1.659, 0.924, 0.31, 0.318, 0.418, 0.85, 0.627),
        0.09,
    ),
    Vocabulary(
        "Qwen 2.5",
        151_936,
        (1, 0.043, 1.07, 1.43, 1.141, 0.074, 1.225, 1.529, 0.401, 0.521, 1.108, 0.62, 0.701),
        0.12,
    ),
)


def vocabulary_of(size: int) -> Vocabulary | None:
    """Rates for a vocabulary of a size, by the nearest that was measured; None for tiny ones.

    Where none of about that size was measured, the error is doubled.
    """
    if size < FEWEST_TOKENS:
        return None
    near = min(VOCABULARIES, key=lambda one: abs(math.log(size / one.size)))
    if abs(size / near.size - 1) <= ALIKE:
        return near
    return Vocabulary(near.name, size, near.rates, UNMEASURED * near.error)


def _counts(text: str) -> list[int]:
    """Number of pieces of each kind, in the order of the rates."""
    counts = [0] * KINDS
    for word, number, marks, space, other in PIECES.findall(text):
        if word:
            counts[0] += 1
            counts[1] += max(0, len(word) - LONG_WORD)
            counts[FIRST_SCRIPT] += 0 if word.isascii() else sum(c > "\x7f" for c in word)
        elif number:
            counts[2] += 1
            counts[3] += len(number) - 1
        elif marks:
            counts[4] += 1
            counts[5] += len(marks) - 1
        elif space:
            counts[6] += 1
        else:
            script = next(index for last, index in SCRIPTS if ord(other) <= last)
            counts[FIRST_SCRIPT + script] += 1
    return counts


def _content(message: Any) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(message, default=str)


class ApproximateCounter:
    """Counts tokens by rates, in place of ``TokenCounter``. A context manager."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing; there is no process to end."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint shared by equal rates."""
        return f"approximate-{self._vocabulary.name}-{self._vocabulary.size}"

    def need_chat_template(self) -> None:
        """Do nothing; every message is taken to have ``MESSAGE_TOKENS`` of its own."""

    def counted(self, chunks: Iterable[Sequence[RenderedExample]]) -> Iterator[TokenCounts]:
        """Count chunk after chunk; nothing is refused."""
        for chunk in chunks:
            yield TokenCounts([self._vocabulary.tokens_of(example) for example in chunk], {})
