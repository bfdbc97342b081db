"""Process that traces: ``python -m trials.simulation.tracing.bootstrap SOCKET``.

It forks a child for each group of requests, so that all share the imports and none depends on
those before. A message on the socket brings three files: one with the requests, one for the
replies, and a pipe for lines on progress; it is sent back when they are answered.

The first line of the requests is ``[folder, earlier, processes, limit_seconds]``: the folder for
traces, that of earlier ones, the number of processes (null: one for each), and the longest time of
each trace. Every further line is a key and a request. The reply ``[key, null]`` confirms a trace
under its key; ``[key, "reason"]`` is a refusal.
"""

import contextlib
import importlib
import json
import os
import select
import socket
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import numpy as np
import torch

from trials.child_process.bootstrap import freeze_garbage_collector
from trials.child_process.parent_death import die_with_parent
from trials.models.adapter_targets import TargetError
from trials.models.build import FamilyError, KernelError
from trials.models.experts import ExpertsError
from trials.models.weight_placement import LayersError, QuantisationError, decoder_layers
from trials.records.model import Model
from trials.simulation.layer_expansion import check_repeats
from trials.simulation.recording import Recording, RepeatError, StructureError
from trials.simulation.trace_cache import StepTrace, read_trace, write_failure, write_trace
from trials.simulation.trace_request import Routing, TraceRequest
from trials.simulation.tracing.fake_model import depends_on_past_lengths
from trials.simulation.tracing.trace import Shares, TraceableCell, Traced
from trials.simulation.tracing.tracer import UntraceableError
from trials.simulation.tracing.watchdog import innermost_module, watchdog
from trials.training.recipe_check import RecipeError
from trials.training.tasks.image_sizes import ImagesError

REFUSALS = (
    *(UntraceableError, FamilyError, KernelError, ExpertsError, TargetError, QuantisationError),
    *(LayersError, RecipeError, StructureError, ImportError, ImagesError),
)
LONGEST = 300
"""Most characters of a library's message in a refusal."""
NUMBER = np.dtype(np.uint32)
"""Type of a unit's number in the queue of those not started."""
IDLE_SECONDS = 60.0
"""Time after which a process without requests ends; it takes hundreds of MiB."""
FEW_LAYERS = 8
"""Most layers of a model that is traced whole without a report."""


def routed_shares(routing: Routing, experts: int | None) -> Shares:
    """Make the function that returns the tokens of each expert, expert by expert, layer by layer.

    All layers have the same shares, so that a recomputed layer gets its shares again.
    """
    if experts is None:

        def refuse(_: torch.Tensor) -> int:
            raise UntraceableError(
                "the number of entries that a mask picks depends on values, which an "
                "estimate does not have"
            )

        return refuse
    drawn = np.random.default_rng(routing.seed).normal(0.0, routing.sigma, experts)
    ends = np.cumsum(np.exp(drawn)) / np.exp(drawn).sum()
    calls = 0

    def share(mask: torch.Tensor) -> int:
        nonlocal calls
        expert = calls % experts
        calls += 1
        total = mask.numel()  # choices of all tokens
        begin = 0 if expert == 0 else round(total * ends[expert - 1])
        return int(min(round(total * ends[expert]) - begin, mask.shape[0]))

    return share


class Tracing:
    """Traces requests one after another, with what they share made once.

    Args:
        report: called with a line on each trace that takes long.
        earlier: folder of traces whose updates are shared, too.
    """

    def __init__(
        self, report: Callable[[str], None] = lambda _: None, earlier: Path | None = None
    ) -> None:
        self.report = report
        self._earlier = earlier
        self._whole: set[str] = set()  # keys of updates whose models must be traced whole
        # An update is the same at every batch size and length, so each model and recipe needs one.
        # After other passes, as with another loss, the names of its storages differ. By the parts
        # of the key that traces with the same updates share.
        self._updates: dict[str, Recording] = {}
        self._built: dict[tuple[str, str, int | None, int | None], TraceableCell] = {}

    def trace(self, request: TraceRequest) -> StepTrace:
        """Trace a request, with every layer where some cannot represent others.

        Raises:
            Exception: one of ``REFUSALS``, or any error of the model's code.
        """
        whole = request.model_copy(update={"whole": True})
        if request.updates in self._whole:
            return self._traced(self.cell(whole), whole)
        cell = self.cell(request)
        if cell.repeated_layers.copies == 0:
            if not request.whole and len(decoder_layers(cell.model)) > FEW_LAYERS:
                self._report_whole(request, _why_whole(request))
            return self._traced(cell, request)
        try:
            return self._traced(cell, request)
        except (RepeatError, RecipeError) as error:  # the latter names parameters of all layers
            why = str(error)
        except REFUSALS:
            raise
        except Exception as error:  # noqa: BLE001 - a model's code may require all layers
            why = f"without the rest of them: {_described(error)}"
        self._report_whole(request, why)
        traced = self._traced(self.cell(whole), whole)
        self._whole.add(request.updates)
        return traced

    def _report_whole(self, request: TraceRequest, why: str) -> None:
        self.report(
            f"{request.model.name}: tracing every layer, which is slower: a few cannot represent "
            f"the others ({why})"
        )

    def _traced(self, cell: TraceableCell, request: TraceRequest) -> StepTrace:
        freeze_garbage_collector()  # a trace collects garbage first: scanning torch takes 0.3 s
        shares: Callable[[], Shares] = lambda: routed_shares(request.routing, request.cell.experts)  # noqa: E731 - a new count for each trace
        first, *others = request.batch_sizes
        traced = [self._first(cell, request, first, shares)]
        traced += [cell.trace(other, shares(), traced[0].recording) for other in others]
        return StepTrace(
            batch_sizes=request.batch_sizes,
            recordings=tuple(step.recording for step in traced),
            held=traced[0].held,
            copies=traced[0].copies,
            host_bytes=traced[0].host_bytes,
            parameters=cell.parameters,
        )

    def cell(self, request: TraceRequest) -> TraceableCell:
        """Traceable cell of a request, built once for all lengths, checkpointed or not after it."""
        cell = request.cell
        key = (request.built, request.model.name, cell.active_experts, cell.image_tokens)
        built, checkpoints = self._built.get(key), cell.recipe.gradient_checkpointing
        if built is None or (checkpoints and built.recipe.gradient_checkpointing != checkpoints):
            built = TraceableCell(cell, request.model, target=request.target, whole=request.whole)
            if not depends_on_past_lengths(built.model):
                self._built[key] = built
        built.set_cell(cell, padded=request.padded)
        return built

    def _first(
        self,
        cell: TraceableCell,
        request: TraceRequest,
        batch_size: int,
        shares: Callable[[], Shares],
    ) -> Traced:
        if not request.with_updates:
            alone = cell.trace(batch_size, shares(), with_updates=False)
            check_repeats(alone.recording)
            return alone
        of_parameters, of_passes = request.digests_of_updates
        alike = self._known_updates(of_passes, cell)
        traced = None
        if alike is not None:
            with contextlib.suppress(StructureError):
                traced = cell.trace(batch_size, shares(), alike)
        if traced is None:
            shared = None
            if not request.is_by_engine:
                shared = self._known_updates(of_parameters, cell)
            if shared is not None:
                with contextlib.suppress(StructureError):
                    traced = cell.trace(batch_size, shares(), shared=shared)
            if traced is None:
                traced = cell.trace(batch_size, shares())
                self._updates[of_parameters] = traced.recording
            self._updates[of_passes] = traced.recording
        check_repeats(traced.recording)
        return traced

    def _known_updates(self, digest: str, cell: TraceableCell) -> Recording | None:
        """Recording with the updates of this digest, of this process or an earlier one."""
        if digest not in self._updates and self._earlier is not None:
            for path in sorted(self._earlier.glob(f"*-{digest}-*.npz")):
                with contextlib.suppress(OSError):
                    trace = read_trace(path)
                    if trace.copies == cell.repeated_layers.copies:
                        self._updates[digest] = trace.recordings[0]
                    break  # all were made in the same way
        return self._updates.get(digest)


def import_without_compiler() -> None:
    """Import bitsandbytes without torch.compile, which takes a second: no kernel runs here."""
    modules: Any = torch
    compile_ = modules.compile
    modules.compile = lambda function=None, **_: (lambda f: f) if function is None else function
    try:
        importlib.import_module("bitsandbytes")
    finally:
        modules.compile = compile_


def refusal(model: Model, error: Exception) -> str:
    """One line on a model that cannot be traced: the error, its operator and its module."""
    if isinstance(error, REFUSALS):
        text = shorten(str(error), 2 * LONGEST, placeholder=" …")
        return text if model.name in text else f"{model.name} cannot be traced: {text}"
    return f"{model.name} cannot be traced: {_described(error)}"


def _described(error: Exception) -> str:
    """Description of an error, with its operator and module where they are known."""
    operator = next(iter(getattr(error, "__notes__", ())), None)
    module = innermost_module(error)
    kind = type(error).__name__
    message = shorten(str(error), LONGEST, placeholder=" …")
    what = f"{kind}: {message}" if message else kind
    where = "" if module is None else f" (in {module})"
    return f"{what}{where}" if operator is None else f"{operator}: {what}{where}"


def _answer(line: str, tracing: Tracing, folder: Path, limit_seconds: float) -> str | None:
    """Trace one request and write the trace; return the refusal, or None."""
    key, _, text = line.partition(" ")
    request = TraceRequest.model_validate_json(text)
    recipe = request.cell.recipe
    method = f"{recipe.method}{', checkpointed' if recipe.gradient_checkpointing else ''}"
    what = f"{request.model.name}, {method}, {request.cell.seq_len} tokens"

    def report(text: str) -> None:
        if request.with_updates:  # else another process reports the same
            tracing.report(text)

    try:
        with watchdog(what, limit_seconds, report):
            traced = tracing.trace(request)
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything; others can still be traced
        if not isinstance(error, REFUSALS):
            traceback.print_exc()
        return refusal(request.model, error)
    try:
        write_trace(folder / f"{key}.npz", traced)
    except OSError as error:
        return write_failure(folder, error)
    return None


def main() -> None:
    """Fork a child for each group of requests, until the parent ends or asks for nothing."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # libraries print to stdout
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        while select.select([parent], [], [], IDLE_SECONDS)[0]:
            message, files, *_ = socket.recv_fds(parent, 1, 3)
            if not message:
                break
            server = os.getpid()
            child = os.fork()
            if child == 0:
                parent.close()
                die_with_parent(server)
                _answer_all(*files)
            for file in files:
                os.close(file)
            if not _has_ended(child, parent):
                break  # and the child with it
            parent.send(message)
    os._exit(0)


def _has_ended(child: int, parent: socket.socket) -> bool:
    """Wait for the end of a child; False if the parent ends before."""
    if sys.platform == "linux":
        process = os.pidfd_open(child)
        ready, _, _ = select.select([process, parent.fileno()], [], [])
        os.close(process)
        if process not in ready:
            return False
    os.waitpid(child, 0)
    return True


def _answer_all(requests_file: int, replies_file: int, progress: int) -> NoReturn:
    """Answer the requests of a file, and end the process."""
    with os.fdopen(requests_file) as file:
        first, *lines = file
    folder_name, earlier, processes, limit_seconds = json.loads(first)

    def report(text: str) -> None:
        with contextlib.suppress(OSError):  # the parent has closed its end
            os.write(progress, f"{text}\n".encode())

    tracing = Tracing(report, Path(earlier))

    def answer(line: str) -> None:
        refusal_text = _answer(line, tracing, Path(folder_name), limit_seconds)
        reply = json.dumps([line.partition(" ")[0], refusal_text]) + "\n"
        os.write(replies_file, reply.encode())

    requests = [TraceRequest.model_validate_json(line.partition(" ")[2]) for line in lines]
    if processes is None:
        units = [[line] for line in lines]
        with contextlib.suppress(Exception), watchdog("", limit_seconds, lambda _: None):
            tracing.cell(requests[0])  # forked processes share the model; its trace reports errors
    else:
        units = _units(lines, [(r, r.built) for r in requests])
        if len(units) < processes:
            units = _units(lines, [(r, r.updates) for r in requests])
    with tempfile.TemporaryFile() as queue:  # whose position all share
        queue.write(np.arange(len(units), dtype=NUMBER).tobytes())
        queue.seek(0)
        waiting = os.getpid()
        # No thread runs yet that a fork would lose.
        if any(os.fork() == 0 for _ in range(min(processes or len(units), len(units)))):
            die_with_parent(waiting)
            while number := os.read(queue.fileno(), NUMBER.itemsize):
                for line in units[int.from_bytes(number, sys.byteorder)]:
                    answer(line)
            sys.stderr.flush()
            os._exit(0)  # freeing a fake model object by object takes long and serves nothing
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _units(lines: Sequence[str], requests: Sequence[tuple[TraceRequest, str]]) -> list[list[str]]:
    """Lines that one process traces one after another, in the order of their start.

    Those of one model, length and key, which comes with the request, share what is built. Of units
    with the same updates the first starts early and the others late, so that these find them.
    """
    units: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    started: defaultdict[str, dict[tuple[object, ...], int]] = defaultdict(dict)
    for line, (request, key) in zip(lines, requests, strict=True):
        unit = (request.model.name, key, request.cell.seq_len, request.routing)
        units[unit].append(line)
        alike = started[request.shared_updates]
        alike.setdefault(unit, len(alike))
    order = {unit: number for alike in started.values() for unit, number in alike.items()}
    return [units[unit] for unit in sorted(order, key=order.__getitem__)]


def _why_whole(request: TraceRequest) -> str:
    """Reason why a few layers cannot represent the others, in words."""
    recipe = request.cell.recipe
    if request.is_by_engine:
        return "buckets of DeepSpeed span layers"
    if recipe.activation_offloading:
        return "activation offloading, also tried, spans layers"
    trains_some = recipe.trained_layers is not None
    return "some are frozen" if trains_some else "no layer equals the next"
