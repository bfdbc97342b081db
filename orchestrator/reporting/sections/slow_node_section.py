"""Section of slow nodes: their slowdown, and the cells that were timed on them."""

from collections.abc import Iterator, Sequence

from orchestrator.markdown_table import records_table
from orchestrator.planning.slow_nodes import slow_nodes
from trials.records.observation import Observation


def slow_nodes_section(observations: Sequence[Observation]) -> str:
    """Markdown table of slow nodes; empty when there is none."""
    nodes = slow_nodes(observations)
    if not nodes:
        return ""
    rows = records_table(
        {
            "GPU": node.gpu,
            "node": f"{node.host} ({node.node_id[:8]})",
            "times slower": f"{node.times:.1f}",
            "batches compared": node.compared,
            "cells retimed elsewhere": len(node.cells) - len(node.standing),
            "cells not retimed": ", ".join(cell.key for cell in node.standing) or "none",
        }
        for node in nodes
    )
    return (
        "## Slow nodes\n\nA sweep ends by retiming the cells of slow nodes on another node with "
        "the same GPU, if there is one.\nOnly the new times count then. Do not trust the times of "
        f"cells that were not retimed.\n\n{rows}"
    )


def slow_nodes_text(observations: Sequence[Observation]) -> Iterator[str]:
    """A line on each slow node, with what to do about its times."""
    for node in slow_nodes(observations):
        if node.standing:
            yield (
                f"{node.text}: do not trust the times of its cells (see Slow nodes in the report). "
                "To retime them, run the same command again with another such node"
            )
        else:
            yield f"{node.text}: its cells were retimed elsewhere, and only those times count"
