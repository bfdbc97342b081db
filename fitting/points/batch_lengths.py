"""Padded lengths of batches of a data set: the longest example of a batch decides."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from fitting.numerics.arrays import FloatArray
from trials.drawn_lengths import sorted_at_once

MULTIPLE = 8  # padded lengths are rounded up to a multiple of this, which fills tensor cores
SPREADS = 12.0  # standard deviations to sum over; the tails beyond are below rounding


@dataclass(frozen=True, slots=True)
class Lengths:
    """Histogram of the lengths of a data set's examples.

    Attributes:
        tokens: (lengths,) distinct lengths in tokens of the model's tokenizer, ascending.
        examples: (lengths,) number of examples of each length.
    """

    tokens: FloatArray
    examples: FloatArray

    @classmethod
    def of(cls, histogram: Iterable[tuple[float, float]]) -> Self:
        """Build from pairs of tokens and examples, ascending, each length once."""
        tokens, examples = np.array(list(histogram), dtype=np.float64).T
        return cls(tokens=tokens, examples=examples)

    @property
    def mean(self) -> float:
        """Mean tokens of an example."""
        return float(self.tokens @ self.examples / self.examples.sum())

    @property
    def median(self) -> float:
        """Median tokens of an example."""
        return self.quantile(0.5)

    def quantile(self, part: float) -> float:
        """Quantile of the tokens of an example, for a part from 0 to 1."""
        return float(self.tokens[np.searchsorted(self.no_longer, part)])

    def cut(self, cutoff: int) -> Self:
        """Lengths with longer examples truncated to ``cutoff`` tokens."""
        return self._with_tokens(np.minimum(self.tokens, cutoff))

    def padded(self, batch_size: float, multiple: int = MULTIPLE) -> float:
        """Expected padded tokens per example of a random batch.

        ``E[max of b lengths] = sum over l of l * (F(l)**b - F(l-1)**b)``, with b the batch size and
        F the cumulative distribution of the lengths: batches are padded to their longest example,
        rounded up to ``multiple``.
        """
        below = self.no_longer
        before = np.concatenate([[0.0], below[:-1]])
        rounded = np.ceil(self.tokens / multiple) * multiple
        return float(rounded @ (below**batch_size - before**batch_size))

    def grouped(self, batch_size: int, examples: int, multiple: int = MULTIPLE) -> float:
        """Expected padded tokens per example where batches are grouped by length.

        transformers shuffles the data, takes the examples of ``m = min(50, n // (4 b))`` batches at
        a time, sorts these M examples and cuts them into batches. The number S of them that are
        longer than l is hypergeometric; they fill ceil(S / b) batches, which are padded to more
        than l. The M examples add up to ``sum over l of (l' - l) * E[ceil(S / b)]``, with l' the
        next length. Two effects are neglected: a last batch that is not full, and the longest
        example in the first batch, which adds up to 5 % where an epoch has few batches.

        Args:
            batch_size: examples per step, b.
            examples: examples per epoch, n, with lengths distributed as these.
            multiple: as in ``padded``.
        """
        batch = min(batch_size, examples)
        at_once = sorted_at_once(batch, examples) * batch
        rounded = self._with_tokens(np.ceil(self.tokens / multiple) * multiple)
        longer = np.rint(examples * (1.0 - rounded.no_longer)).astype(int)
        increments = np.diff(rounded.tokens, prepend=0.0)
        rest = examples % at_once
        total = 0.0
        for count, drawn in ((examples // at_once, at_once), (1, rest)):
            if drawn >= batch:
                batches = [
                    _expected_batches(int(k), examples, drawn, batch)
                    for k in (examples, *longer[:-1])
                ]
                total += count * float(increments @ np.array(batches))
        return total / (examples // batch)

    @property
    def no_longer(self) -> FloatArray:
        """(lengths,) F, share of the examples that are no longer."""
        return np.asarray(np.cumsum(self.examples) / self.examples.sum())

    def _with_tokens(self, tokens: FloatArray) -> Self:
        """Histogram with (lengths,) other lengths, in which equal ones are merged."""
        distinct, place = np.unique(tokens, return_inverse=True)
        examples = np.bincount(place, weights=self.examples)
        return type(self)(tokens=distinct, examples=np.asarray(examples, dtype=np.float64))


def _expected_batches(longer: int, examples: int, drawn: int, batch_size: int) -> float:
    """``E[ceil(S / b)]``: full batches that hold the S longer ones of M sorted examples.

    S is hypergeometric: ``p(s+1) / p(s) = (K-s)(M-s) / ((s+1)(n-K-M+s+1))`` for K longer ones among
    n examples, M of which are drawn.
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
