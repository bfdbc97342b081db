"""Links of several GPUs are timed once on the same nodes, and one that is too slow is named."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest
from builders.gangs import gang_cell, link_times
from builders.observations import cpu, environment, measurement, observation
from builders.runs import ONE_CELL, spec_of
from pydantic import ValidationError

from gpu_catalog.catalog import load_catalog
from gpu_catalog.links.within_nodes import CollectiveName, link_speed
from orchestrator.cli.main import main
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.slow_links import slow_links
from orchestrator.planning.spending import Meter
from orchestrator.reporting.sections.trouble_section import slow_links_section
from orchestrator.run_folder.observation_log import unreadable
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import open_run
from orchestrator.run_folder.run_results import results_of
from trials.child_process.forked_child import ProbeEnd
from trials.records.cell import Cell
from trials.records.collectives import CollectiveTime
from trials.records.log_reader import LineReader
from trials.records.messages import ProbeRequest
from trials.records.model import find_model
from trials.records.observation import LOG_VERSION, Observation, Outcome
from trials.records.profile import (
    LinkTimes,
    Logged,
    link_or_none,
    linked_nodes,
    links_of,
    observations_of,
    profile_or_none,
)
from trials.records.timing_rule import TimingRule
from trials.run_trial import trial_results
from trials.trial import TrialTask

CATALOG = load_catalog()
GIB = 2**30
ONE = CollectiveTime(collective="all-reduce", buffer_bytes=2**20, seconds=0.001)


def timed(
    times: float,
    collective: CollectiveName = "all-reduce",
    gpus: int = 8,
    gpu: str = "H100-SXM",
) -> LinkTimes:
    """Links of 8 GPUs, where a collective takes a multiple of its time by H100's NVLink."""
    cell = gang_cell(gpus=gpus).model_copy(update={"gpu": gpu})
    speed = link_speed("nvlink-switch-4", gpus, collective)
    seconds = speed.seconds(collective, gpus, GIB)
    return link_times(
        cell,
        CollectiveTime(collective=collective, buffer_bytes=2**20, seconds=100 * seconds),
        CollectiveTime(collective=collective, buffer_bytes=GIB, seconds=times * seconds),
        environment=environment(host="box", node_id="0123456789"),
    )


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
    """A prober whose links cannot be timed at first; it notes what was requested."""

    requests: list[ProbeRequest] = field(default_factory=list)
    broken: str | None = "no answer within 9 s, timing the links: rank 1 hung"

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Answer with collectives where they are requested; no batch fits."""
        del fresh
        self.requests.append(request)
        if not request.times_link:
            return ProbeEnd(Outcome.OUT_OF_MEMORY, "too much", None, environment())
        if self.broken:
            return ProbeEnd(Outcome.TIMED_OUT, self.broken, None, environment())
        return ProbeEnd(Outcome.FITS, None, None, environment(), collectives=(ONE,))


def task(cell: Cell, *linked: tuple[str, ...]) -> TrialTask:
    """A trial of a cell, in a run where links between some nodes were timed."""
    return TrialTask(
        cell=cell,
        model=find_model("llama-tiny"),
        gpu=cpu(),
        seed=0,
        batch_limit=64,
        timing=TimingRule(),
        build_timeout_seconds=9,
        probe_timeout_seconds=9,
        linked=linked,
    )


def logged(
    cell: Cell, *linked: tuple[str, ...], prober: Timing | None = None, nodes: Sequence[str] = "ab"
) -> list[Logged]:
    """Results of a trial, in their order."""
    results = trial_results(task(cell, *linked), prober or Timing(broken=None), node_ids=nodes)
    return [result for result, _ in results]


def test_links_are_timed_before_the_first_probe_and_kept_where_no_batch_fits() -> None:
    """The times are a record of their own, with the nodes of the ranks; a probe has none."""
    link, *probes = logged(gang_cell(nodes=2))
    assert isinstance(link, LinkTimes)
    assert (link.node_ids, link.times, link.detail) == (("a", "b"), (ONE,), None)
    assert link.environment is not None
    assert link.environment.node_id == "a"
    assert {probe.outcome for probe in observations_of(probes)} == {Outcome.OUT_OF_MEMORY}
    assert len(observations_of(probes)) == len(probes) > 0


def test_links_are_timed_once_on_the_same_nodes() -> None:
    """Whatever their order; other nodes, and fewer, have links of their own; one GPU has none."""

    def kinds(cell: Cell, *linked: tuple[str, ...]) -> list[type]:
        return [type(result) for result in logged(cell, *linked)][:2]

    assert kinds(gang_cell(), ("b", "a")) == [Observation]
    assert kinds(gang_cell(), ("a",), ("a", "c")) == [LinkTimes, Observation]
    assert kinds(gang_cell().model_copy(update={"parallel": None})) == [Observation]
    assert kinds(gang_cell().model_copy(update={"simulated": True})) == [Observation]


def test_a_trial_that_was_told_to_end_while_it_timed_links_probes_nothing() -> None:
    """As when its budget is spent."""
    results: list[Logged] = []
    results.extend(
        result
        for result, _ in trial_results(
            task(gang_cell()), Timing(broken=None), node_ids="ab", keep_going=lambda: not results
        )
    )
    assert [type(result) for result in results] == [LinkTimes]


def test_a_link_that_cannot_be_timed_says_why_and_the_trial_goes_on() -> None:
    """Its line has no times."""
    prober = Timing()
    link, *probes = logged(gang_cell(), prober=prober)
    assert isinstance(link, LinkTimes)
    assert (link.times, link.detail) == ((), prober.broken)
    assert [request.times_link for request in prober.requests] == [True, *(False for _ in probes)]
    assert slow_links([link], CATALOG) == []


def test_a_link_within_a_probe_of_an_earlier_log_is_read_as_one_of_its_own() -> None:
    """The line has neither nodes nor seconds of its own; the probe has."""
    times = timed(3.0)
    measured = measurement().model_copy(update={"collectives": times.times})
    probe = observation(1, cell=times.cell, measurement=measured, environment=times.environment)
    line = probe.model_dump_json().encode()
    for reader in (LineReader(), LineReader(brief=[times.cell], steps=False)):
        (link,) = links_of([reader.logged(line)])
        assert link == times.model_copy(update={"seconds": 0.0})


def test_a_line_of_links_is_read_back_and_refused_where_it_is_newer() -> None:
    """Programs of version 1 refuse it by that version, those of today one of a later version."""
    link = timed(1.0)
    line = link.model_dump_json().encode()
    assert LineReader().logged(line) == link_or_none(line) == link
    assert LineReader().observation_or_none(line) is None
    assert profile_or_none(line) is None
    assert link.log_version == 2
    newer = line.replace(b'"log_version":2', b'"log_version":%d' % (LOG_VERSION + 1))
    with pytest.raises(ValidationError) as refused:
        link_or_none(newer)
    assert "written by a newer version" in unreadable(refused.value)


SPEC = ONE_CELL.replace("[cpu]", "[H100-SXM]").replace(
    "seq_lens: [16]", "seq_lens: [16]\n    parallel: [{gpus: 8, strategy: fsdp2}]"
)


def test_a_link_is_no_probe_of_a_run_but_its_time_is_paid_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone in a log it is named if it is slow; a second writer does not write it again."""
    spec = spec_of(SPEC)
    (cell,) = spec.all_cells()
    link = timed(3.0).model_copy(update={"cell": cell, "node_ids": ("0123456789",)})
    folder = open_run(str(tmp_path / "run"), SPEC, spec)
    for is_new in (True, False):
        with ObservationWriter(folder) as writer:
            assert writer.append(link) == is_new
    assert folder.links() == folder.logged() == [link]
    assert folder.observations() == folder.profiles() == []
    (spent,) = Meter(spec, NodePrices(spec.merged_catalog()), folder.logged()).spent
    assert (spent.probes, spent.probe_seconds, spent.nodes) == (0, link.seconds, 1)
    results = results_of(folder, spec, spec.merged_catalog(), date(2026, 11, 20))
    assert (results.observed, results.fits.families) == ([], ())
    assert [one.node_id for one in results.whole.slow_links] == ["0123456789"]
    assert main(["status", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if cell.key in line)
    assert row.split()[-2:] == ["0", "|"]  # observations
    assert "all-reduce on 8 H100-SXM takes 3.0 times as long" in shown
    assert linked_nodes([link], cell) == (("0123456789",),)
    assert linked_nodes([link.model_copy(update={"outcome": Outcome.FAILED})], cell) == ()
    assert linked_nodes([link], gang_cell(gpus=4)) == ()
