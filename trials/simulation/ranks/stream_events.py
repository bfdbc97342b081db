"""Events of a rank's streams: which one runs, marks of it, and waits for marks of others.

An event is one number, so that a recording keeps it as the name of a ``Kind.STREAM`` event. A wait
counts back from the latest mark, which makes it the same in every copy of a repeated layer.
"""

from dataclasses import dataclass
from enum import IntEnum

FIRST = 16
"""Smallest number; smaller ones are those of ``recording.Wait``."""
STREAMS = 8
"""Number of streams; stream 0 is that of the computation."""
MOST_BACK = 64


class Action(IntEnum):
    """Kind of an event of a stream."""

    RUN = 0
    """Further operators run on it."""
    MARK = 1
    """Its work until now is marked."""
    WAIT = 2
    """It waits for a mark of another stream."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream.

    Attributes:
        action: what happens.
        stream: number of the stream.
        other: stream whose mark it waits for.
        back: marks of the other stream after the one that it waits for.
    """

    action: Action
    stream: int
    other: int = 0
    back: int = 0

    @property
    def number(self) -> int:
        """Number of the event in a recording."""
        assert max(self.stream, self.other) < STREAMS
        assert 0 <= self.back < MOST_BACK
        place = (self.action * STREAMS + self.stream) * STREAMS + self.other
        return FIRST + place * MOST_BACK + self.back

    @classmethod
    def of(cls, number: int) -> "StreamEvent":
        """Event of a number."""
        place, back = divmod(number - FIRST, MOST_BACK)
        rest, other = divmod(place, STREAMS)
        action, stream = divmod(rest, STREAMS)
        return cls(Action(action), stream, other, back)
