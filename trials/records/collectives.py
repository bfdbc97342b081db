"""Collectives of several GPUs as a log has them: how long one takes, and how many a step has."""

from typing import Annotated

from pydantic import Field

from gpu_catalog.links.within_nodes import CollectiveName
from gpu_catalog.record import Record
from trials.recipes.fields import PositiveInt

# Bounds that no device reaches, within which the sums and logarithms of laws are finite.
Second = Annotated[float, Field(ge=1e-9, le=1e9)]
Whole = Annotated[int, Field(ge=-(2**62), le=2**62)]


class CollectiveTime(Record):
    """Time of one collective of all GPUs, before a cell's first steps.

    Attributes:
        buffer_bytes: bytes of the whole buffer: an all-gather's output, a reduce-scatter's input.
        seconds: mean of repetitions without a pause, on the slowest rank.
    """

    collective: CollectiveName
    buffer_bytes: Whole
    seconds: Second


class CollectiveCount(Record):
    """Collectives of one kind in a step of one rank, whatever their groups.

    Attributes:
        count: number of them.
        buffer_bytes: bytes of their whole buffers together, as of ``CollectiveTime``.
    """

    collective: CollectiveName
    count: PositiveInt
    buffer_bytes: Whole
