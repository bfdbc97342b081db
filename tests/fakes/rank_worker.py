"""Real ranks on the CPU: they count the memory and the collectives of their training steps.

The arguments are a folder, and for each number of ranks the descriptor of a socket that listens
where they meet. The process reads cases from stdin, a line of JSON for each, imports the libraries
once, and forks the ranks, those of one number after another. Each answers with a file in the
folder, named after their number and its own.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft  # noqa: F401 - with bitsandbytes it takes seconds, once and not in each rank
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trials.child_process.bootstrap import freeze_garbage_collector
from trials.devices.live_tensors import LiveTensorCounter
from trials.devices.storages import is_distributed
from trials.ranks.collective_counts import CollectiveSums, collective_call
from trials.ranks.rank import Rank
from trials.recipes.parallel import ZERO_STRATEGIES, Parallel
from trials.records.cell import Cell
from trials.records.model import find_model
from trials.simulation.tracing.ranks.zero_rank import CPU_ADAM
from trials.training.finetune import FineTuning
from trials.training.optimizers import construction
from trials.training.optimizers.deepspeed_stepper import deepspeed_library

LEAST_STEPS, MOST_STEPS = 5, 40  # the first gives the optimizer its state


class RankCounter(LiveTensorCounter):
    """Counts the bytes of this rank's own tensors, and its collectives by kind."""

    def __init__(self, already_live: Sequence[torch.Tensor]) -> None:
        super().__init__(already_live, 2**62)
        self.collectives = CollectiveSums()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_distributed(types):
            return NotImplemented
        name = func.name().partition(".")[0]
        if name == "aten::split" and args[0].untyped_storage()._cdata not in self._sizes:
            # Gloo works on a copy of what is reduced and scattered, which NCCL does without. No
            # operator made it: it is seen when its parts are.
            return func(*args, **(kwargs or {}))
        self.collectives.add(collective_call(func, args))
        return super().__torch_dispatch__(func, types, args, kwargs)


class AdamInNumpy:
    """Does what DeepSpeed compiles for its AdamW on the CPU, in place, without compiling it."""

    def load(self) -> "AdamInNumpy":
        return self

    def create_adam(self, *options: object) -> None:
        pass

    def destroy_adam(self, number: int) -> None:
        pass

    def adam_update(self, *arguments: Any) -> None:
        _, step, rate, beta1, beta2, eps, _, _, *tensors = arguments
        weight, grad, average, square = (tensor.numpy() for tensor in tensors)
        average += (1 - beta1) * (grad - average)
        square += (1 - beta2) * (grad * grad - square)
        root = np.sqrt(square / (1 - beta2**step)) + eps
        weight -= rate * average / (1 - beta1**step) / root


def counted(rank: Rank, cell: Cell, batch_size: int, micro_batches: int) -> dict[str, Any]:
    """Peak bytes of a step once the optimizer has its state, and bytes of its collectives.

    A thread of gloo often holds a buffer for longer than its collective takes, so the peak is the
    least of several steps, which three of them had on every rank.
    """
    assert cell.parallel is not None
    rank.parallel = cell.parallel
    if cell.parallel.updates_on_host:
        vars(importlib.import_module(CPU_ADAM))["CPUAdamBuilder"] = AdamInNumpy
    one = cell.model_copy(update={"parallel": None})
    device = torch.device("cpu")
    tuning = FineTuning(one, find_model(cell.model), device=device, seed=0, rank=rank)
    tokens = torch.cat([tuning.tokens(batch_size)] * micro_batches)
    counter = RankCounter([*tuning.tensors(), tokens])
    with counter, rank.observed(counter):
        peaks: list[int] = []
        while len(peaks) < LEAST_STEPS or not (_is_least(peaks[1:]) or len(peaks) == MOST_STEPS):
            gc.collect()
            counter.collectives = CollectiveSums()
            counter.peak_bytes = counter.current_bytes
            loss = tuning.step(tokens, micro_batches=micro_batches)
            peaks.append(counter.peak_bytes)
            collectives = counter.collectives.counts()
    norms = [_norm(p.grad) for p in tuning.trainable if p.grad is not None]
    tuning.stepper.close()
    return {
        "peak": min(peaks[1:]),
        "steps": len(peaks),
        "collectives": [one.model_dump() for one in collectives],
        "loss": loss,
        "norms": norms,
    }


def _is_least(peaks: list[int]) -> bool:
    """Whether every rank had its least peak in three steps."""
    fewest = torch.tensor(peaks.count(min(peaks)))
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    return bool(fewest >= 3)


def _norm(gradient: torch.Tensor) -> float:
    """Norm of a gradient, of which this rank may hold a part."""
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return float(whole.norm())


def answer(number: int, listening: int, cases: Sequence[dict[str, Any]]) -> None:
    """Answer the cases as one of the ranks."""
    layout = Parallel.model_validate(cases[0]["cell"]["parallel"])
    port = socket.socket(fileno=os.dup(listening)).getsockname()[1]
    rank = Rank(number, layout, device="cpu", port=port, listening=listening)
    answers = []
    for case in cases:
        cell = Cell.model_validate(case["cell"])
        answers.append(counted(rank, cell, case["batch_size"], case["micro_batches"]))
        gc.collect()
        gc.freeze()  # modules, which the first case has imported: a collection passes over them
    file = Path(sys.argv[1], f"{layout.gpus}-{number}")
    file.write_text(json.dumps(answers), encoding="utf-8")


def answer_all(ranks: int, listening: int, cases: Sequence[dict[str, Any]]) -> None:
    """Fork so many ranks; the first that fails ends the others, which would wait for it."""
    living: set[int] = set()
    for number in range(ranks):
        if child := os.fork():
            living.add(child)
        else:
            answer(number, listening, cases)
            os._exit(0)
    while living:
        child, failure = os.wait()
        living.remove(child)
        if failure:
            for other in living:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def main() -> None:
    """Let groups of ranks answer, one after another."""
    construction.LEARNING_RATE = 1e-12  # an update moves no token to another expert
    torch.set_num_threads(1)
    groups: dict[int, list[dict[str, Any]]] = {}
    for case in map(json.loads, sys.stdin):
        layout = case["cell"]["parallel"]
        groups.setdefault(layout["gpus"], []).append(case)
        if layout["strategy"] in ZERO_STRATEGIES:
            deepspeed_library("cpu")
    freeze_garbage_collector()
    for (ranks, cases), listening in zip(groups.items(), sys.argv[2:], strict=True):
        answer_all(ranks, int(listening), cases)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
