"""Expansion of a traced step of a few layers to the step of the whole model.

A turn is one period of the repeated layers: one layer, or one of each kind where kinds alternate.
Three turns are traced, because the first and the last have other neighbours. The events of the
second are copied for every turn between them. In a copy, a storage made by the second turn becomes
a storage of its own, and a storage of the turn before (or after) becomes that of the copy before
(or after).
"""

from dataclasses import dataclass, fields

import numpy as np

from trials.simulation.recording import (
    BACKWARD,
    FORWARD,
    TURN,
    UPDATES,
    Column,
    Held,
    IntArray,
    Kind,
    Purpose,
    Recording,
    RepeatError,
    Segment,
    Stream,
    StructureError,
)


def check_repeats(recording: Recording) -> None:
    """Check that the three turns make the same storages in the same order.

    Raises:
        RepeatError: they do not, so the second cannot represent others.
    """
    for family in (FORWARD, BACKWARD[1:]):
        made = [_made(recording, segment) for segment in family]
        if any(len(one) != len(made[0]) for one in made[1:]):
            raise RepeatError("the layers that repeat do not make the same storages")
        sizes = [recording.numbers[one, Column.BYTES] for one in made]
        if any(not np.array_equal(one, sizes[0]) for one in sizes[1:]):
            raise RepeatError("the layers that repeat make storages of different sizes")


def whole_step(recording: Recording, copies: int) -> Stream:
    """Two steps of the whole model: the first, and one like all later ones.

    Args:
        recording: recording of three turns, or of the whole model (then there are no copies).
        copies: number of turns that were not traced.
    """
    layout = _Layout(recording, copies)
    for step, update in enumerate((Segment.FIRST_UPDATE, Segment.UPDATE)):
        if step == 1:
            layout.mark_steady()
        for segment, place in _order(copies, update):
            layout.add(segment, place, step)
    return layout.stream()


def whole_model(held: Held, copies: int) -> Held:
    """Storages of the whole model before the first step."""
    middle = held.turns == 2
    end = int(np.flatnonzero(middle)[-1]) + 1 if middle.any() else 0

    def repeated(column: IntArray) -> IntArray:
        return np.concatenate([column[:end], np.tile(column[middle], copies), column[end:]])

    return Held(*(repeated(c) for c in (held.sizes, held.purposes, held.turns)))


def _order(copies: int, update: Segment) -> list[tuple[Segment, int]]:
    """Segments of a step in order, each with the position of its turn among all (from 1)."""
    last = copies + 3
    middle = range(2, copies + 3)
    return [
        (Segment.BEFORE, 0),
        (Segment.FORWARD_1, 1),
        *((Segment.FORWARD_2, place) for place in middle),
        (Segment.FORWARD_3, last),
        (Segment.HEAD, 0),
        (Segment.HEAD_BACKWARD, 0),
        (Segment.BACKWARD_3, last),
        *((Segment.BACKWARD_2, place) for place in reversed(middle)),
        (Segment.BACKWARD_1, 1),
        (Segment.AFTER, 0),
        (update, 0),
        (Segment.FORGET, 0),
    ]


@dataclass(frozen=True, slots=True)
class _SegmentEvents:
    """Events of one segment, with the origin of their storages.

    Attributes:
        kinds, names, numbers: as in a recording.
        owners: (events,) segment that made the storage; 0 for RUN.
        ordinals: (events,) index of the storage among those that this segment made; 0 for RUN.
        copies: (events,) copy of the second turn that it belongs to; 0 for the traced one, RUN.
    """

    kinds: IntArray
    names: IntArray
    numbers: np.ndarray
    owners: IntArray
    ordinals: IntArray
    copies: IntArray


class _Layout:
    """Concatenates segments and gives their storages new names.

    The storages that a segment makes in one place get consecutive names from a base. A name in an
    event is then the base of the owner's place plus the ordinal.
    """

    def __init__(self, recording: Recording, copies: int) -> None:
        self._copies = copies
        self._counts = {s: len(_made(recording, s)) for s in Segment}
        owner, ordinal, copy = _ownership(recording)
        self._purposes = {
            segment: _purposes(recording, segment, owner, ordinal, self._counts[segment])
            for segment in Segment
        }
        self._parts = {s: _part(recording, s, owner, ordinal, copy, copies) for s in Segment}
        self._sharing: dict[Segment, _SegmentEvents] = {}
        self._bases: dict[tuple[int, Segment, int], int] = {}
        self._named = 0
        self._all_purposes: list[IntArray] = []
        self._events: list[tuple[IntArray, IntArray, np.ndarray, IntArray]] = []
        self._steady_from = 0

    def mark_steady(self) -> None:
        self._steady_from = sum(len(event[0]) for event in self._events)

    def add(self, segment: Segment, place: int, step: int) -> None:
        """Append a segment of the turn at this position (0: of no turn) in this step."""
        self._bases[step, segment, place] = self._named
        self._named += self._counts[segment]
        self._all_purposes.append(self._purposes[segment])
        part = self._parts[segment]
        if (segment is Segment.FORWARD_2 and place < self._copies + 2) or (
            segment is Segment.BACKWARD_2 and place > 2
        ):
            part = self._before_last(segment)
        names = part.names.copy()
        moves = np.flatnonzero(part.kinds <= Kind.FREED)
        # Few combinations of owner and copy occur, so one base is looked up for each.
        keys = part.owners[moves] * (self._copies + 1) + part.copies[moves]
        for key in np.unique(keys):
            which = moves[keys == key]
            owner, copy = divmod(int(key), self._copies + 1)
            base = self._base(Segment(owner), copy, segment, place, step)
            names[which] = base + part.ordinals[which]
        label = np.full(len(names), int(segment), np.int64)
        self._events.append((part.kinds, names, part.numbers, label))

    def _before_last(self, segment: Segment) -> _SegmentEvents:
        """Events of a turn without frees of shared storages, which the last turn frees."""
        if segment not in self._sharing:
            part = self._parts[segment]
            turns = np.array([TURN.get(s, 0) for s in Segment])
            keep = (part.kinds != Kind.FREED) | (turns[part.owners] > 0)
            columns = (getattr(part, field.name)[keep] for field in fields(_SegmentEvents))
            self._sharing[segment] = _SegmentEvents(*columns)
        return self._sharing[segment]

    def _base(self, owner: Segment, copy: int, segment: Segment, place: int, step: int) -> int:
        if owner is Segment.FIRST_UPDATE:
            return self._bases[0, owner, 0]
        if owner not in TURN:
            return self._bases[step, owner, 0]
        if segment in TURN:
            at = place + TURN[owner] - TURN[segment]
        else:
            at = {1: 1, 2: 2 + copy, 3: self._copies + 3}[TURN[owner]]
        return self._bases[step, self._template(owner, at), at]

    def _template(self, owner: Segment, place: int) -> Segment:
        family = FORWARD if owner in FORWARD else BACKWARD
        return family[0 if place == 1 else 2 if place == self._copies + 3 else 1]

    def stream(self) -> Stream:
        kinds, names, numbers, segments = (
            np.concatenate(c) for c in zip(*self._events, strict=True)
        )
        return Stream(
            kinds=kinds,
            names=names,
            numbers=numbers,
            segments=segments,
            purposes=np.concatenate(self._all_purposes),
            steady_from=self._steady_from,
        )


def _made(recording: Recording, segment: Segment) -> IntArray:
    """Indices of the events of a segment that make storages."""
    return np.flatnonzero((recording.segments == segment) & (recording.kinds == Kind.MADE))


def _ownership(recording: Recording) -> tuple[IntArray, IntArray, IntArray]:
    """Segment that made each storage, its index there, and its copy; each (storages,) by name."""
    count = 1 + max(
        int(recording.names[recording.kinds <= Kind.FREED].max(initial=-1)),
        int(recording.ghosts[:, 0].max(initial=-1)),
    )
    owner = np.full(count, -1, np.int64)
    ordinal = np.zeros(count, np.int64)
    copy = np.zeros(count, np.int64)
    for segment in Segment:
        names = recording.names[_made(recording, segment)]
        owner[names] = segment
        ordinal[names] = np.arange(len(names))
    ghosts, likes, copies = recording.ghosts.T
    owner[ghosts], ordinal[ghosts], copy[ghosts] = owner[likes], ordinal[likes], copies
    return owner, ordinal, copy


def _part(  # noqa: PLR0913, PLR0917 - the columns of one recording
    recording: Recording,
    segment: Segment,
    owner: IntArray,
    ordinal: IntArray,
    copy: IntArray,
    copies: int,
) -> _SegmentEvents:
    events = np.flatnonzero(recording.segments == segment)
    names = recording.names[events]
    moves = recording.kinds[events] <= Kind.FREED
    storages = np.where(moves, names, 0)
    if len(owner) and (moves & (owner[storages] < 0)).any():
        raise StructureError("a storage is freed that no event made")
    owners = np.where(moves, owner[storages], 0)
    copied = np.where(moves, copy[storages], 0)
    ordinals = np.where(moves, ordinal[storages], 0)
    if segment not in TURN and segment not in UPDATES:
        # A storage of the second turn that is freed outside all turns (autocast's copies of
        # weights) is freed in every copy. The gradients freed after a step have events of their
        # own, by way of the untraced parameters.
        turns = np.array([TURN.get(s, 0) for s in Segment])
        times = np.where(moves & (turns[owners] == 2), 1 + copies, 1)
        events, names, owners, ordinals = (
            np.repeat(column, times) for column in (events, names, owners, ordinals)
        )
        ends = np.cumsum(times)
        copied = np.arange(len(events)) - np.repeat(ends - times, times)
    return _SegmentEvents(
        kinds=recording.kinds[events],
        names=names,
        numbers=recording.numbers[events],
        owners=owners,
        ordinals=ordinals,
        copies=copied,
    )


def _purposes(
    recording: Recording, segment: Segment, owner: IntArray, ordinal: IntArray, count: int
) -> IntArray:
    """Purpose of each storage that a segment makes, (count,)."""
    default = {
        Segment.HEAD: Purpose.HEAD,
        Segment.HEAD_BACKWARD: Purpose.HEAD,
        Segment.FIRST_UPDATE: Purpose.OPTIMIZER,
        Segment.UPDATE: Purpose.OPTIMIZER,
    }.get(segment, Purpose.CHECKPOINT if segment in FORWARD else Purpose.ACTIVATION)
    purposes = np.full(count, int(default), np.int64)
    for names, purpose in (
        (recording.gradients, Purpose.GRADIENT),
        (recording.workspaces, Purpose.WORKSPACE),
    ):
        own = names[owner[names] == segment]
        purposes[ordinal[own]] = purpose
    return purposes
