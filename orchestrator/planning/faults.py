"""Faults of a sweep and the time they cost. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.record import Record
from trials.records.cell import Cell

Kind = Literal["died", "device", "node out", "no node"]


class Fault(Record):
    """One fault.

    Attributes:
        kind: ``died``: a trial ended with its worker or node; ``device``: a probe failed because of
            its device, and the trial moved to another node; ``node out``: a node was excluded from
            the sweep; ``no node``: no node had the GPU.
        cell: cell that was to be measured; None where several are concerned.
        node: address of the node; None where it is unknown or there was none.
        node_id: Ray's id of the node, which changes when Ray is restarted on it.
        at: UTC time in ISO 8601.
        lost_seconds: seconds since the trial's last report, or else its start: lost work.
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
    """Faults of a run so far, in their order."""

    faults: tuple[Fault, ...] = ()

    def nodes_out(self) -> dict[str, str]:
        """Reason why each excluded node is excluded, by its id."""
        return {
            f.node_id: f"{f.node}: {f.reason}"
            for f in self.faults
            if f.kind == "node out" and f.node_id is not None
        }


NO_FAULTS = Faults()
