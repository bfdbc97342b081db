"""How long a batch of a data set is: the longest of its examples decides."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from fitting.numerics.arrays import FloatArray

MULTIPLE = 8  # what padded lengths are rounded up to where tensor cores are to be filled
MOST_BATCHES_SORTED = 50  # transformers sorts so many at once, or a quarter of the data if fewer
SPREADS = 12.0  # standard deviations that are looked at; beyond is less than rounding


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many examples of a data set have how many tokens.

    Attributes:
        tokens: (lengths,) in the model's own tokenizer; ascending, each but once.
        examples: (lengths,) how many have so many.
    """

    tokens: FloatArray
    examples: FloatArray

    @classmethod
    def of(cls, histogram: Iterable[tuple[float, float]]) -> Self:
        """From pairs of tokens and examples, ascending, each length but once."""
        tokens, examples = np.array(list(histogram), dtype=np.float64).T
        return cls(tokens=tokens, examples=examples)

    @property
    def mean(self) -> float:
        """Tokens of an example, on average."""
        return float(self.tokens @ self.examples / self.examples.sum())

    @property
    def median(self) -> float:
        """Tokens of the example in the middle."""
        return self.quantile(0.5)

    def quantile(self, part: float) -> float:
        """Tokens that this part of the examples has at most."""
        return float(self.tokens[np.searchsorted(self.no_longer, part)])

    def cut(self, cutoff: int) -> Self:
        """The same, longer examples cut off at so many tokens."""
        return self._gathered(np.minimum(self.tokens, cutoff))

    def padded(self, batch_size: float, multiple: int = MULTIPLE) -> float:
        """Expected tokens that each example of a batch is padded to.

        ``E[max of b lengths] = sum over l of l * (F(l)**b - F(l-1)**b)``, F the part of the
        examples that are no longer: batches are drawn at random and padded to their longest,
        rounded up to a multiple (8 where tensor cores are to be filled).

        Args:
            batch_size: examples per step, b.
            multiple: what lengths are rounded up to.
        """
        below = self.no_longer
        before = np.concatenate([[0.0], below[:-1]])
        rounded = np.ceil(self.tokens / multiple) * multiple
        return float(rounded @ (below**batch_size - before**batch_size))

    def grouped(self, batch_size: int, examples: int, multiple: int = MULTIPLE) -> float:
        """Expected tokens that each example is padded to where batches are of like lengths.

        As transformers groups by length: the data is shuffled; again and again, so many examples as
        fill ``m = min(50, n // (4 b))`` batches are sorted and cut into batches, at the end what is
        left. Of M sorted examples S are longer than l, hypergeometric; they are in ceil(S / b)
        batches, which are padded to more than l. So those M come to
        ``sum over l of (l' - l) * E[ceil(S / b)]``, l' the next length. Not counted: a last batch
        that is not full, and that the longest example is put into the first batch, which adds
        up to 5 % where an epoch is a few batches.

        Args:
            batch_size: examples per step, b.
            examples: of an epoch, n; their lengths are spread as these are.
            multiple: what lengths are rounded up to.
        """
        batch = min(batch_size, examples)
        sorted_at_once = max(1, min(MOST_BATCHES_SORTED, examples // (4 * batch))) * batch
        rounded = self._gathered(np.ceil(self.tokens / multiple) * multiple)
        longer = np.rint(examples * (1.0 - rounded.no_longer)).astype(int)
        increments = np.diff(rounded.tokens, prepend=0.0)
        rest = examples % sorted_at_once
        total = 0.0
        for count, drawn in ((examples // sorted_at_once, sorted_at_once), (1, rest)):
            if drawn >= batch:
                batches = [
                    _expected_batches(int(k), examples, drawn, batch)
                    for k in (examples, *longer[:-1])
                ]
                total += count * float(increments @ np.array(batches))
        return total / (examples // batch)

    @property
    def no_longer(self) -> FloatArray:
        """(lengths,) F, the part of the examples that are no longer."""
        return np.asarray(np.cumsum(self.examples) / self.examples.sum())

    def _gathered(self, tokens: FloatArray) -> Self:
        """The examples by other lengths: (lengths,) ascending, some alike now."""
        kept, place = np.unique(tokens, return_inverse=True)
        examples = np.bincount(place, weights=self.examples)
        return type(self)(tokens=kept, examples=np.asarray(examples, dtype=np.float64))


def _expected_batches(longer: int, examples: int, drawn: int, batch_size: int) -> float:
    """``E[ceil(S / b)]``: full batches that hold the S longer ones among those drawn, sorted.

    S is hypergeometric; ``p(s+1) / p(s) = (K-s)(M-s) / ((s+1)(n-K-M+s+1))``, with K longer ones
    among n examples, M of which are drawn.
    """
    part = longer / examples
    mean = drawn * part
    reach = SPREADS * (math.sqrt(mean * (1.0 - part)) + 1.0)
    low = max(0, longer + drawn - examples, math.floor(mean - reach))
    high = min(longer, drawn, math.ceil(mean + reach))
    s = np.arange(low, high + 1, dtype=np.float64)
    at = s[:-1]
    up = (longer - at) * (drawn - at)
    down = (at + 1.0) * (examples - longer - drawn + at + 1.0)
    logs = np.concatenate([[0.0], np.cumsum(np.log(up / down))])
    weights = np.exp(logs - logs.max())
    batches = np.minimum(np.ceil(s / batch_size), drawn // batch_size)
    return float(weights @ batches / weights.sum())
