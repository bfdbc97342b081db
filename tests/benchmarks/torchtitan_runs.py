"""Simulated ranks of the FSDP2 runs that torchtitan published, by the rules of its source.

    .venv/bin/python tests/benchmarks/torchtitan_runs.py [--json | --all]

torchtitan/recipes.csv has the runs, as torchtitan's documents and its files (train_configs) say.
Recipes lack its checkpointing, its units of shards and its step without autocast, so these are
traced by the rules of its source (torchtitan/parallelisms/parallelize_llama.py), in place of those
of recipes. Nothing is fitted.

Without an option the two runs on H100 are compared with the published figures; ``--json`` prints
their predictions alone. ``--all`` writes those of all runs to torchtitan/predicted.csv.

Hosts have 8 GPUs. Those of H100 have 400 Gb/s of RDMA for each. Of those of A100 the documents say
nothing; they are taken for Amazon's p4de.24xlarge, with 400 Gb/s of EFA for all eight, since the
script for several nodes (multinode_trainer.slurm) is for A100 on AWS with EFA. Speeds with 200 Gb/s
for each were added after the comparison.

Attention is timed as FlashAttention-2: PyTorch of December 2024 took cuDNN's kernel on Hopper only
on request (pytorch/pytorch#138522, and #142132 for a nightly build of the same week).
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
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
from trials.records.model import Model, find_model
from trials.simulation.clock.attention import by_flash2
from trials.simulation.memory.streams import peaks_on_streams
from trials.simulation.simulated_cell import GIB, library_bytes
from trials.simulation.timing_model import EfficiencyConstants, SimulatedStepTime, step_time
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.kernels.liger_layers import LigerRMSNorm
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps

FOLDER = Path(__file__).parent / "torchtitan"
NODE = 8
FASTER = NodeNetwork(1600.0, rdma=True)
PUBLISHED = {8: (82.4, 5762), 128: (67.0, 5605)}
"""GiB reserved and tokens per second of an H100, by the number of GPUs."""
PRODUCT = torch.ops.aten.mm.default
SAVED = (PRODUCT, torch.ops.simulated.attention.default)
EVERY = 2
"""``selective_ac_option`` by default: every second layer is checkpointed."""


@dataclass(frozen=True, slots=True)
class Run:
    """A published run.

    Attributes:
        name: of the run.
        gpu: its GPU, with the published bandwidth where that differs.
        model: its model.
        gpus: number of GPUs.
        batch: examples of a GPU.
        seq_len: tokens of an example.
        checkpointing: ``none``, ``full``, ``layers`` for every second one, or ``operators`` for all
            operators but attention and every other product.
        fused_norms: whether a norm is one kernel (``fused_rmsnorm``).
        network: of a node.
    """

    name: str
    gpu: Gpu
    model: Model
    gpus: int
    batch: int
    seq_len: int
    checkpointing: str
    fused_norms: bool
    network: NodeNetwork

    @property
    def cell(self) -> Cell:
        """Cell of the run, whose recipe is the nearest one."""
        asked = Recipe(
            method="full",
            precision="fp32",  # that of the shards
            gradient_checkpointing=self.checkpointing != "none",
            optimizer="adamw_foreach",
            max_grad_norm=1.0,
        )
        nodes = self.gpus // NODE
        layout = Parallel(gpus=self.gpus, strategy="fsdp2", nodes=nodes)
        return Cell(
            gpu=self.gpu.key,
            simulated=True,
            model=self.model.name,
            recipe=with_defaults(asked, self.model, self.gpu),
            seq_len=self.seq_len,
            parallel=layout.on_network(self.network) if nodes > 1 else layout,
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one of several simulated GPUs holds and does; ``tokens`` per second of this GPU."""

    run: str
    gpus: int
    allocated_gib: float
    reserved_gib: float
    tokens: float
    exposed: float
    """Share of a step in which a GPU only waits for the others."""
    tokens_on_faster: float | None
    """Tokens per second where the network of a node is ``FASTER``; None where it is."""


def runs() -> Iterator[Run]:
    """Runs of recipes.csv."""
    catalog = load_catalog()
    with (FOLDER / "recipes.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpu = catalog.gpu(row["gpu"])
            if bandwidth := row["bandwidth_gb_per_second"]:
                gpu = gpu.model_copy(update={"memory_bandwidth_gb_per_second": float(bandwidth)})
            yield Run(
                name=row["run"],
                gpu=gpu,
                model=_model(row["model"]),
                gpus=int(row["gpus"]),
                batch=int(row["batch"]),
                seq_len=int(row["seq_len"]),
                checkpointing=row["checkpointing"],
                fused_norms=row["fused_norms"] == "yes",
                network=NodeNetwork(float(row["node_gbps"]), rdma=True),
            )


def _model(name: str) -> Model:
    """A catalogued model, or Llama 2 70B, which is Llama 3.1 70B with fewer words and positions."""
    if name != "llama-2-70b":
        return find_model(name)
    newer = find_model("llama-3.1-70b")
    config = newer.config | {"vocab_size": 32000, "max_position_embeddings": 4096}
    return newer.model_copy(update={"name": name, "config": config})


def checkpoint(model: nn.Module, run: Run) -> None:
    """Checkpoint a model as a run does."""

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
    chosen = {"context_fn": contexts} if run.checkpointing == "operators" else {}
    given.gradient_checkpointing_enable({"use_reentrant": False, **chosen})
    if run.checkpointing == "layers":
        for number, layer in enumerate(decoder_layers(model), start=1):
            vars(layer)["gradient_checkpointing"] = number % EVERY == 0


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every layer, and embedding, last norm and head together; reduce gradients in fp32.

    The last layer stays gathered between its passes, and so do the others outside of layers, as
    PyTorch kept the root's weights then.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    *layers, last = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **settings)
    fully_shard(last, reshard_after_forward=False, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)


def fuse_norms(model: nn.Module) -> None:
    """Make every norm one kernel each way: liger-kernel's saves what torchtitan's does."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            vars(module)["forward"] = LigerRMSNorm.forward.__get__(module)


def traceable_cell(run: Run) -> TraceableCell:
    """Build a rank of a run, under the rules of torchtitan in place of those of recipes."""

    def divided(model: nn.Module, _: Parallel, __: Recipe, mesh: DeviceMesh, **___: Any) -> None:
        if run.fused_norms:
            fuse_norms(model)
        shard(model, mesh)

    build._checkpoint = lambda model, _: checkpoint(model, run)
    sharding.shard = divided
    traceable = TraceableCell(run.cell, run.model, whole=True)
    traceable._is_checked = True
    return traceable


def predicted(run: Run) -> Predicted:
    """Simulate a step of a run."""
    cell = run.cell
    step = traceable_cell(run).trace(run.batch, _none)
    trace = StepTrace((run.batch,), (step.recording,), step.held, step.copies)
    steps = Steps(trace, 1, cell.parallel)
    library = library_bytes(run.gpu)
    held = np.r_[library // 2, library // 2, steps.held.sizes]
    peaks = peaks_on_streams(steps.moves(run.batch), held, None, expandable_segments=False)
    operators = by_flash2(steps.operators(run.batch))
    assert cell.parallel is not None

    def on(layout: Parallel) -> SimulatedStepTime:
        return step_time(operators, run.gpu, EfficiencyConstants(), layout)

    time, tokens, faster = on(cell.parallel), run.batch * run.seq_len, None
    if run.network.gbps < FASTER.gbps:
        faster = tokens / on(cell.parallel.on_network(FASTER)).seconds
    return Predicted(
        run=run.name,
        gpus=run.gpus,
        allocated_gib=peaks.peak_allocated_bytes / GIB,
        reserved_gib=peaks.peak_reserved_bytes / GIB,
        tokens=tokens / time.seconds,
        exposed=time.exposed_seconds / time.seconds,
        tokens_on_faster=faster,
    )


def _none(_: torch.Tensor) -> int:
    raise AssertionError("a dense model routes nothing")


def write_predictions() -> None:
    """Write predicted.csv."""
    speeds = ("tokens_per_second", "exposed", "tokens_per_second_at_1600")
    headers = ("run", "allocated_gib", "reserved_gib", *speeds)
    with (FOLDER / "predicted.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(headers)
        for one in map(predicted, runs()):
            gib = (f"{one.allocated_gib:.1f}", f"{one.reserved_gib:.1f}")
            faster = "" if one.tokens_on_faster is None else f"{one.tokens_on_faster:.0f}"
            rows.writerow((one.run, *gib, f"{one.tokens:.0f}", f"{one.exposed:.3f}", faster))


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
    """Print predicted beside published figures of the H100, or do as an option says."""
    if "--all" in sys.argv:
        write_predictions()
        return
    made = [predicted(run) for run in runs() if run.gpu.key == "H100-SXM"]
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps([asdict(one) for one in made]) + "\n")
        return
    memory = ("reserved GiB", "published", "error")
    headers = ("GPUs", *memory, "tokens/s a GPU", "published", "error")
    sys.stdout.write(table(headers, map(_row, made)) + "\n")


if __name__ == "__main__":
    main()
