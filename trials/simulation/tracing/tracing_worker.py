"""The child process that traces: asked on stdin, it answers with a line of JSON for each request.

The first line is ``[folder, apart, limit_seconds, telling]``: where traces go, whether they are
made at the same time, how long each may take, and the file that lines on what takes long go to;
each further one a key and a request.

``[key, null]`` says that the trace is written under its key, ``[key, "why"]`` that there is none.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from trials.child_process.bootstrap import freeze_garbage_collector
from trials.models.adapter_targets import TargetError
from trials.models.build import FamilyError, KernelError
from trials.models.experts import ExpertsError
from trials.models.weight_placement import decoder_layers
from trials.records.model import Model
from trials.simulation.layer_expansion import check_repeats
from trials.simulation.recording import Recording, RepeatError, StructureError
from trials.simulation.trace_cache import StepTrace, not_kept, write_trace
from trials.simulation.trace_request import SMALLEST, Routing, TraceRequest
from trials.simulation.tracing.trace import Shares, TraceableCell, Traced
from trials.simulation.tracing.tracer import UntraceableError
from trials.simulation.tracing.watchdog import innermost_module, patience

REFUSALS = (
    *(UntraceableError, FamilyError, KernelError, ExpertsError, TargetError, StructureError),
    ImportError,
)
LONGEST = 300
"""Characters of what a library says that are told."""
FEW_LAYERS = 8
"""Of a model with no more nobody need know that all are traced."""


def routed_shares(routing: Routing, experts: int | None) -> Shares:
    """How many tokens each expert gets, asked expert after expert, layer after layer.

    Every layer's shares are the same, so that it gets them again when it is run again.
    """
    if experts is None:

        def refuse(_: torch.Tensor) -> int:
            raise UntraceableError(
                "how much is picked by a mask depends on its values, which an estimate has not"
            )

        return refuse
    drawn = np.random.default_rng(routing.seed).normal(0.0, routing.sigma, experts)
    ends = np.cumsum(np.exp(drawn)) / np.exp(drawn).sum()
    asked = 0

    def share(mask: torch.Tensor) -> int:
        nonlocal asked
        expert = asked % experts
        asked += 1
        total = mask.numel()  # each of the tokens' choices
        begin = 0 if expert == 0 else round(total * ends[expert - 1])
        return int(min(round(total * ends[expert]) - begin, mask.shape[0]))

    return share


class Tracing:
    """Traces one request after another.

    Args:
        tell: is given a line on what takes longer than usual.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.tell = tell
        self._whole: set[str] = set()  # of which no few layers stand for all
        # An update is the same at every batch size and length, so one for a model and recipe; but
        # for a batch of one, after other operators, its storages have other names.
        self._updates: dict[tuple[str, bool], Recording] = {}
        self._built: dict[tuple[str, str, int | None], TraceableCell] = {}

    def trace(self, request: TraceRequest) -> StepTrace:
        """Traces what is asked, every layer of it where some cannot stand for others.

        Raises:
            Exception: one of ``REFUSALS``, or whatever the model's code raises.
        """
        whole = request.model_copy(update={"whole": True})
        if request.updates in self._whole:
            return self._traced(self._cell(whole), whole)
        cell = self._cell(request)
        if cell.turns.copies == 0:
            if not request.whole and len(decoder_layers(cell.model)) > FEW_LAYERS:
                self._tell_of_all(request, "none is like the next")
            return self._traced(cell, request)
        try:
            return self._traced(cell, request)
        except RepeatError as error:
            why = str(error)
        except REFUSALS:
            raise
        except Exception as error:  # noqa: BLE001 - its code may count on all of its layers
            why = f"without the rest of them: {_described(error)}"
        self._tell_of_all(request, why)
        traced = self._traced(self._cell(whole), whole)
        self._whole.add(request.updates)
        return traced

    def _tell_of_all(self, request: TraceRequest, why: str) -> None:
        self.tell(
            f"{request.model.name}: all of its layers are traced, which takes longer: no few of "
            f"them can stand for all ({why})"
        )

    def _traced(self, cell: TraceableCell, request: TraceRequest) -> StepTrace:
        freeze_garbage_collector()  # a trace collects garbage first: scanning torch takes 0.3 s
        shares: Callable[[], Shares] = lambda: routed_shares(request.routing, request.cell.experts)  # noqa: E731 - a new count for each trace
        first, *others = request.batch_sizes
        traced = [self._first(cell, request, first, shares)]
        traced += [cell.trace(other, shares(), traced[0].recording) for other in others]
        return StepTrace(
            batch_sizes=request.batch_sizes,
            recordings=tuple(each.recording for each in traced),
            held=traced[0].held,
            copies=traced[0].copies,
        )

    def _cell(self, request: TraceRequest) -> TraceableCell:
        """The cell of a request, built once for all lengths."""
        key = (request.updates, request.model.name, request.cell.active_experts)
        built = self._built.get(key)
        if built is not None:
            built.set_length(request.cell.seq_len)
            return built
        built = TraceableCell(request.cell, request.model, whole=request.whole)
        if not built.remembers:
            self._built[key] = built
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
        key = (request.updates, batch_size < SMALLEST)
        known = self._updates.get(key)
        traced = None
        if known is not None:
            with contextlib.suppress(StructureError):
                traced = cell.trace(batch_size, shares(), known)
        if traced is None:
            traced = cell.trace(batch_size, shares())
            self._updates[key] = traced.recording
        check_repeats(traced.recording)
        return traced


def _settle_imports() -> None:
    """Spares bitsandbytes its compiler, a second of imports: no kernel is ever run here."""
    modules: Any = torch
    compile_ = modules.compile
    modules.compile = lambda function=None, **_: _same if function is None else function
    try:
        importlib.import_module("bitsandbytes")
    finally:
        modules.compile = compile_


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _import_for(line: str, limit_seconds: float) -> None:
    """Builds the model of a request, which imports all that tracing it needs."""
    request = TraceRequest.model_validate_json(line.partition(" ")[2])
    with contextlib.suppress(Exception), patience("", limit_seconds, lambda _: None):
        # Whoever traces it says why it cannot be.
        TraceableCell(request.cell, request.model, whole=request.whole)


def refusal(model: Model, error: Exception) -> str:
    """Why a model is not traced, in a line: which, what failed, in which operator and module."""
    if isinstance(error, REFUSALS):
        told = shorten(str(error), 2 * LONGEST, placeholder=" …")
        return told if model.name in told else f"{model.name} cannot be traced: {told}"
    return f"{model.name} cannot be traced: {_described(error)}"


def _described(error: Exception) -> str:
    """What an error is, and where it came up, as far as that is known."""
    operator = next(iter(getattr(error, "__notes__", ())), None)
    module = innermost_module(error)
    kind = type(error).__name__
    said = shorten(str(error), LONGEST, placeholder=" …")
    what = f"{kind}: {said}" if said else kind
    where = "" if module is None else f" (in {module})"
    return f"{what}{where}" if operator is None else f"{operator}: {what}{where}"


def _answer(line: str, tracing: Tracing, folder: Path, limit_seconds: float) -> str | None:
    """Traces one request; why not, where it cannot be."""
    key, _, text = line.partition(" ")
    request = TraceRequest.model_validate_json(text)
    what = f"{request.model.name}, {request.cell.seq_len} tokens"

    def tell(text: str) -> None:
        if request.with_updates:  # else another process tells the same
            tracing.tell(text)

    try:
        with patience(what, limit_seconds, tell):
            traced = tracing.trace(request)
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises, the next can be traced
        if not isinstance(error, REFUSALS):
            traceback.print_exc()
        return refusal(request.model, error)
    try:
        write_trace(folder / f"{key}.npz", traced)
    except OSError as error:
        return not_kept(folder, error)
    return None


def main() -> None:
    """Traces until stdin ends."""
    _settle_imports()
    first = sys.stdin.readline()
    if not first:
        return  # nobody asks: it was started ahead, in vain
    told, apart, limit_seconds, telling = json.loads(first)
    folder = Path(told)
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    torch.set_num_threads(1)

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(telling, f"{text}\n".encode())

    tracing = Tracing(tell)

    def answer(line: str) -> None:
        refused = _answer(line, tracing, folder, limit_seconds)
        out.write(json.dumps([line.partition(" ")[0], refused]) + "\n")
        out.flush()

    if apart:
        lines = list(sys.stdin)
        _import_for(lines[0], limit_seconds)
        # What is imported is there for all; nothing has a thread yet that a fork would lose.
        mine = next((line for line in lines[1:] if os.fork() == 0), None)
        answer(mine or lines[0])
        if mine is None:
            for _ in lines[1:]:
                os.wait()
    else:
        for line in sys.stdin:
            answer(line)
    sys.stderr.flush()
    out.flush()
    os._exit(0)  # nothing of a fake model is worth taking down in order
