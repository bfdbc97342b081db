"""Operators of a step, whose durations the clock models."""

from dataclasses import dataclass

import numpy as np

from trials.simulation.recording import (
    Collective,
    Column,
    FloatArray,
    IntArray,
    Kind,
    OperatorClass,
)


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators of a step, waits of the host and events of streams.

    Attributes:
        kinds, names, numbers: as in a recording, of each operator.
        order: (events,) operator of each event of the step, as repeated layers have the same ones;
            absent where each runs once.
    """

    kinds: IntArray
    names: IntArray
    numbers: FloatArray
    order: IntArray | None = None

    @property
    def events(self) -> IntArray:
        """Index of the operator of each event, (events,)."""
        return np.arange(len(self.kinds)) if self.order is None else self.order

    @property
    def in_full(self) -> "Operators":
        """The same step with an operator for each event."""
        at = self.events
        return Operators(self.kinds[at], self.names[at], self.numbers[at])

    @property
    def collective_sums(self) -> FloatArray:
        """Number of collectives and bytes of their whole buffers, (kinds, 2), by ``Collective``."""
        moves = (self.kinds == Kind.RUN) & (self.names // 4 == OperatorClass.COLLECTIVE)
        times = np.bincount(self.events, minlength=len(moves))[moves]
        sizes = np.rint(self.numbers[moves, Column.BYTES])
        kinds = self.names[moves] % 4
        sums = [np.bincount(kinds, n, minlength=len(Collective)) for n in (times, times * sizes)]
        return np.stack(sums, axis=1)
