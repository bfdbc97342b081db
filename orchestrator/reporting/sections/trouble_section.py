"""Sections of faults, which cut trials short, and of slow nodes, with the cells timed on them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gpu_catalog.catalog import Catalog
from orchestrator.markdown_table import records_table
from orchestrator.planning.faults import Fault, Faults
from orchestrator.planning.slow_links import SlowLink, slow_links
from orchestrator.planning.slow_nodes import SlowNode, slow_nodes
from trials.records.profile import Logged, links_of, observations_of

EVENTS = {
    "died": "trial died",
    "device": "trial moved to another node",
    "node out": "node excluded",
    "no node": "no node available",
}


def faults_section(faults: Faults) -> str:
    """Markdown table of faults; empty when there is none."""
    if not faults.faults:
        return ""
    groups: dict[tuple[str, str, str, str], list[Fault]] = defaultdict(list)
    for fault in faults.faults:
        groups[fault.kind, fault.gpu, fault.node or "", fault.reason].append(fault)
    rows = records_table(
        {
            "GPU": gpu,
            "node": node,
            "event": EVENTS[kind],
            "times": len(group),
            "trials": _cells(group),
            "seconds lost": f"{sum(fault.lost_seconds for fault in group):.0f}",
            "cause": reason,
        }
        for (kind, gpu, node, reason), group in groups.items()
    )
    return f"## Faults\n\n{faults_text(faults)}\n\n{rows}"


def faults_text(faults: Faults) -> str:
    """Number of trials that were cut short and the measuring time lost, in a sentence."""
    restarts = [fault for fault in faults.faults if fault.kind in {"died", "device"}]
    lost = sum(fault.lost_seconds for fault in restarts)
    return (
        f"Trials were cut short {len(restarts)} times, which lost {lost:.0f} s of measuring. "
        "Results reported before that were kept."
    )


def _cells(group: Sequence[Fault]) -> str:
    """Key of the only cell of some faults, or the number of cells."""
    keys = list(dict.fromkeys(fault.cell.key for fault in group if fault.cell is not None))
    return keys[0] if len(keys) == 1 else str(len(keys) or "")


def slow_nodes_section(nodes: Sequence[SlowNode]) -> str:
    """Markdown table of slow nodes; empty when there is none."""
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


def slow_nodes_text(nodes: Iterable[SlowNode]) -> Iterator[str]:
    """A line on each slow node, with what to do about its times."""
    for node in nodes:
        if node.standing:
            yield (
                f"{node.text}: do not trust the times of its cells (see Slow nodes in the report). "
                "To retime them, run the same command again with another such node"
            )
        else:
            yield f"{node.text}: its cells were retimed elsewhere, and only those times count"


def slow_links_section(links: Iterable[SlowLink]) -> str:
    """Markdown list of slow links; empty when there is none."""
    lines = [f"- {link.text}." for link in links]
    return "\n".join(["## Slow links\n", *lines]) if lines else ""


def trouble_lines(faults: Faults, logged: Sequence[Logged], catalog: Catalog) -> Iterator[str]:
    """Lines on trials that were cut short, on slow nodes and on slow links."""
    if faults.faults:
        yield f"{faults_text(faults)} See Faults in the report."
    yield from slow_nodes_text(slow_nodes(observations_of(logged)))
    yield from (link.text for link in slow_links(links_of(logged), catalog))
