"""Source of traces without a tracing process."""

from collections.abc import Sequence
from pathlib import Path

from trials.simulation.trace_cache import StepTrace
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.tracing_worker import Tracing


class InProcess:
    """Source of traces that this process makes; it keeps their lengths and numbers of ranks."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._tracing = Tracing(lambda _: None)
        self._traces: dict[str, StepTrace] = {}
        self.lengths: set[int] = set()
        self.ranks: set[int] = set()

    def get(self, request: TraceRequest) -> StepTrace:
        """Trace of a request, made once."""
        self.lengths.add(request.cell.seq_len)
        self.ranks.add(request.cell.ranks)
        if request.key not in self._traces:
            self._traces[request.key] = self._tracing.trace(request)
        return self._traces[request.key]

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Leave the traces to ``get``."""
