"""Simulated ranks, compared with the runs of Llama 3.1 8B under FSDP2 that torchtitan published.

    .venv/bin/python tests/benchmarks/torchtitan_runs.py [--json]

The published figures are those of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables
1 and 3: memory reserved by PyTorch's allocator and tokens per second and GPU, at batch 2 x 8,192.
Recipes lack its checkpointing by operators, its units of shards and its step without autocast, so
these are traced by the rules of its source (torchtitan/parallelisms/parallelize_llama.py), in place
of those of recipes. Its hosts have 8 GPUs, with 400 Gb/s of RDMA for each. Nothing is fitted.

Attention is timed as FlashAttention-2: PyTorch of that month took cuDNN's kernel on Hopper only on
request (pytorch/pytorch#138522, and #142132 for a nightly build of the same week).
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.links.between_nodes import NodeNetwork
from orchestrator.markdown_table import table
from trials.models import build
from trials.models.weight_placement import decoder_layers
from trials.ranks import sharding
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.clock.attention import by_flash2
from trials.simulation.memory.streams import peaks_on_streams
from trials.simulation.simulated_cell import GIB, library_bytes
from trials.simulation.timing_model import EfficiencyConstants, step_time
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps

BATCH, LENGTH, NODE = 2, 8192, 8
NETWORK = NodeNetwork(NODE * 400.0, rdma=True)
PUBLISHED = {8: (82.4, 5762), 128: (67.0, 5605)}
"""GiB reserved and tokens per second of a GPU, by the number of GPUs."""
PRODUCT = torch.ops.aten.mm.default
SAVED = (PRODUCT, torch.ops.simulated.attention.default)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one of several simulated GPUs holds and does; ``tokens`` per second of this GPU."""

    gpus: int
    allocated_gib: float
    reserved_gib: float
    tokens: float


def checkpoint(model: nn.Module, _: Recipe) -> None:
    """Checkpoint layers but for attention and every other product (``selective_ac_option: op``)."""

    def contexts() -> Any:
        products: Counter[bool] = Counter()

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if operator is PRODUCT:
                products[context.is_recompute] += 1
            is_second = operator is PRODUCT and products[context.is_recompute] % 2 == 0
            if operator in SAVED and not is_second:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    given: Any = model
    given.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def shard(model: nn.Module, _: Parallel, __: Recipe, mesh: DeviceMesh, *, is_pinned: bool) -> None:
    """Shard every layer, and embedding, last norm and head together; reduce gradients in fp32.

    The last layer stays gathered between its passes, and so do the others outside of layers, as
    PyTorch kept the root's weights then. No shard is on the host, pinned or not.
    """
    del is_pinned
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    *layers, last = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **settings)
    fully_shard(last, reshard_after_forward=False, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)


def predicted(gpus: int, gpu: Gpu) -> Predicted:
    """Simulate a step of a number of GPUs."""
    model = find_model("llama-3.1-8b")
    asked = Recipe(
        method="full",
        precision="fp32",  # that of the shards
        gradient_checkpointing=True,
        optimizer="adamw_foreach",
        max_grad_norm=1.0,
    )
    nodes = gpus // NODE
    layout = Parallel(gpus=gpus, strategy="fsdp2", nodes=nodes)
    cell = Cell(
        gpu=gpu.key,
        simulated=True,
        model=model.name,
        recipe=with_defaults(asked, model, gpu),
        seq_len=LENGTH,
        parallel=layout.on_network(NETWORK) if nodes > 1 else layout,
    )
    traceable = TraceableCell(cell, model, whole=True)
    traceable._is_checked = True
    step = traceable.trace(BATCH, _none)
    steps = Steps(StepTrace((BATCH,), (step.recording,), step.held, step.copies), 1, cell.parallel)
    library = library_bytes(gpu)
    held = np.r_[library // 2, library // 2, steps.held.sizes]
    peaks = peaks_on_streams(steps.moves(BATCH), held, None, expandable_segments=False)
    operators = by_flash2(steps.operators(BATCH))
    time = step_time(operators, gpu, EfficiencyConstants(), cell.parallel)
    return Predicted(
        gpus=gpus,
        allocated_gib=peaks.peak_allocated_bytes / GIB,
        reserved_gib=peaks.peak_reserved_bytes / GIB,
        tokens=BATCH * LENGTH / time.seconds,
    )


def _none(_: torch.Tensor) -> int:
    raise AssertionError("a dense model routes nothing")


def predictions() -> Iterator[Predicted]:
    """Simulate what was published, on a GPU with the published bandwidth."""
    catalogued = load_catalog().gpu("H100-SXM")
    gpu = catalogued.model_copy(update={"memory_bandwidth_gb_per_second": 2400.0})
    build._checkpoint = checkpoint
    sharding.shard = shard
    for gpus in PUBLISHED:
        yield predicted(gpus, gpu)


def _row(one: Predicted) -> tuple[object, ...]:
    gib, tokens = PUBLISHED[one.gpus]
    return (
        one.gpus,
        f"{one.reserved_gib:.1f}",
        gib,
        f"{one.reserved_gib / gib - 1:+.1%}",
        f"{one.tokens:,.0f}",
        f"{tokens:,}",
        f"{one.tokens / tokens - 1:+.1%}",
    )


def main() -> None:
    """Print predicted beside published figures; with ``--json``, the predictions alone."""
    made = [*predictions()]
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps([asdict(one) for one in made]) + "\n")
        return
    memory = ("reserved GiB", "published", "error")
    headers = ("GPUs", *memory, "tokens/s a GPU", "published", "error")
    sys.stdout.write(table(headers, map(_row, made)) + "\n")


if __name__ == "__main__":
    main()
