"""Section of faults: trials that were cut short, their causes, and the seconds lost."""

from collections import defaultdict
from collections.abc import Sequence

from orchestrator.markdown_table import records_table
from orchestrator.planning.faults import Fault, Faults

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
