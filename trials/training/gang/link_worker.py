"""A rank without a model, which times the collectives over the links to the other ranks."""

from trials.ranks.collective_times import collective_times
from trials.ranks.rank import Rank
from trials.records.messages import ProbeReply, ProbeRequest, Setup
from trials.records.observation import Environment, Outcome
from trials.training.serving.fork_loop import Report
from trials.training.worker import environment_of, open_device

MEMORY_PARTS = 8  # of the memory limit, one of which the largest buffer may take


class LinkWorker:
    """A rank in the place of a ``Worker``; arguments as of that."""

    def __init__(self, setup: Setup, rank: Rank) -> None:
        self.device = open_device(setup, rank)
        self._threads, self._rank = setup.threads, rank

    def environment(self) -> Environment:
        """Software and device of this process."""
        return environment_of(self.device, self._threads, self._rank)

    def probe(self, request: ProbeRequest, _report: Report) -> ProbeReply:
        """Time the collectives; every rank has the same times."""
        times = collective_times(self._rank, self.device.memory_limit_bytes // MEMORY_PARTS)
        return ProbeReply(batch_size=request.batch_size, outcome=Outcome.FITS, collectives=times)
