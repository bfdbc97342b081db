"""Rows that examples fill when they are packed whole, as TRL's best-fit decreasing packs them."""

from bisect import bisect_left, insort
from collections import Counter
from functools import cache

PACKED_AT_ONCE = 1000  # examples that ``datasets.Dataset.map`` hands to TRL's packing at a time
MOST_PACKED = 50_000  # examples to pack; a sample of more examples gives the rows within 0.1 %
Histogram = tuple[tuple[int, int], ...]
"""(tokens, examples), ascending."""


@cache
def rows_per_example(histogram: Histogram, row_tokens: int) -> float:
    """Rows over examples when examples in random order are packed, ``PACKED_AT_ONCE`` at a time.

    Args:
        histogram: lengths of the examples.
        row_tokens: tokens of a row; longer examples are truncated to it.
    """
    import numpy as np  # noqa: PLC0415 - few jobs are packed

    tokens, counts = np.array(histogram).T
    examples = int(counts.sum())
    order = np.random.default_rng(0).permutation(examples)[:MOST_PACKED]
    lengths = np.minimum(
        tokens[np.searchsorted(np.cumsum(counts), order, side="right")], row_tokens
    )
    batches = np.split(lengths, range(PACKED_AT_ONCE, len(lengths), PACKED_AT_ONCE))
    return sum(best_fit_rows(batch.tolist(), row_tokens) for batch in batches) / len(lengths)


def best_fit_rows(lengths: list[int], row_tokens: int) -> int:
    """Rows that examples fill, the longest first, each in the row where it leaves the least space.

    Args:
        lengths: tokens of the examples, at most those of a row.
        row_tokens: tokens of a row.
    """
    rows = 0
    spaces: list[int] = []  # distinct spaces of open rows, ascending
    open_rows: Counter[int] = Counter()
    for length in sorted(lengths, reverse=True):
        place = bisect_left(spaces, length)
        if place == len(spaces):
            rows += 1
            space = row_tokens
        else:
            space = spaces[place]
            open_rows[space] -= 1
            if open_rows[space] == 0:
                del spaces[place]
        left = space - length
        if left > 0:
            if open_rows[left] == 0:
                insort(spaces, left)
            open_rows[left] += 1
    return rows
