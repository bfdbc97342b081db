"""CPU and memory of tracing Llama 3.1 70B in shards on 64 ranks. Targets: 10 s and 700 MiB.

.venv/bin/python tests/benchmarks/many_ranks.py
"""

import resource
import sys
import time

from gpu_catalog.catalog import load_catalog
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.trace_request import Routing
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracing_worker import routed_shares


def main() -> None:
    """Trace a step of full training at 4,096 tokens, and print what the process took."""
    gpu, model = load_catalog().gpu("H100-SXM"), find_model("llama-3.1-70b")
    recipe = Recipe(method="full", precision="bf16-mixed", gradient_checkpointing=True)
    cell = Cell(
        gpu=gpu.key,
        simulated=True,
        model=model.name,
        recipe=with_defaults(recipe, model, gpu),
        seq_len=4096,
        parallel=Parallel(gpus=64, strategy="fsdp2"),
    )
    TraceableCell(cell, model).trace(1, routed_shares(Routing(), None))
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(
        f"llama-3.1-70b, full, 64 ranks of fsdp2: {time.process_time():.1f} s of CPU, imports "
        f"included, and {mib:.0f} MiB\n"
    )


if __name__ == "__main__":
    main()
