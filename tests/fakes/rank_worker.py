"""One real rank on the CPU: counts the memory and the collectives of its training steps.

Its arguments are its number, the number of ranks, and a file that the ranks meet by. It reads cases
from stdin, a line of JSON for each, and answers each with a line.
"""

import gc
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trials.devices.live_tensors import LiveTensorCounter
from trials.models.activation_offloading import activation_offloading
from trials.ranks.sharding import shard, unseen_propagation, watched_resizes
from trials.records.cell import Cell
from trials.records.model import find_model
from trials.simulation.tracing.operator_costs import tensors_in
from trials.simulation.tracing.ranks.rank_tracer import COLLECTIVES
from trials.training.finetune import FineTuning
from trials.training.optimizers import construction

STEADY_STEPS = 4
DISTRIBUTED = (DTensor, AsyncCollectiveTensor)


class RankCounter(LiveTensorCounter):
    """Counts the bytes of this rank's own tensors, and those of its collectives by kind."""

    def __init__(self, already_live: Sequence[torch.Tensor]) -> None:
        super().__init__(already_live, 2**62)
        self.moved = {kind.name: 0 for kind, _ in COLLECTIVES.values()}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DISTRIBUTED) for kind in types):
            return NotImplemented
        name = func.name().partition(".")[0]
        if name == "aten::split" and args[0].untyped_storage()._cdata not in self._sizes:
            # Gloo works on a copy of what is reduced and scattered, which NCCL does without. No
            # operator made it: it is seen when its parts are.
            return func(*args, **(kwargs or {}))
        if name in COLLECTIVES:
            kind, buffer = COLLECTIVES[name]
            whole = tensors_in((args[buffer],))
            self.moved[kind.name] += sum(t.numel() * t.element_size() for t in whole)
        return super().__torch_dispatch__(func, types, args, kwargs)


def counted(cell: Cell, batch_size: int, micro_batches: int) -> dict[str, Any]:
    """Peak bytes of a step once the optimizer has its state, and bytes of its collectives.

    A thread of gloo now and then holds a buffer for longer than its collective takes, so the peak
    is the least of several steps.
    """
    assert cell.parallel is not None
    one = cell.model_copy(update={"parallel": None})
    tuning = FineTuning(one, find_model(cell.model), device=torch.device("cpu"), seed=0)
    tokens = torch.cat([tuning.tokens(batch_size)] * micro_batches)
    model: Any = tuning.model
    if cell.parallel.strategy == "fsdp2":
        shard(model, cell.parallel, cell.recipe, init_device_mesh("cpu", (cell.ranks,)))
    counter = RankCounter([*tuning.tensors(), tokens])
    with counter, watched_resizes(counter), unseen_propagation():
        if cell.parallel.strategy == "ddp":
            model = DistributedDataParallel(model)  # its buckets count
        trainable = [p for p in model.parameters() if p.requires_grad]
        offloading = activation_offloading(model, cell.recipe)
        tuning.stepper = construction.make_stepper(
            model, trainable, cell.recipe, torch.device("cpu"), offloading
        )
        peaks = []
        for _ in range(1 + STEADY_STEPS):
            gc.collect()
            counter.moved = dict.fromkeys(counter.moved, 0)
            counter.peak_bytes = counter.current_bytes
            if cell.parallel.strategy == "ddp" and micro_batches > 1:
                _accumulate(tuning, model, tokens, micro_batches)
            else:
                tuning.step(tokens, micro_batches=micro_batches)
            peaks.append(counter.peak_bytes)
    return {"peak": min(peaks[1:]), "moved": counter.moved}


def _accumulate(tuning: FineTuning, model: Any, tokens: torch.Tensor, micro_batches: int) -> None:
    """A step whose last micro-batch alone synchronises, as transformers' Trainer runs it."""
    passes = iter(range(micro_batches))
    own = tuning.stepper.backward

    def backward(loss_of: Any) -> torch.Tensor:
        model.require_backward_grad_sync = next(passes) == micro_batches - 1
        return own(loss_of)

    tuning.stepper.backward = backward
    try:
        tuning.step(tokens, micro_batches=micro_batches)
    finally:
        del tuning.stepper.backward


def main() -> None:
    """Answer the cases."""
    rank, ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    construction.LEARNING_RATE = 1e-12  # an update moves no token to another expert
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    for line in sys.stdin:
        case = json.loads(line)
        cell = Cell.model_validate(case["cell"])
        answer = counted(cell, case["batch_size"], case["micro_batches"])
        sys.stdout.write(json.dumps(answer) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
