"""Cache of traces on disk; child processes make missing ones. No torch here."""

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from threading import RLock, Thread
from typing import IO
from zipfile import BadZipFile

import numpy as np

from gpu_catalog.errors import UserError
from trials.records.built import ParameterCounts
from trials.simulation.recording import TURN, Held, Recording, StructureError, with_updates_of
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing_child import CHILDREN, TracingChildren, cache_folder
from trials.thread_pool import thread_pool

LIMIT_SECONDS = 180.0
"""Most CPU seconds of a trace. Most take a few."""
BUSY = 5
"""Seconds that a trace may last for each of its CPU seconds: other programs may run beside it."""
MANY_EVENTS = 1_000_000
"""Events of a step from which on a replay takes minutes."""
GIVEN_UP = "tracing took more than"
"""Start of the line that a process leaves as it gives up a trace."""
MAKING = RLock()
"""Held by the thread that reads or makes traces."""
FEW = 2
"""Most requests for one model whose batch sizes are all traced at the same time."""
STARTING_SECONDS = 120.0
"""Longest start of a tracing process, on the slowest machine."""


def _ignore(_: str) -> None:
    """Drop a line on progress."""


class TraceError(UserError):
    """A cell cannot be traced; one line on why."""


@dataclass(frozen=True)
class StepTrace:
    """Trace of a cell's step at one batch size, or at two that determine all others.

    Attributes:
        batch_sizes: batch size of each recording.
        recordings: recordings that differ only in their numbers.
        held: storages of the model itself.
        copies: number of turns of layers that were not traced.
        host_bytes: most bytes at once of the tensors that a rank keeps on the host, from its start
            on, in steps of one micro-batch and of several; empty where it keeps none there.
        parameters: parameter counts of the whole model, on all ranks; absent in tests of a step.
    """

    batch_sizes: tuple[int, ...]
    recordings: tuple[Recording, ...]
    held: Held
    copies: int
    host_bytes: tuple[int, ...] = ()
    parameters: ParameterCounts | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of all content: equal traces have equal digests, made or read or interpolated."""
        first = self.recordings[0]
        columns = [getattr(first, f.name) for f in fields(Recording) if f.name != "numbers"]
        columns += [recording.numbers for recording in self.recordings]
        columns += [getattr(self.held, f.name) for f in fields(Held)]
        digest = hashlib.sha256(repr((self.batch_sizes, self.copies)).encode())
        for column in columns:
            digest.update(repr(column.shape).encode())
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    @property
    def events(self) -> int:
        """Approximate number of events in a step of the whole model."""
        kinds, segments = self.recordings[0].kinds, self.recordings[0].segments
        middle = np.isin(segments, [s for s, turn in TURN.items() if turn == 2]).sum()
        return len(kinds) + self.copies * int(middle)


def write_trace(path: Path, trace: StepTrace) -> None:
    """Write a trace, whole or not at all."""
    columns = {f"held.{f.name}": getattr(trace.held, f.name) for f in fields(Held)}
    for number, recording in enumerate(trace.recordings):
        for field in fields(Recording):
            if number == 0 or field.name == "numbers":
                columns[f"{number}.{field.name}"] = _packed(getattr(recording, field.name))
    columns["batch_sizes"] = np.array(trace.batch_sizes)
    columns["copies"] = np.array(trace.copies)
    columns["host_bytes"] = np.array(trace.host_bytes, np.int64)
    counts = {} if trace.parameters is None else trace.parameters.model_dump()
    columns["parameters"] = np.array(list(counts.values()), np.int64)
    write_whole(path, lambda file: np.savez_compressed(file, **columns))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file, whole or not at all: other processes read the old or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        part = Path(file.name)
        try:
            write(file)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_failure(folder: Path, error: OSError) -> str:
    """Reason and remedy for a trace that cannot be written."""
    return f"the trace cannot be written to {folder} ({error.strerror}): set XDG_CACHE_HOME"


def _packed(column: np.ndarray) -> np.ndarray:
    return column if column.dtype == np.float64 else column.astype(np.int32)


def read_trace(path: Path) -> StepTrace:
    """Read a trace that ``write_trace`` wrote.

    Raises:
        OSError: the file is missing or no trace.
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
        host_bytes=tuple(int(size) for size in columns["host_bytes"]),
        parameters=_counts(columns["parameters"]),
    )


def _counts(column: np.ndarray) -> ParameterCounts | None:
    fields = dict(zip(ParameterCounts.model_fields, map(int, column), strict=False))
    return ParameterCounts(**fields) if fields else None


def joined(traces: Sequence[StepTrace]) -> StepTrace:
    """Join traces of one batch size each.

    Raises:
        StructureError: the traces differ in more than numbers.
    """
    first, *others = traces
    alike = [with_updates_of(other.recordings[0], first.recordings[0]) for other in others]
    return StepTrace(
        batch_sizes=tuple(size for trace in traces for size in trace.batch_sizes),
        recordings=(*first.recordings, *alike),
        held=first.held,
        copies=first.copies,
        host_bytes=first.host_bytes,
        parameters=first.parameters,
    )


class Traces:
    """Source of traces: memory, then disk, then a tracing process.

    Args:
        folder: folder of the traces; absent for the user's cache.
        workers: most processes that trace at a time, for one choice of Mamba kernels.
        children: tracing processes that wait for requests.
        report: called with a line on each trace that takes long, from other threads.
        limit_seconds: most CPU seconds of a trace; one that takes more is refused.
        meanwhile: called once in a thread while processes make traces.

    Attributes:
        folder: folder of the traces.
    """

    def __init__(  # noqa: PLR0913 - settings with defaults
        self,
        folder: Path | None = None,
        *,
        workers: int | None = None,
        children: TracingChildren = CHILDREN,
        report: Callable[[str], None] = _ignore,
        limit_seconds: float = LIMIT_SECONDS,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.folder: Path = cache_folder() if folder is None else folder
        self._earlier = self.folder  # of traces whose updates others may share
        self._workers = workers or min(4, len(os.sched_getaffinity(0)))
        self._children = children
        self._report = report
        self._reported: set[str] = set()
        self._limit_seconds = limit_seconds
        self._meanwhile = meanwhile
        self._traces: dict[str, StepTrace] = {}
        self._refused: dict[str, str] = {}

    @property
    def on_disk(self) -> "Traces":
        """A copy without the traces in memory, to be sent to another process."""
        traces = Traces(self.folder, workers=self._workers, limit_seconds=self._limit_seconds)
        traces._refused |= self._refused
        return traces

    def get(self, request: TraceRequest) -> StepTrace:
        """Trace of a cell.

        Raises:
            TraceError: the cell cannot be traced.
        """
        self.prepare([request])
        if request.key in self._refused:
            raise TraceError(self._refused[request.key])
        return self._traces[request.key]

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Make the missing traces, several at a time; ``get`` raises for those that failed."""
        unknown = {r.key: r for r in requests}
        for key in unknown.keys() & (self._traces.keys() | self._refused.keys()):
            del unknown[key]
        if unknown:
            with MAKING:  # else threads that want the same would make it more than once
                self._prepare(unknown)

    def _prepare(self, unknown: Mapping[str, TraceRequest]) -> None:
        missing = {}
        for key, request in unknown.items():
            if key not in self._traces and key not in self._refused:
                with contextlib.suppress(OSError):
                    self._keep(request, read_trace(self._path(request)))
                    continue
                missing[key] = request
        if missing and self._meanwhile is not None:
            Thread(target=self._meanwhile).start()
            self._meanwhile = None
        requests = list(missing.values())
        if len({_group(r) for r in requests}) == 1 and len(requests) <= FEW and self._workers > 1:
            self._make_apart(requests)
        else:
            self._make(requests)

    def _path(self, request: TraceRequest) -> Path:
        return self.folder / f"{request.key}.npz"

    def _make_apart(self, requests: Sequence[TraceRequest]) -> None:
        """Trace every batch size of a few requests for one model at the same time."""
        parts = {request.key: _one_size_each(request) for request in requests}
        together = [part for of_one in parts.values() for part in of_one]
        # A folder of its own leaves the files of other processes alone.
        with tempfile.TemporaryDirectory() as folder:
            apart = Traces(
                Path(folder),
                workers=self._workers,
                children=self._children,
                report=self._report_once,
                limit_seconds=self._limit_seconds,
            )
            apart._earlier = self.folder
            apart._take_in(together, apart._traced(together, processes=None))
            for request in requests:
                try:
                    whole = joined([apart.get(part) for part in parts[request.key]])
                    write_trace(self._path(request), whole)
                except (StructureError, TraceError) as error:
                    self._refused[request.key] = str(error)
                except OSError as error:
                    self._refused[request.key] = write_failure(self.folder, error)
                else:
                    self._keep(request, whole)

    def _make(self, requests: Sequence[TraceRequest]) -> None:
        parts = defaultdict(list)
        for request in requests:
            parts[request.process_choice].append(request)
        if not parts:
            return
        processes = max(self._workers // len(parts), 1)
        with thread_pool(len(parts)) as threads:
            traced = threads.map(partial(self._traced, processes=processes), parts.values())
            for part, refusals in zip(parts.values(), traced, strict=True):
                self._take_in(part, refusals)

    def _traced(
        self, requests: Sequence[TraceRequest], *, processes: int | None
    ) -> dict[str, str | None]:
        """Trace requests in a child process; return refusals by key, None for those traced.

        Args:
            requests: requests to trace.
            processes: number of processes that it forks for them; None for one for each, where all
                are for one model.
        """
        lines = (f"{r.key} {r.model_dump_json()}\n" for r in requests)
        settings = (str(self.folder), str(self._earlier), processes, self._limit_seconds)
        longest = STARTING_SECONDS + BUSY * self._limit_seconds * (1 + len(requests))
        try:
            with self._children.one() as child:
                replies, printed = child.answer(lines, settings, longest, self._report_once)
        except TimeoutError:
            # The child enforces its own limit, unless it hangs inside PyTorch.
            return {
                r.key: f"{r.model.name} cannot be traced: no answer in {longest:g} s"
                for r in requests
            }
        refusals = dict(json.loads(line) for line in replies.splitlines() if line.startswith("["))
        ended_early = _last_line(printed)
        return {request.key: refusals.get(request.key, ended_early) for request in requests}

    def _keep(self, request: TraceRequest, trace: StepTrace) -> None:
        self._traces[request.key] = trace
        if trace.events > MANY_EVENTS:
            self._report_once(
                f"{request.model.name}: a step is {trace.events / 1e6:.0f} million events, which "
                "take minutes to replay"
            )

    def _report_once(self, text: str) -> None:
        """Report a line once: processes that trace parts of one cell report the same."""
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)

    def _take_in(self, requests: Sequence[TraceRequest], refusals: dict[str, str | None]) -> None:
        for request in requests:
            refusal = refusals[request.key]
            if refusal is None:
                try:
                    self._keep(request, read_trace(self._path(request)))
                except OSError as error:
                    refusal = f"the trace was made and cannot be read: {error}"
            if refusal is not None:
                self._refused[request.key] = refusal


def _group(request: TraceRequest) -> tuple[str, str]:
    """Traces of one model share the model that a process builds."""
    return request.process_choice, request.cell.model


def _one_size_each(request: TraceRequest) -> list[TraceRequest]:
    if len(request.batch_sizes) == 1:
        return [request]
    return [
        request.model_copy(update={"batch_size": size, "with_updates": number == 0})
        for number, size in enumerate(request.batch_sizes)
    ]


def _last_line(text: str) -> str:
    """The last words of a process, but for those of C++ on how it ended."""
    printed = map(str.strip, text.splitlines())
    lines = [
        line for line in printed if line and not line.startswith(("terminate called", "what():"))
    ]
    # Beside what other processes printed since, the reason of one that C++ ended.
    lines += [line for line in lines if line.startswith(GIVEN_UP)]
    return f"the trace ended early: {lines[-1] if lines else 'it printed nothing'}"
