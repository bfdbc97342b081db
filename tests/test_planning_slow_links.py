"""Collectives of several GPUs are timed once a trial, and a link that is too slow is named."""

from dataclasses import dataclass, field

import pytest
from builders.gangs import gang_cell
from builders.observations import cpu, environment, measurement, observation

from gpu_catalog.catalog import load_catalog
from gpu_catalog.links.within_nodes import CollectiveName, link_speed
from orchestrator.planning.slow_links import slow_links
from orchestrator.reporting.sections.trouble_section import slow_links_section
from trials.child_process.forked_child import ProbeEnd
from trials.records.collectives import CollectiveTime
from trials.records.messages import ProbeRequest
from trials.records.model import find_model
from trials.records.observation import Observation, Outcome
from trials.records.timing_rule import TimingRule
from trials.run_trial import run_trial
from trials.trial import TrialTask

CATALOG = load_catalog()
GIB = 2**30
ONE = CollectiveTime(collective="all-reduce", buffer_bytes=2**20, seconds=0.001)


def timed(
    times: float,
    collective: CollectiveName = "all-reduce",
    gpus: int = 8,
    gpu: str = "H100-SXM",
) -> Observation:
    """A probe of 8 GPUs, one of whose collectives takes a multiple of its time by H100's NVLink."""
    cell = gang_cell(gpus=gpus).model_copy(update={"gpu": gpu})
    speed = link_speed("nvlink-switch-4", gpus, collective)
    seconds = speed.seconds(collective, gpus, GIB)
    collectives = (
        CollectiveTime(collective=collective, buffer_bytes=2**20, seconds=100 * seconds),
        CollectiveTime(collective=collective, buffer_bytes=GIB, seconds=times * seconds),
    )
    measured = measurement().model_copy(update={"collectives": collectives})
    where = environment(host="box", node_id="0123456789")
    return observation(1, cell=cell, measurement=measured, environment=where)


def test_the_time_of_a_collective_is_that_of_its_buffer_over_the_links_bandwidth() -> None:
    """2 x 7/8 x 1 GiB on 8 H100: 27 us, 19.8 MB at 297 GB/s, the rest at 377 GB/s."""
    speed = link_speed("nvlink-switch-4", 8, "all-reduce")
    expected = 27e-6 + 19.8e6 / 297e9 + (2 * 7 / 8 * GIB - 19.8e6) / 377e9
    assert speed.seconds("all-reduce", 8, GIB) == pytest.approx(expected)


def test_a_link_far_below_its_kind_is_named_with_its_node() -> None:
    """The largest buffer counts, in a line with host, collective, ratio and what to do."""
    (link,) = slow_links([timed(1.0), timed(3.0, "reduce-scatter")], CATALOG)
    assert (link.host, link.collective, round(link.times, 3)) == ("box", "reduce-scatter", 3.0)
    section = slow_links_section(slow_links([timed(3.0)], CATALOG))
    assert (
        "- box (01234567): all-reduce on 8 H100-SXM takes 3.0 times as long as by nvlink-switch-4"
    ) in section
    assert slow_links([timed(1.9)], CATALOG) == []
    assert slow_links([timed(100.0, gpu="GH200-96GB")], CATALOG) == []  # the catalog has no link
    assert slow_links_section(slow_links([timed(1.0)], CATALOG)) == ""


@dataclass
class Timing:
    """A prober whose first probe fails; it notes which ones were to time collectives."""

    requests: list[ProbeRequest] = field(default_factory=list)

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Answer with collectives where they are requested, unless it is the first probe."""
        del fresh
        self.requests.append(request)
        if len(self.requests) == 1:
            return ProbeEnd(Outcome.FAILED, "rank 1: killed", None, environment())
        if request.batch_size > 3:
            return ProbeEnd(Outcome.OUT_OF_MEMORY, "too much", None, environment())
        collectives = (ONE,) if request.times_collectives else ()
        measured = measurement(step_seconds=(0.1,) * 6 if request.timing else ())
        measured = measured.model_copy(update={"collectives": collectives})
        return ProbeEnd(Outcome.FITS, None, measured, environment())


@pytest.mark.parametrize("gpus", [1, 2])
def test_collectives_are_timed_until_an_observation_has_them(gpus: int) -> None:
    """A probe that fails has none; one GPU has no link."""
    cell = gang_cell()
    if gpus == 1:
        cell = cell.model_copy(update={"parallel": None})
    task = TrialTask(
        cell=cell,
        model=find_model("llama-tiny"),
        gpu=cpu(),
        seed=0,
        batch_limit=64,
        timing=TimingRule(),
        build_timeout_seconds=9,
        probe_timeout_seconds=9,
    )
    prober, observed = Timing(), list[Observation]()
    run_trial(task, prober, observed.append)
    timing = [request.times_collectives for request in prober.requests]
    first_fit = next(n for n, o in enumerate(observed) if o.outcome is Outcome.FITS)
    assert first_fit > 0
    assert timing == [gpus > 1 and n <= first_fit for n in range(len(timing))]
    with_collectives = [o for o in observed if o.measurement and o.measurement.collectives]
    assert len(with_collectives) == gpus - 1
