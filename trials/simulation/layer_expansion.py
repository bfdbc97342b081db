"""Expansion of a traced step of a few layers to the step of the whole model.

A turn is one period of the repeated layers: one layer, or one of each kind where kinds alternate.
Three turns are traced, because the first and the last have other neighbours. The events of the
second are copied for every turn between them. In a copy, a storage made by the second turn becomes
a storage of its own, and a storage of the turn before (or after) becomes that of the copy before
(or after).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trials.simulation.recording import (
    BACKWARD,
    BACKWARD_PASSES,
    FAMILIES,
    FORWARD,
    FORWARD_PASSES,
    TURN,
    UPDATES,
    Column,
    Held,
    IntArray,
    Kind,
    OperatorClass,
    Purpose,
    Rate,
    Recording,
    RepeatError,
    Segment,
    Stream,
    StructureError,
    Turns,
)

BoolArray = npt.NDArray[np.bool_]
OF_LATER = (Kind.ACCUMULATED, Kind.DROPPED, Kind.ADDED_ON_HOST)
"""Kinds of events that only a micro-batch after the first has."""
MicroBatch = tuple[int, int]
"""Number of the step, and of the micro-batch in it."""
Places = tuple[int, ...]
"""Positions of a turn among all, from 1."""
NO_TURN = (0,)
"""Place of a segment that belongs to no turn."""


def check_repeats(recording: Recording) -> None:
    """Check that the three turns make the same storages in the same order.

    Raises:
        RepeatError: they do not, so the second cannot represent others.
    """
    forward = (turns for turns, _ in FORWARD_PASSES)
    for family in (*forward, *(turns[1:] for turns, _ in BACKWARD_PASSES)):
        made = [_made(recording, segment) for segment in family]
        if any(len(one) != len(made[0]) for one in made[1:]):
            raise RepeatError("the layers that repeat do not make the same storages")
        sizes = [recording.numbers[one, Column.BYTES] for one in made]
        if any(not np.array_equal(one, sizes[0]) for one in sizes[1:]):
            raise RepeatError("the layers that repeat make storages of different sizes")


def whole_steps(
    recordings: Sequence[Recording], copies: int, micro_batches: int = 1, first: int = 0
) -> list[Stream]:
    """Two steps of the whole model at each batch size: the first, and one like all later ones.

    Gradients of the first micro-batch live until the update. A later one's are added to them and
    freed at once, as autograd's AccumulateGrad does.

    Args:
        recordings: recordings of three turns, or of the whole model (then there are no copies),
            which differ in their numbers alone.
        copies: number of turns that were not traced.
        micro_batches: forward and backward passes per step.
        first: 1 for the later step alone, whose operators need no other.
    """
    recording = recordings[0]
    layout = _Layout(recording, copies)
    for step, update in [(0, Segment.FIRST_UPDATE), (1, Segment.UPDATE)][first:]:
        for micro_batch in range(micro_batches):
            if micro_batch > 0:
                layout.add(Segment.FORGET, (step, micro_batch - 1), keeps_gradients=True)
            layout.begin_part()
            for segment, places in _order(recording, copies):
                layout.add(segment, (step, micro_batch), places)
        layout.begin_part()
        layout.add(update, (step, micro_batches - 1))
        layout.add(Segment.FORGET, (step, micro_batches - 1))
    return layout.streams(recordings, -1 - micro_batches)


def whole_model(held: Held, copies: int) -> Held:
    """Storages of the whole model before the first step."""
    is_middle = held.turns == 2
    # Where runs of the second turn begin and end: one in the model, one in a reference.
    ends = np.flatnonzero(np.diff(is_middle, prepend=False, append=False))

    def repeated(column: IntArray) -> IntArray:
        parts = np.split(column, ends)
        parts[1::2] = (np.tile(part, 1 + copies) for part in parts[1::2])
        return np.concatenate(parts)

    return Held(*(repeated(c) for c in (held.sizes, held.purposes, held.turns)))


def _order(recording: Recording, copies: int) -> list[tuple[Segment, Places]]:
    """Segments of a micro-batch in order, each with the positions at which it runs."""
    segments, first = np.unique(recording.segments, return_index=True)
    begins = dict(zip(segments.tolist(), first.tolist(), strict=True))
    middle = tuple(range(2, copies + 3))
    order: list[tuple[Segment, Places]] = [(Segment.BEFORE, NO_TURN)]
    forward = [p for p in FORWARD_PASSES if p[0][0] in begins]
    for turns, rest in sorted(forward, key=lambda p: begins[p[0][0]]):
        places = (1,), middle, (copies + 3,)
        order += [*zip(turns, places, strict=True), (rest, NO_TURN)]
    order.append((Segment.HEAD_BACKWARD, NO_TURN))
    for turns, rest in BACKWARD_PASSES:
        if turns[0] in begins:
            places = (copies + 3,), middle[::-1], (1,)
            order += [*zip(reversed(turns), places, strict=True), (rest, NO_TURN)]
    return order


@dataclass(frozen=True)
class _SegmentEvents:
    """Events of one segment, with the origin of their storages.

    Attributes:
        kinds, names: as in a recording.
        sources: (events,) index in the recording of the event that each copies.
        owners: (events,) segment that made the storage; 0 for RUN.
        ordinals: (events,) index of the storage among those that this segment made; 0 for RUN.
        copies: (events,) copy of the second turn that it belongs to; 0 for the traced one, RUN.
        gradients: (events,) whether the storage holds a gradient.
        outlive: (events,) whether it is a gradient that lives on after it was added.
    """

    kinds: IntArray
    names: IntArray
    sources: IntArray
    owners: IntArray
    ordinals: IntArray
    copies: IntArray
    gradients: BoolArray
    outlive: BoolArray

    @cached_property
    def moves(self) -> IntArray:
        """Indices of the events that allocate or free a storage."""
        return np.flatnonzero(self.kinds <= Kind.FREED)

    @cached_property
    def origins(self) -> tuple[list[tuple[int, int, int]], IntArray]:
        """Distinct (owner, copy, whether a gradient) of ``moves``, and the index of each's."""
        columns = (self.owners, self.copies, self.gradients)
        rows = np.stack([column[self.moves] for column in columns], axis=1)
        shape = rows.max(axis=0, initial=0) + 1
        keys, which = np.unique(np.ravel_multi_index(rows.T, shape), return_inverse=True)
        origins = zip(*(c.tolist() for c in np.unravel_index(keys, shape)), strict=True)
        return list(origins), which

    def where(self, chosen: BoolArray | IntArray) -> "_SegmentEvents":
        return _SegmentEvents(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def without_shared_frees(self) -> "_SegmentEvents":
        """Events without frees of storages that no turn made."""
        turns = np.array([TURN.get(s, 0) for s in Segment])
        return self.where((self.kinds != Kind.FREED) | (turns[self.owners] > 0))

    def of_first_micro_batch(self) -> "_SegmentEvents":
        """Events of the first micro-batch, whose gradients stay."""
        return self.where(~np.isin(self.kinds, OF_LATER))

    def added_to_gradients(self) -> "_SegmentEvents":
        """Events of a later micro-batch: each gradient is added to the first one's and freed."""
        is_added, on_host = (self.kinds == kind for kind in (Kind.ACCUMULATED, Kind.ADDED_ON_HOST))
        # Each becomes two: the sum and the free, but where that comes later, or a wait and the sum.
        times = np.where((is_added & ~self.outlive) | on_host, 2, 1)
        events = self.where(np.repeat(np.arange(len(times)), times))
        firsts = np.cumsum(times) - times
        kinds = np.where(np.isin(events.kinds, OF_LATER), Kind.FREED, events.kinds)
        names = events.names.copy()
        kinds[firsts[on_host]] = Kind.WAITED
        runs = firsts[is_added], firsts[on_host] + 1
        for run, work in zip(runs, (OperatorClass.MEMORY, OperatorClass.HOST_MEMORY), strict=True):
            kinds[run], names[run] = Kind.RUN, 4 * work + Rate.BF16
        return replace(events, kinds=kinds, names=names)


_ALWAYS = {Segment.BEFORE, Segment.HEAD_BACKWARD, *UPDATES}
"""Segments that are appended whether or not anything was recorded in them."""


class _Layout:
    """Concatenates segments and gives their storages new names.

    The storages that a segment makes in one place get consecutive names from a base. A name in an
    event is then the base of the owner's place plus the ordinal.
    """

    def __init__(self, recording: Recording, copies: int) -> None:
        self._copies = copies
        owner, ordinal, copy = _ownership(recording)
        # A step has few of the segments, besides those that every step has.
        segments = {Segment(s) for s in np.unique(recording.segments)} | _ALWAYS
        self._purposes = {s: _purposes(recording, s, owner, ordinal) for s in segments}
        parts = {s: _part(recording, s, owner, ordinal, copy, copies) for s in segments}
        # Of the first micro-batch, and of a later one.
        self._parts = (
            {s: part.of_first_micro_batch() for s, part in parts.items()},
            {s: part.added_to_gradients() for s, part in parts.items()},
        )
        # By micro-batch and pass, or segment of no turn: the base at each place.
        self._bases: dict[tuple[MicroBatch, Turns | Segment], IntArray] = {}
        self._named = 0
        self._all_purposes: list[IntArray] = []
        self._events: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        self._parts_from: list[int] = []
        self._first_update = 0

    def begin_part(self) -> None:
        """Begin a micro-batch or an update."""
        self._parts_from.append(sum(len(event[0]) for event in self._events))

    def add(
        self,
        segment: Segment,
        micro_batch: MicroBatch,
        places: Places = NO_TURN,
        *,
        keeps_gradients: bool = False,
    ) -> None:
        """Append a segment.

        Args:
            segment: segment to append.
            micro_batch: micro-batch of the step that it belongs to.
            places: positions of its turn, at each of which it is appended.
            keeps_gradients: whether gradients stay that the segment frees.
        """
        purposes = self._purposes[segment]
        key = micro_batch, FAMILIES.get(segment, segment)
        bases = self._bases.setdefault(key, np.full(self._copies + 4, -1))
        bases[list(places)] = self._named + len(purposes) * np.arange(len(places))
        if segment is Segment.FIRST_UPDATE:
            self._first_update = self._named
        self._named += len(purposes) * len(places)
        self._all_purposes.append(np.tile(purposes, len(places)))
        part = self._parts[micro_batch[1] > 0][segment]
        if keeps_gradients:
            part = part.where(~part.gradients)
        if len(places) > 1:  # the last copy frees what all share
            self._append(part.without_shared_frees(), segment, micro_batch, places[:-1])
        self._append(part, segment, micro_batch, places[-1:])

    def _append(
        self, part: _SegmentEvents, segment: Segment, micro_batch: MicroBatch, places: Places
    ) -> None:
        origins, which = part.origins
        bases = np.zeros((len(places), len(origins)), np.int64)
        for column, (owner, copy, is_gradient) in enumerate(origins):
            in_first = is_gradient and segment in UPDATES
            made_in = (micro_batch[0], 0) if in_first else micro_batch
            bases[:, column] = self._base(Segment(owner), copy, segment, np.array(places), made_in)
        if (bases < 0).any():
            raise StructureError("a storage is freed before an event makes it")
        times = len(places)
        names = np.tile(part.names, (times, 1))
        names[:, part.moves] = bases[:, which] + part.ordinals[part.moves]
        label = np.full(names.size, int(segment), np.int64)
        columns = np.tile(part.kinds, times), names.ravel(), np.tile(part.sources, times), label
        self._events.append(columns)

    def _base(
        self, owner: Segment, copy: int, segment: Segment, places: IntArray, micro_batch: MicroBatch
    ) -> IntArray | int:
        if owner is Segment.FIRST_UPDATE:
            return self._first_update
        bases = self._bases[micro_batch, FAMILIES.get(owner, owner)]
        if owner not in TURN:
            return bases[list(NO_TURN)]
        if segment in TURN:
            return bases[places + TURN[owner] - TURN[segment]]
        return bases[[{1: 1, 2: 2 + copy, 3: self._copies + 3}[TURN[owner]]]]

    def streams(self, recordings: Sequence[Recording], steady_part: int) -> list[Stream]:
        kinds, names, sources, segments = (
            np.concatenate(c) for c in zip(*self._events, strict=True)
        )
        purposes = np.concatenate(self._all_purposes)
        return [
            Stream(
                kinds=kinds,
                names=names,
                segments=segments,
                numbers=recording.numbers,
                rows=sources,
                purposes=purposes,
                parts_from=tuple(self._parts_from),
                steady_from=self._parts_from[steady_part],
            )
            for recording in recordings
        ]


def _made(recording: Recording, segment: int) -> IntArray:
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
    for segment in np.unique(recording.segments):
        names = recording.names[_made(recording, segment)]
        owner[names] = segment
        ordinal[names] = np.arange(len(names))
    ghosts, likes, copies = recording.ghosts.T
    owner[ghosts], ordinal[ghosts], copy[ghosts] = owner[likes], ordinal[likes], copies
    return owner, ordinal, copy


NAMING = (Kind.MADE, Kind.FREED, Kind.ACCUMULATED, Kind.DROPPED)
"""Kinds of events that name a storage."""


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
    moves = np.isin(recording.kinds[events], NAMING)
    storages = np.where(moves, names, 0)
    if len(owner) and (moves & (owner[storages] < 0)).any():
        raise StructureError("a storage is freed that no event made")
    owners = np.where(moves, owner[storages], 0)
    copied = np.where(moves, copy[storages], 0)
    ordinals = np.where(moves, ordinal[storages], 0)
    gradients = moves & np.isin(storages, np.r_[recording.gradients, recording.ghosts[:, 0]])
    dropped = recording.names[recording.kinds == Kind.DROPPED]
    outlive = moves & np.isin(storages, dropped)
    if segment not in TURN and segment not in UPDATES:
        # A storage of the second turn that is freed outside all turns (autocast's copies of
        # weights) is freed in every copy. The gradients freed after a step have events of their
        # own, by way of the untraced parameters.
        turns = np.array([TURN.get(s, 0) for s in Segment])
        times = np.where(moves & (turns[owners] == 2), 1 + copies, 1)
        events, names, owners, ordinals, gradients, outlive = (
            np.repeat(column, times)
            for column in (events, names, owners, ordinals, gradients, outlive)
        )
        ends = np.cumsum(times)
        copied = np.arange(len(events)) - np.repeat(ends - times, times)
    return _SegmentEvents(
        kinds=recording.kinds[events],
        names=names,
        sources=events,
        owners=owners,
        ordinals=ordinals,
        copies=copied,
        gradients=gradients,
        outlive=outlive,
    )


def _purposes(
    recording: Recording, segment: Segment, owner: IntArray, ordinal: IntArray
) -> IntArray:
    """Purpose of each storage that a segment makes, (storages,)."""
    default = {
        **dict.fromkeys((Segment.BEFORE, *BACKWARD, Segment.AFTER), Purpose.ACTIVATION),
        **dict.fromkeys((turn for turns in FORWARD for turn in turns), Purpose.CHECKPOINT),
        Segment.FIRST_UPDATE: Purpose.OPTIMIZER,
        Segment.UPDATE: Purpose.OPTIMIZER,
        Segment.FORGET: Purpose.ACTIVATION,
    }.get(segment, Purpose.HEAD)
    purposes = np.full(len(_made(recording, segment)), int(default), np.int64)
    for names, purpose in (
        (recording.gradients, Purpose.GRADIENT),
        (recording.workspaces, Purpose.WORKSPACE),
    ):
        own = names[owner[names] == segment]
        purposes[ordinal[own]] = purpose
    return purposes
