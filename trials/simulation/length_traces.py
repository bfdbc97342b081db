"""Traces of a cell at any length, from traces at three lengths. No torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from trials.simulation.recording import FloatArray, StructureError, with_updates_of
from trials.simulation.trace_cache import StepTrace
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
