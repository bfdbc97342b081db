"""A prober of a device whose memory is affine in the batch size."""

from collections.abc import Callable
from dataclasses import dataclass, field

from builders.observations import environment, measurement

from trials.child_process.forked_child import ProbeEnd
from trials.records.messages import ProbeRequest
from trials.records.observation import Outcome

MODEL_BYTES = 1000
BUDGET_BYTES = 10_000
Interference = Callable[[ProbeRequest], ProbeEnd | None]


def miss(outcome: Outcome = Outcome.OUT_OF_MEMORY) -> ProbeEnd:
    """End of a probe that does not fit."""
    # Steps that thrash have run, and are measured.
    reached = measurement(BUDGET_BYTES) if outcome is Outcome.THRASHING else None
    return ProbeEnd(outcome, "too much", reached, environment(), BUDGET_BYTES)


@dataclass
class LawProber:
    """A prober that replies as a device with affine memory does, and keeps the requests.

    ``interfering`` may reply in its place. A batch size below ``effective_batch`` accumulates
    gradients, which takes ``gradient_bytes`` more.
    """

    example_bytes: int
    interfering: Interference = lambda _: None
    requests: list[ProbeRequest] = field(default_factory=list)
    fresh: list[ProbeRequest] = field(default_factory=list)
    effective_batch: int = 1
    gradient_bytes: int = 0

    def peak_bytes(self, batch_size: int) -> int:
        """Peak memory of a batch size."""
        gradients = self.gradient_bytes if batch_size < self.effective_batch else 0
        return MODEL_BYTES + self.example_bytes * batch_size + gradients

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        self.requests.append(request)
        self.fresh += [request] if fresh else []
        interference = self.interfering(request)
        if interference is not None:
            return interference
        peak = self.peak_bytes(request.batch_size)
        if peak > BUDGET_BYTES:
            return miss()
        seconds = () if request.timing is None else (0.1,) * 6
        reached = measurement(peak, seconds)
        return ProbeEnd(Outcome.FITS, None, reached, environment(), BUDGET_BYTES)
