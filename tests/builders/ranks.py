"""Real ranks on the CPU, and traced ones, whose memory and collectives are compared."""

import contextlib
import functools
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trials.recipes.parallel import Parallel
from trials.records.cell import Cell
from trials.records.collectives import CollectiveCount
from trials.records.model import find_model
from trials.simulation.ranks.rank_timeline import collective_counts
from trials.simulation.recording import Collective, Column, Kind, OperatorClass
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell, Traced
from trials.simulation.whole_step import Steps

BATCH, LENGTH = 3, 24
RankCase = tuple[Cell, int]
"""A cell on several ranks, and its micro-batches."""
Answers = dict[RankCase, list[dict[str, Any]]]
"""What each real rank counts, by case."""


def on_layout(cell: Cell, layout: Parallel) -> Cell:
    """The cell on several ranks."""
    return cell.model_copy(update={"parallel": layout})


def real(cases: list[RankCase], folder: Path) -> Answers:
    """What real ranks, started once for all cases of as many, count in each."""
    lines = "".join(
        json.dumps({"cell": cell.model_dump(), "batch_size": BATCH, "micro_batches": n}) + "\n"
        for cell, n in cases
    )
    tests = Path(__file__).parent.parent
    worker = ("-m", "trials.child_process.bootstrap", "fakes.rank_worker")
    counts = {cell.ranks for cell, _ in cases}
    with contextlib.ExitStack() as stack:
        meetings = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in counts]
        subprocess.run(
            [sys.executable, *worker, str(folder), *(str(m.fileno()) for m in meetings)],
            input=lines,
            text=True,
            cwd=tests.parent,
            env={"PYTHONPATH": f".:{tests}", "HOME": str(folder)},
            pass_fds=[meeting.fileno() for meeting in meetings],
            check=True,
        )
    counted: Answers = {}
    for count in counts:
        of_count = [case for case in cases if case[0].ranks == count]
        answers = [json.loads((folder / f"{count}-{n}").read_text()) for n in range(count)]
        counted |= {case: list(of_case) for case, *of_case in zip(of_count, *answers, strict=True)}
    return counted


def traced(cell: Cell, micro_batches: int) -> Steps:
    """Steps of the first rank, traced."""
    return Steps(_trace(cell), micro_batches, cell.parallel)


@functools.cache
def _trace(cell: Cell) -> StepTrace:
    step = traceable(cell).trace(BATCH, lambda _: 0)
    return StepTrace((BATCH,), (step.recording,), step.held, step.copies)


def traceable(cell: Cell) -> TraceableCell:
    """A cell on the CPU, all of whose layers are traced."""
    return TraceableCell(cell, find_model(cell.model), target="cpu", whole=True)


def peak(steps: Steps) -> int:
    """Peak bytes of two steps, storages not rounded up."""
    _, sizes = steps.storages(BATCH)
    return int(steps.held.sizes.sum() + np.cumsum(sizes).max())


def on_gpu(cell: Cell, micro_batches: int = 1) -> Steps:
    """Steps of the first rank of GPUs, whose tensors are apart from the host's."""
    step = traced_on_gpu(cell)
    trace = StepTrace((BATCH,), (step.recording,), step.held, step.copies)
    return Steps(trace, micro_batches, cell.parallel)


@functools.cache
def traced_on_gpu(cell: Cell) -> Traced:
    """A step of the first rank of GPUs, traced once."""
    whole = TraceableCell(cell, find_model(cell.model), target="cuda", whole=True)
    return whole.trace(BATCH, lambda _: 0)


def host_bytes(steps: Steps, work: OperatorClass) -> float:
    """Bytes that a step copies to and from the host, or that the host reads and writes."""
    operators = steps.operators(BATCH).in_full
    which = (operators.kinds == Kind.RUN) & (operators.names // 4 == work)
    return float(operators.numbers[which, Column.BYTES].sum())


def moved(steps: Steps, micro_batches: int | None = None) -> dict[str, int]:
    """Bytes of a step's collectives by kind."""
    sums = steps.operators(BATCH, micro_batches).collective_sums
    return {kind.name: int(sums[kind, 1]) for kind in Collective}


def collectives(steps: Steps, micro_batches: int | None = None) -> tuple[CollectiveCount, ...]:
    """Collectives of a step by kind, as a log has them."""
    return collective_counts(steps.operators(BATCH, micro_batches).collective_sums)


def compared(counted: Answers, more: Callable[[int], int]) -> dict[str, list[int]]:
    """Bytes that the peak of each real rank is above the traced one, by case; collectives equal.

    Args:
        counted: what real ranks count.
        more: bytes that only a real step holds, by its number of micro-batches.
    """
    apart = {}
    for (cell, count), of_ranks in counted.items():
        steps = traced(cell, count)
        assert cell.parallel is not None
        key = f"{cell.model} {cell.recipe.method} {cell.parallel.key} x {count}"
        apart[key] = [rank["peak"] - more(count) - peak(steps) for rank in of_ranks]
        expected = [one.model_dump() for one in collectives(steps, count)]
        assert [rank["collectives"] for rank in of_ranks] == [expected] * len(of_ranks), key
    return apart
