"""What went wrong while a sweep measured, and what it cost. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.record import Record
from trials.records.cell import Cell

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
