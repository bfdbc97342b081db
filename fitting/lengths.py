"""How long a batch of a data set is: the longest of its examples decides."""

from dataclasses import dataclass

import numpy as np

from fitting.laws import FloatArray


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many examples of a data set have how many tokens.

    Attributes:
        tokens: (lengths,) in the model's own tokenizer; ascending, each but once.
        examples: (lengths,) how many have so many.
    """

    tokens: FloatArray
    examples: FloatArray

    @property
    def median(self) -> float:
        """Tokens of the example in the middle."""
        below = np.cumsum(self.examples) / self.examples.sum()
        return float(self.tokens[np.searchsorted(below, 0.5)])

    def padded(self, batch_size: float, multiple: int = 8) -> float:
        """Expected tokens that each query of a batch is padded to.

        ``E[max of b lengths] = sum over l of l * (F(l)**b - F(l-1)**b)``, F the part of the
        examples that are no longer: batches are drawn at random and padded to their longest,
        rounded up to a multiple (8 where tensor cores are to be filled).

        Args:
            batch_size: queries per step, b.
            multiple: what lengths are rounded up to.
        """
        below = np.cumsum(self.examples) / self.examples.sum()
        before = np.concatenate([[0.0], below[:-1]])
        rounded = np.ceil(self.tokens / multiple) * multiple
        return float(rounded @ (below**batch_size - before**batch_size))
