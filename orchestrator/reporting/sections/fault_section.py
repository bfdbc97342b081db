"""Section of faults: trials cut short, their causes, and the seconds lost."""

from collections import defaultdict
from collections.abc import Sequence

from orchestrator.markdown_table import table
from orchestrator.planning.faults import Fault, Faults


def faults_section(faults: Faults) -> str:
    """A table of what went wrong; empty when nothing did."""
    if not faults.faults:
        return ""
    groups: dict[tuple[str, str, str, str], list[Fault]] = defaultdict(list)
    for fault in faults.faults:
        groups[fault.kind, fault.gpu, fault.node or "", fault.reason].append(fault)
    rows = [
        (
            gpu,
            node,
            WORDS[kind],
            len(group),
            _cells(group),
            f"{sum(f.lost_seconds for f in group):.0f}",
            reason,
        )
        for (kind, gpu, node, reason), group in groups.items()
    ]
    headers = ("GPU", "node", "what", "times", "trials", "seconds lost", "why")
    return f"## Faults\n\n{faults_text(faults)}\n\n{table(headers, rows)}"


def faults_text(faults: Faults) -> str:
    """How often trials died and what that cost, in a sentence."""
    again = [f for f in faults.faults if f.kind in {"died", "device"}]
    lost = sum(f.lost_seconds for f in again)
    return (
        f"{len(again)} times a trial was cut short, and {lost:.0f} s of measuring were lost with "
        "it; what it had reported until then was kept."
    )


WORDS = {
    "died": "trial died",
    "device": "trial moved away",
    "node out": "taken out",
    "no node": "not to be had",
}


def _cells(group: Sequence[Fault]) -> str:
    keys = list(dict.fromkeys(f.cell.key for f in group if f.cell is not None))
    return keys[0] if len(keys) == 1 else str(len(keys) or "")
