"""Section of slow nodes: how much slower, and which cells they timed."""

from collections.abc import Iterator, Sequence

from orchestrator.markdown_table import table
from orchestrator.planning.slow_nodes import slow_nodes
from trials.records.observation import Observation


def slow_nodes_section(observations: Sequence[Observation]) -> str:
    """A table of them; empty when there is none."""
    found = slow_nodes(observations)
    if not found:
        return ""
    rows = [
        (
            each.gpu,
            f"{each.host} ({each.node_id[:8]})",
            f"{each.times:.1f}",
            each.compared,
            len(each.cells) - len(each.standing),
            ", ".join(cell.key for cell in each.standing) or "none",
        )
        for each in found
    ]
    headers = ("GPU", "node", "times slower", "batches compared", "timed again elsewhere", "not")
    return (
        "## Slow nodes\n\nTrials that were timed on these are timed again at the end of a sweep, "
        "where another node with that GPU is there: those times count alone. Do not trust the "
        f"others.\n\n{table(headers, rows)}"
    )


def slow_nodes_text(observations: Sequence[Observation]) -> Iterator[str]:
    """A line on each."""
    for each in slow_nodes(observations):
        if not each.standing:
            yield f"{each.text}: what was timed on it was timed again elsewhere, which counts"
            continue
        yield (
            f"{each.text}: do not trust what was timed on it alone (see Slow nodes in the report): "
            "run the same command again when another such node is there, and it is timed again"
        )
