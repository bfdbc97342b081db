"""Duration of a kernel whose two kinds of work overlap in part."""

import numpy as np

from trials.simulation.recording import FloatArray


def joined_seconds(moving: FloatArray, working: FloatArray, exponent: float) -> FloatArray:
    """(operators,) seconds of both: the longer one, and more where they are alike.

    ``(moving^n + working^n)^(1/n)``.

    Args:
        moving: (operators,) seconds of one kind, such as moving data.
        working: (operators,) seconds of the other; nan where unknown.
        exponent: of their norm: 1 adds them, and the larger it is, the more they overlap.
    """
    worked = np.nan_to_num(working)
    longer, shorter = np.maximum(moving, worked), np.minimum(moving, worked)
    share = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    seconds: FloatArray = longer * (1.0 + share**exponent) ** (1.0 / exponent)
    return seconds
