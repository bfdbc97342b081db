"""The child process that traces: asked on stdin, it answers with a line of JSON for each request.

The first line is ``[folder, apart]``: where traces go, and whether they are made at the same time;
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
from typing import Any, TextIO

import numpy as np
import torch

from trials.begin import settled
from trials.models.build import KernelError
from trials.models.experts import ExpertsError
from trials.models.targets import TargetError
from trials.simulation.events import Recording, StructureError
from trials.simulation.repeat import check_repeats
from trials.simulation.request import SMALLEST, Routing, TraceRequest
from trials.simulation.trace import Shares, TraceableCell, Traced
from trials.simulation.tracer import UntraceableError
from trials.simulation.traces import StepTrace, not_kept, write_trace

REFUSALS = (UntraceableError, KernelError, ExpertsError, TargetError, StructureError, ImportError)


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
    """Traces one request after another."""

    def __init__(self) -> None:
        # An update is the same at every batch size and length, so one for a model and recipe; but
        # for a batch of one, after other operators, its storages have other names.
        self._updates: dict[tuple[str, bool], Recording] = {}
        self._built: dict[tuple[str, str, int | None], TraceableCell] = {}

    def trace(self, request: TraceRequest) -> StepTrace:
        """Traces what is asked.

        Raises:
            Exception: one of ``REFUSALS``.
        """
        cell = self._cell(request)
        settled()  # a trace collects garbage first; going through torch and its like takes 0.3 s
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
            return cell.trace(batch_size, shares(), with_updates=False)
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


def _import_for(line: str) -> None:
    """Builds the model of a request, which imports all that tracing it needs."""
    request = TraceRequest.model_validate_json(line.partition(" ")[2])
    with contextlib.suppress(Exception):  # whoever traces it says why it cannot be
        TraceableCell(request.cell, request.model, whole=request.whole)


def _answer(line: str, tracing: Tracing, folder: Path, out: TextIO) -> None:
    """Traces one request, and tells what became of it."""
    key, _, text = line.partition(" ")
    request = TraceRequest.model_validate_json(text)
    try:
        write_trace(folder / f"{key}.npz", tracing.trace(request))
        refusal = None
    except REFUSALS as error:
        refusal = str(error).strip().splitlines()[0]
    except OSError as error:
        refusal = not_kept(folder, error)
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises, the next can be traced
        traceback.print_exc()
        told = str(error).strip().splitlines() or ["without a word"]
        refusal = f"{request.model.name} cannot be traced ({type(error).__name__}: {told[0]})"
    out.write(json.dumps([key, refusal]) + "\n")
    out.flush()


def main() -> None:
    """Traces until stdin ends."""
    _settle_imports()
    first = sys.stdin.readline()
    if not first:
        return  # nobody asks: it was started ahead, in vain
    told, apart = json.loads(first)
    folder = Path(told)
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    torch.set_num_threads(1)
    tracing = Tracing()
    if apart:
        lines = list(sys.stdin)
        _import_for(lines[0])
        # What is imported is there for all; nothing has a thread yet that a fork would lose.
        mine = next((line for line in lines[1:] if os.fork() == 0), None)
        _answer(mine or lines[0], tracing, folder, out)
        if mine is None:
            for _ in lines[1:]:
                os.wait()
    else:
        for line in sys.stdin:
            _answer(line, tracing, folder, out)
    sys.stderr.flush()
    out.flush()
    os._exit(0)  # nothing of a fake model is worth taking down in order
