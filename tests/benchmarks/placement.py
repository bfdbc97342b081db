"""CPU time of the scheduler alone: every trial of a sweep placed, started, located and ended.

The nodes are looked at again after every 200 trials, as happens each second of a large sweep. The
trials do no work, and there is no Ray: `orchestration.py` has the cost with it.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders.runs import ONE_CELL, spec_of

from orchestrator.markdown_table import table
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import trial_task
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import Scheduler
from trials.records.cell import Cell
from trials.trial import TrialTask

SIZES = ((1_000, 1_000), (2_000, 1_000), (10_000, 100), (10_000, 1_000))
TRIALS_BETWEEN_LOOKS = 200


def cells_of(count: int) -> tuple[list[Cell], TrialTask]:
    """So many cells, and the task of the first, which stands for the task of each."""
    spec = spec_of(ONE_CELL)
    cell = spec.all_cells()[0]
    task = trial_task(spec, spec.merged_catalog(), cell, [])
    return [cell.model_copy(update={"seq_len": length + 1}) for length in range(count)], task


def seconds_for(count: int, nodes: int) -> float:
    """CPU seconds to place so many trials on so many nodes, and to record their ends."""
    cells, task = cells_of(count)
    tasks = {cell: task.model_copy(update={"cell": cell}) for cell in cells}
    resources = {"CPU": 1.0, "cpu": 1.0}
    cluster = ClusterResources(tuple(Node(resources, None, f"node-{n}") for n in range(nodes)))
    began = time.process_time()
    scheduler = Scheduler(
        cells,
        tasks.get,
        {"cpu": resources},
        cluster,
        wait_seconds=600,
        nodes_out={},
        note=lambda fault: sys.exit(fault.reason),
    )
    ended, running = 0, list[Cell]()
    while not scheduler.is_over:
        while (placement := scheduler.next()) is not None:
            running.append(placement.task.cell)
            scheduler.started(running[-1])
            node = f"node-{len(running) % nodes}"
            scheduler.located(running[-1], NodeAddress(node, "10.0.0.1"))
        scheduler.ended(running.pop(), None)
        ended += 1
        if ended % TRIALS_BETWEEN_LOOKS == 0:
            scheduler.update(cluster)
    assert ended == count
    return time.process_time() - began


def main() -> None:
    """Print the table."""
    rows = []
    for count, nodes in SIZES:
        seconds = seconds_for(count, nodes)
        each = f"{seconds / count * 1e6:.0f} µs"
        rows.append((f"{count:,}", f"{nodes:,}", f"{seconds:.2f} s", each))
    sys.stdout.write(table(("cells", "nodes", "CPU", "per trial"), rows) + "\n")


if __name__ == "__main__":
    main()
