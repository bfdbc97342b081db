"""Lengths of batches as an epoch meets them, and the search for the batch size that survives."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_catalog.record import Record
from trials.recipes.fields import PositiveInt
from trials.recipes.recipe import Recipe

MICRO_BATCHES = 48
"""Drawn micro-batches of a run, beside that with the longest example."""
MOST_BATCHES_SORTED = 50
"""transformers sorts the examples of this many batches at once, or a quarter of the data."""
STEP = 1.03  # precision of a largest batch among many


class DrawnBatch(NamedTuple):
    """Lengths of a drawn micro-batch.

    Attributes:
        tokens: tokens per example, padding included.
        is_padded: whether some of its examples are shorter, so that it has a mask.
    """

    tokens: int
    is_padded: bool


class DrawnLengths(Record):
    """Examples from which the batches of a part of an epoch are drawn.

    Attributes:
        histogram: pairs of tokens, ascending, and examples of that length.
        examples: examples of an epoch, with lengths distributed as these.
        grouped: whether batches have examples of similar length.
        multiple: multiple to which the length of a batch is rounded up.
        most_tokens: limit of a batch's length.
    """

    histogram: tuple[tuple[PositiveInt, PositiveInt], ...]
    examples: PositiveInt
    grouped: bool
    multiple: PositiveInt
    most_tokens: PositiveInt

    @property
    def vary(self) -> bool:
        """Whether batches differ in length."""
        return len({self._padded(tokens) for tokens, _ in self.histogram}) > 1

    def batches(
        self, batch_size: int, seed: int, count: int = MICRO_BATCHES
    ) -> tuple[DrawnBatch, ...]:
        """Draw batches, and the one with the longest example.

        The longest example is in the last batch, since it comes at some time in an epoch; in the
        first one where batches are grouped, as transformers does. In each part that transformers
        sorts, lengths decrease.

        Args:
            batch_size: examples per batch.
            seed: seed of the draws.
            count: batches to draw.
        """
        import numpy as np  # noqa: PLC0415 - plans draw nothing

        random = np.random.default_rng(seed)
        tokens, examples = np.array(self.histogram, dtype=np.float64).T
        at_once = sorted_at_once(batch_size, self.examples) if self.grouped else 1
        parts = -(-count // at_once) * at_once
        shares = examples / examples.sum()
        drawn = random.choice(tokens, parts * batch_size, p=shares)
        descending = -np.sort(-drawn.reshape(-1, at_once * batch_size), axis=1)
        batches = descending.reshape(-1, batch_size)[:count]
        # The longest example takes the place of one in the first batch of a part.
        others = descending[0] if self.grouped else random.choice(tokens, batch_size, p=shares)
        longest = np.r_[tokens[-1], others[: batch_size - 1]][None]
        rows = np.concatenate([longest, batches] if self.grouped else [batches, longest])
        return tuple(map(self._batch, rows.max(1).tolist(), rows.min(1).tolist()))

    def longest_first(self, batch_size: int, seed: int) -> tuple[DrawnBatch, ...]:
        """The same batches with that of the longest example first, as after a warm-up step."""
        batches = self.batches(batch_size, seed)
        return batches if self.grouped else (batches[-1], *batches[:-1])

    def _batch(self, longest: float, shortest: float) -> DrawnBatch:
        """Batch by the tokens of its longest and its shortest example."""
        padded = self._padded(longest)
        return DrawnBatch(padded, shortest < padded)

    def _padded(self, tokens: float) -> int:
        return min(math.ceil(tokens / self.multiple) * self.multiple, self.most_tokens)


def sorted_at_once(batch_size: int, examples: int) -> int:
    """Batches whose examples transformers sorts together, to group examples by length."""
    return max(1, min(MOST_BATCHES_SORTED, examples // (4 * batch_size)))


def sizes_to_try(recipe: Recipe, largest: int) -> Sequence[int]:
    """Micro-batches up to the largest, ascending: all that the effective batch allows, or a few."""
    effective_batch = recipe.effective_batch
    if effective_batch is not None:
        return [n for n in range(1, largest + 1) if effective_batch % n == 0]
    sizes = [largest] if largest else []
    while sizes and sizes[-1] > 1:
        sizes.append(min(sizes[-1] - 1, int(sizes[-1] / STEP)))
    return sizes[::-1]


def next_size(sizes: Sequence[int], survived: Mapping[int, bool]) -> int | None:
    """Next batch size to try: the largest first, then the middle of those that are left.

    Args:
        sizes: batch sizes to choose from, ascending.
        survived: whether a batch size that was tried survived; if not, no larger one does.

    Returns:
        The size; None once the largest that survives is determined.
    """
    miss = min((size for size, survives in survived.items() if not survives), default=math.inf)
    fit = max((size for size, survives in survived.items() if survives and size < miss), default=0)
    left = [size for size in sizes if fit < size < miss]
    if not left:
        return None
    return left[-1] if miss == math.inf else left[len(left) // 2]
