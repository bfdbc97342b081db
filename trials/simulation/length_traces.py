"""Traces of a cell at any length or number of ranks, from traces at a few. No torch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from trials.simulation.recording import (
    Column,
    FloatArray,
    Held,
    Kind,
    OperatorClass,
    Recording,
    StructureError,
    with_updates_of,
)
from trials.simulation.trace_cache import StepTrace, TraceError
from trials.simulation.trace_request import TraceRequest
from trials.simulation.whole_step import interpolated

DIGITS = 6  # decimals that interpolation keeps: operators' numbers are whole, or averages per step


class TraceSource(Protocol):
    """Source of traces."""

    @property
    def folder(self) -> Path | None:
        """Folder of the traces on disk; None where none is kept."""

    def get(self, request: TraceRequest) -> StepTrace:
        """Trace of a cell; raises ``TraceError`` if it cannot be traced."""

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Make the missing traces, several at a time; ``get`` raises for those that failed."""


class LengthTraces:
    """Traces of cells that differ in their length.

    All numbers of a trace are polynomials of the length: sizes of the first degree, but for
    attention scores, and operations of the second. So traces at three lengths determine all others.

    Args:
        traces: source of the traces at ``lengths``, and of any that these do not determine.
        lengths: tokens per example, traced together; fewer than three determine no other length.
    """

    def __init__(self, traces: TraceSource, lengths: Sequence[int]) -> None:
        self._traces = traces
        self._lengths = tuple(lengths)

    @property
    def folder(self) -> Path | None:
        """Folder of the traces on disk."""
        return self._traces.folder

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Make the missing traces at the lengths that determine all others."""
        needed = {r.key: r for request in requests for r in self._needed(request)}
        self._traces.prepare(list(needed.values()))

    def get(self, request: TraceRequest) -> StepTrace:
        """Trace of a cell at its length.

        Raises:
            TraceError: the cell cannot be traced.
        """
        needed = self._needed(request)
        if request in needed:
            return self._traces.get(request)
        self._traces.prepare(needed)
        try:
            return _between(self._lengths, [self._traces.get(r) for r in needed], request)
        except StructureError:  # for example, a scan in Python loops over the tokens
            return self._traces.get(request)

    def _needed(self, request: TraceRequest) -> list[TraceRequest]:
        """Traces that determine a request, and those that are made with it."""
        cell = request.cell
        is_alone = cell.seq_len not in self._lengths and len(self._lengths) < 3
        if is_alone or request.routing.sigma:  # tokens that an expert draws are rounded
            return [request]
        return [
            request.model_copy(update={"cell": cell.model_copy(update={"seq_len": tokens})})
            for tokens in self._lengths
        ]


def _between(
    lengths: Sequence[int], traces: Sequence[StepTrace], request: TraceRequest
) -> StepTrace:
    """Trace at the length of a request, from traces at other lengths.

    Raises:
        StructureError: the traces differ in more than numbers.
    """
    first = traces[0]
    like = first.recordings[0]
    alike = [[with_updates_of(r, like).numbers for r in trace.recordings] for trace in traces]

    def at(batch_size: int) -> FloatArray:
        numbers = [
            interpolated(trace.batch_sizes, n, batch_size)
            for trace, n in zip(traces, alike, strict=True)
        ]
        return np.round(interpolated(lengths, numbers, request.cell.seq_len), DIGITS)

    recordings = tuple(replace(like, numbers=at(size)) for size in request.batch_sizes)
    return replace(first, batch_sizes=request.batch_sizes, recordings=recordings)


class RankTraces:
    """Traces of cells that differ in the number of ranks among which FSDP2 divides them.

    Where the least and the greatest number divide all weights evenly, a storage of ``n`` ranks has
    ``a + b / n`` bytes, and the ranks run the same operators. So of several numbers that are asked
    for at once, these two determine those in between that divide the greatest.

    Args:
        traces: source of the other traces.
    """

    def __init__(self, traces: TraceSource) -> None:
        self._traces = traces
        self._between: dict[str, StepTrace] = {}

    @property
    def folder(self) -> Path | None:
        """Folder of the traces on disk."""
        return self._traces.folder

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Make the missing traces, several at a time."""
        unknown = {r.key: r for r in requests}
        for key in unknown.keys() & self._between.keys():
            del unknown[key]
        ends = _ends(unknown)
        self._traces.prepare([r for key, r in unknown.items() if key not in ends])
        for key, (least, most) in ends.items():
            try:
                traces = self._traces.get(least), self._traces.get(most)
                self._between[key] = _among(_ranks(unknown[key]), traces, least, most)
            except (StructureError, TraceError):
                continue
        self._traces.prepare([unknown[key] for key in ends if key not in self._between])

    def get(self, request: TraceRequest) -> StepTrace:
        """Trace of a cell.

        Raises:
            TraceError: the cell cannot be traced.
        """
        between = self._between.get(request.key)
        return self._traces.get(request) if between is None else between


def _ranks(request: TraceRequest) -> int:
    """Number of ranks among which FSDP2 alone divides a model, on the GPU; 0 for none."""
    layout = request.sharded
    is_plain = layout is not None and layout.strategy == "fsdp2" and layout.offload is None
    return layout.gpus if layout is not None and is_plain else 0


def _ends(
    requests: dict[str, TraceRequest],
) -> dict[str, tuple[TraceRequest, TraceRequest]]:
    """Requests for the least and the greatest number of ranks, by the key of one in between."""
    alike: defaultdict[tuple[str, str], dict[int, tuple[str, TraceRequest]]] = defaultdict(dict)
    for key, request in requests.items():
        if layout := _ranks(request) and request.sharded:
            alone = request.cell.model_copy(update={"parallel": None})
            of_one = request.model_copy(update={"cell": alone}).key
            settings = layout.model_copy(update={"gpus": 1}).model_dump_json()
            alike[of_one, settings][layout.gpus] = key, request
    ends = {}
    for by_ranks in alike.values():
        least, *between, most = sorted(by_ranks) if len(by_ranks) > 1 else (0, 0)
        for ranks in between:
            if most % ranks == 0:
                ends[by_ranks[ranks][0]] = by_ranks[least][1], by_ranks[most][1]
    return ends


def _among(
    ranks: int, traces: tuple[StepTrace, StepTrace], least: TraceRequest, most: TraceRequest
) -> StepTrace:
    """Trace of a number of ranks, from traces of fewer and of more.

    Raises:
        StructureError: they differ in more than shares of even shards.
    """
    few, many = traces
    counts = _ranks(least), ranks, _ranks(most)
    if (few.batch_sizes, few.copies) != (many.batch_sizes, many.copies):
        raise StructureError("the traces are of other batches or layers")
    sizes = few.held.sizes, many.held.sizes
    _check_alike(few.held, many.held, "sizes")
    if not _is_even(*sizes, counts)[sizes[0] != sizes[1]].all():
        raise StructureError("the shards are uneven")
    return replace(
        few,
        held=replace(few.held, sizes=_by_shares(*sizes, counts).astype(np.int64)),
        recordings=tuple(
            _recording_among(*pair, counts)
            for pair in zip(few.recordings, many.recordings, strict=True)
        ),
    )


Counts = tuple[int, int, int]
"""Number of ranks of one trace, of the trace between, and of the other trace."""


def _recording_among(few: Recording, many: Recording, counts: Counts) -> Recording:
    _check_alike(few, many, "numbers")
    differs = few.numbers != many.numbers
    is_collective = (few.kinds == Kind.RUN) & (few.names // 4 == OperatorClass.COLLECTIVE)
    of_group = differs[:, Column.PRODUCTS] & is_collective  # its number of ranks
    allowed = np.zeros_like(differs)
    allowed[:, Column.BYTES] = True
    allowed[:, Column.PRODUCTS] = of_group
    for column in (Column.ROWS, Column.LAUNCHES):  # of operators on a shard
        allowed[:, column] = _is_even(few.numbers[:, column], many.numbers[:, column], counts)
    if (differs & ~allowed).any():
        raise StructureError("the ranks differ in more than the sizes of their shards")
    numbers = np.where(differs, _by_shares(few.numbers, many.numbers, counts), few.numbers)
    numbers[of_group, Column.PRODUCTS] = counts[1]
    return replace(few, numbers=numbers)


def _check_alike(one: Held | Recording, other: Held | Recording, numbers: str) -> None:
    """Check that all columns but one are equal."""
    names = [field.name for field in fields(one) if field.name != numbers]
    if not all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names):
        raise StructureError("the ranks run other operators")


def _is_even(few: np.ndarray, many: np.ndarray, counts: Counts) -> np.ndarray:
    """Whether each number is an equal share of one total."""
    return np.isclose(few * float(counts[0]), many * float(counts[2]), rtol=1e-12, atol=0)


def _by_shares(few: np.ndarray, many: np.ndarray, counts: Counts) -> np.ndarray:
    """Values ``a + b / n`` at a number of ranks, from those at a lesser and a greater one."""
    least, ranks, most = map(float, counts)
    weights = least * (most - ranks), most * (ranks - least)
    between = (few * weights[0] + many * weights[1]) / (ranks * (most - least))
    return np.where(_is_even(few, many, counts), few * least / ranks, between)
