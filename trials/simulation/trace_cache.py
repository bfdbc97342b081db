"""Traces kept on disk, made by child processes when they are missing. No torch here."""

import contextlib
import json
import os
import subprocess
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from gpu_catalog.errors import UserError
from trials.simulation.recording import Held, Recording, Segment, StructureError, with_updates_of
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing_child import TracingChild, cache_folder

LIMIT_SECONDS = 180.0
"""How long a trace may take. Most take seconds."""
MANY_EVENTS = 1_000_000
"""A step of so many takes long to replay, too."""
STARTING_SECONDS = 120.0
"""What a process that traces takes besides, on the slowest of machines."""


def _unheard(_: str) -> None:
    """Of what takes long nobody wants to know."""


class TraceError(UserError):
    """A cell cannot be traced; one line on why."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A cell's step at one batch size, or at two that tell the others.

    Attributes:
        batch_sizes: of the recordings.
        recordings: alike but for their numbers.
        held: what the model holds throughout.
        copies: turns of layers that were not traced.
    """

    batch_sizes: tuple[int, ...]
    recordings: tuple[Recording, ...]
    held: Held
    copies: int

    @property
    def events(self) -> int:
        """Of a step of the whole model, about."""
        kinds, segments = self.recordings[0].kinds, self.recordings[0].segments
        middle = np.isin(segments, (Segment.FORWARD_2, Segment.BACKWARD_2)).sum()
        return len(kinds) + self.copies * int(middle)


def write_trace(path: Path, trace: StepTrace) -> None:
    """Writes a trace, whole or not at all."""
    columns = {f"held.{f.name}": getattr(trace.held, f.name) for f in fields(Held)}
    for number, recording in enumerate(trace.recordings):
        for field in fields(Recording):
            if number == 0 or field.name == "numbers":
                columns[f"{number}.{field.name}"] = _packed(getattr(recording, field.name))
    columns["batch_sizes"] = np.array(trace.batch_sizes)
    columns["copies"] = np.array(trace.copies)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.savez_compressed(file, **columns)
    Path(file.name).replace(path)


def not_kept(folder: Path, error: OSError) -> str:
    """Why a trace is refused that cannot be written, and what to do."""
    return f"the trace cannot be kept in {folder} ({error.strerror}): set XDG_CACHE_HOME"


def _packed(column: np.ndarray) -> np.ndarray:
    return column if column.dtype == np.float64 else column.astype(np.int32)


def read_trace(path: Path) -> StepTrace:
    """Reads what ``write_trace`` wrote.

    Raises:
        OSError: there is none, or it is none of ours.
    """
    try:
        with path.open("rb") as file, np.load(file) as stored:
            columns = {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, KeyError, BadZipFile, zlib.error) as error:
        raise OSError(f"{path}: not a trace ({error})") from error
    sizes = tuple(int(size) for size in columns["batch_sizes"])
    shared = {
        f.name: columns[f"0.{f.name}"].astype(np.int64)
        for f in fields(Recording)
        if f.name != "numbers"
    }
    return StepTrace(
        batch_sizes=sizes,
        recordings=tuple(
            Recording(numbers=columns[f"{number}.numbers"], **shared)
            for number in range(len(sizes))
        ),
        held=Held(**{f.name: columns[f"held.{f.name}"] for f in fields(Held)}),
        copies=int(columns["copies"]),
    )


def joined(traces: Sequence[StepTrace]) -> StepTrace:
    """One trace of traces at one batch size each.

    Raises:
        StructureError: they differ in more than numbers.
    """
    first, *others = traces
    alike = [with_updates_of(other.recordings[0], first.recordings[0]) for other in others]
    return StepTrace(
        batch_sizes=tuple(size for trace in traces for size in trace.batch_sizes),
        recordings=(*first.recordings, *alike),
        held=first.held,
        copies=first.copies,
    )


class Traces:
    """Gives traces: from memory, from disk, or made.

    Args:
        folder: where they are kept; the user's cache unless told otherwise.
        workers: child processes that make them at a time.
        ahead: children that are there already; those that are asked are taken from it.
        tell: is given a line on what takes longer than usual, by other threads.
        limit_seconds: how long a trace may take; what takes longer is refused.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        workers: int | None = None,
        ahead: list[TracingChild] | None = None,
        tell: Callable[[str], None] = _unheard,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._folder = cache_folder() if folder is None else folder
        self._workers = workers or min(4, len(os.sched_getaffinity(0)))
        self._ahead = [] if ahead is None else ahead
        self._tell = tell
        self._told: set[str] = set()
        self._limit_seconds = limit_seconds
        self._known: dict[str, StepTrace] = {}
        self._refused: dict[str, str] = {}

    @property
    def on_disk(self) -> "Traces":
        """The same, to be sent to another process: without what memory has of them."""
        traces = Traces(self._folder, workers=self._workers, limit_seconds=self._limit_seconds)
        traces._refused |= self._refused
        return traces

    def get(self, request: TraceRequest) -> StepTrace:
        """The trace of a cell.

        Raises:
            TraceError: it cannot be traced.
        """
        self.prepare([request])
        if request.key in self._refused:
            raise TraceError(self._refused[request.key])
        return self._known[request.key]

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Makes what is missing of these, several at a time; what cannot be is told by ``get``."""
        missing = {}
        for request in requests:
            if request.key not in self._known and request.key not in self._refused:
                with contextlib.suppress(OSError):
                    self._know(request, read_trace(self._path(request)))
                    continue
                missing[request.key] = request
        if len(missing) == 1 and self._workers > 1:
            self._make_in_halves(*missing.values())
        else:
            self._make(list(missing.values()))

    def _path(self, request: TraceRequest) -> Path:
        return self._folder / f"{request.key}.npz"

    def _make_in_halves(self, request: TraceRequest) -> None:
        """Traces the batch sizes of a lone request at the same time."""
        if len(request.batch_sizes) == 1:
            self._make([request])
            return
        halves = [
            request.model_copy(update={"batch_size": size, "with_updates": number == 0})
            for number, size in enumerate(request.batch_sizes)
        ]
        # In a folder of its own: what another process asks for at the same time is not touched.
        with tempfile.TemporaryDirectory() as folder:
            apart = Traces(
                Path(folder),
                workers=self._workers,
                ahead=self._ahead,
                tell=self._tell_once,
                limit_seconds=self._limit_seconds,
            )
            apart._take_in(halves, apart._traced(halves, apart=True))
            try:
                whole = joined([apart.get(half) for half in halves])
            except (StructureError, TraceError) as error:
                self._refused[request.key] = str(error)
                return
        try:
            write_trace(self._path(request), whole)
            self._know(request, whole)
        except OSError as error:
            self._refused[request.key] = not_kept(self._folder, error)

    def _make(self, requests: Sequence[TraceRequest]) -> None:
        groups = defaultdict(list)
        for request in requests:
            # A model's traces share what its process builds and warms up.
            groups[request.settles, request.cell.model].append(request)
        parts = _parted(list(groups.values()), self._workers)
        if not parts:
            return
        with ThreadPoolExecutor(len(parts)) as threads:
            for part, told in zip(parts, threads.map(self._traced, parts), strict=True):
                self._take_in(part, told)

    def _traced(
        self, requests: Sequence[TraceRequest], *, apart: bool = False
    ) -> dict[str, str | None]:
        """Has a process trace these; why not, by key, None for those that it traced.

        Args:
            requests: what is to be traced.
            apart: at the same time, by a process for each.
        """
        lines = (f"{r.key} {r.model_dump_json()}\n" for r in requests)
        how = (str(self._folder), apart, self._limit_seconds)
        longest = STARTING_SECONDS + self._limit_seconds * (1 + len(requests))
        try:
            child = self._ahead.pop()
        except IndexError:
            child = TracingChild()
        try:
            answered, printed = child.answer(lines, how, longest, self._tell_once)
        except subprocess.TimeoutExpired:
            # It looks to the time itself: what it runs has not come back from PyTorch.
            return {
                r.key: f"{r.model.name} cannot be traced: no answer in {longest:g} s"
                for r in requests
            }
        told = dict(json.loads(line) for line in answered.splitlines() if line.startswith("["))
        ended_early = _last_line(printed)
        return {request.key: told.get(request.key, ended_early) for request in requests}

    def _know(self, request: TraceRequest, trace: StepTrace) -> None:
        self._known[request.key] = trace
        if trace.events > MANY_EVENTS:
            self._tell_once(
                f"{request.model.name}: a step is {trace.events / 1e6:.0f} million events, which "
                "take minutes to replay"
            )

    def _tell_once(self, text: str) -> None:
        """Processes that trace the same have the same to tell."""
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _take_in(self, requests: Sequence[TraceRequest], told: dict[str, str | None]) -> None:
        for request in requests:
            refusal = told[request.key]
            if refusal is None:
                try:
                    self._know(request, read_trace(self._path(request)))
                except OSError as error:
                    refusal = f"the trace was made and cannot be read: {error}"
            if refusal is not None:
                self._refused[request.key] = refusal


def _parted(groups: list[list[TraceRequest]], workers: int) -> list[list[TraceRequest]]:
    """Requests for each process: none that settles on two things, the largest groups apart."""
    parts: list[list[TraceRequest]] = []
    for group in sorted(groups, key=len, reverse=True):
        fitting = [part for part in parts if part[0].settles == group[0].settles]
        if fitting and len(parts) >= workers:
            min(fitting, key=len).extend(group)
        else:
            parts.append(list(group))
    if len(parts) == 1 and workers > 1 and len(parts[0]) > workers:
        half = len(parts[0]) // 2
        parts = [parts[0][:half], parts[0][half:]]
    return parts


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"the trace ended early: {lines[-1] if lines else 'without a word'}"
