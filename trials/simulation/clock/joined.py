"""Durations of two kinds of work of one kernel that overlap, but not wholly."""

import numpy as np

from trials.simulation.recording import FloatArray


def joined_seconds(moving: FloatArray, working: FloatArray, knee: float) -> FloatArray:
    """(operators,) seconds of both: the longer one, and more where they are alike.

    Args:
        moving: (operators,) seconds of moving data.
        working: (operators,) seconds of the rest; nan where unknown.
        knee: exponent that joins them: the larger it is, the less they delay each other.
    """
    worked = np.nan_to_num(working)
    longer, shorter = np.maximum(moving, worked), np.minimum(moving, worked)
    share = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    seconds: FloatArray = longer * (1.0 + share**knee) ** (1.0 / knee)
    return seconds
