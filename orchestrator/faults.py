"""What went wrong while a sweep measured, and what it cost. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.record import Record
from orchestrator.tables import table
from trials.workload import Cell

Kind = Literal["died", "device", "node out", "no node"]


class Fault(Record):
    """One thing that went wrong.

    Attributes:
        kind: a trial ``died`` with its worker or node; a probe blamed its ``device``, and the trial
            went elsewhere; a ``node`` was taken ``out`` of the sweep; ``no node`` had a GPU.
        gpu: key of the GPU that was to measure.
        cell: what it was to measure; absent where more than one cell is concerned.
        node: the node's address; absent where it is not known, or there was none.
        node_id: Ray's name of it, which it loses when Ray is started on it again.
        reason: one line on why.
        at: UTC time in ISO 8601.
        lost_seconds: since the trial's last word, or its start: what was measured in vain.
    """

    kind: Kind
    gpu: str
    cell: Cell | None = None
    node: str | None = None
    node_id: str | None = None
    reason: str
    at: str
    lost_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Faults(Record):
    """What went wrong in a run so far, in its order."""

    faults: tuple[Fault, ...] = ()

    def nodes_out(self) -> dict[str, str]:
        """Why each node is out, by its id."""
        return {
            f.node_id: f"{f.node}: {f.reason}"
            for f in self.faults
            if f.kind == "node out" and f.node_id is not None
        }


NO_FAULTS = Faults()


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
