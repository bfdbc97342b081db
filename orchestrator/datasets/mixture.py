"""Lengths of several data sets that are trained on together."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from orchestrator.datasets.lengths import DataLengths, Histogram
from orchestrator.datasets.source import DataError, Mistake


def mixed_lengths(parts: Sequence[DataLengths]) -> DataLengths:
    """Lengths of all examples of several data sets, one after the other.

    Raises:
        DataError: examples of one are pairs or labelled answers, and those of another are not.
    """
    first = parts[0]
    for part in parts:
        if part.kind != first.kind:
            text = f"{part.source} has {part.kind}, and {first.source} {first.kind}: mix data sets "
            raise DataError([Mistake("dataset", f"{text}of one kind")])
    digest = hashlib.sha256("".join(str(part.fingerprint) for part in parts).encode())
    sequences = [part.sequences for part in parts if part.sequences is not None]
    errors = [part.error for part in parts if part.error is not None]
    return first.model_copy(
        update={
            "source": " and ".join(part.source for part in parts),
            "rendering": "; ".join(dict.fromkeys(str(part.rendering) for part in parts)),
            "histogram": _together(part.histogram for part in parts),
            "sequences": _together(sequences) if len(sequences) == len(parts) else None,
            "complete": all(part.complete for part in parts),
            "empty": sum(part.empty for part in parts),
            "empty_at": tuple(place for part in parts for place in part.empty_at),
            "error": max(errors, default=None),
            "fingerprint": digest.hexdigest()[:16],
        }
    )


def _together(histograms: Iterable[Histogram]) -> Histogram:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(dict(histogram))
    return tuple(sorted(total.items()))
