"""Cells on several GPUs in a sweep: their keys, nodes, prices, laws and rows of the ranking."""

import json

import pytest
from builders.gangs import gang_cell
from builders.observations import environment, observation
from builders.rankings import DESK, TEXT, ranked, timed
from builders.runs import ONE_CELL, spec_of
from builders.specifications import altered, mistakes_in

from fitting.families.fit_family import fit_families
from fitting.largest_batch_prediction import memory_subject
from gpu_catalog.catalog import load_catalog
from gpu_catalog.links.between_nodes import NodeNetwork
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.faults import Fault
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import make_plan, trial_task
from orchestrator.planning.spending import Meter
from orchestrator.pricing.layout_offers import layout_offers
from orchestrator.ranking.ranked_offer import ranking_csv
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.spec.job import Job
from trials.recipes.parallel import Parallel
from trials.records.cell import Cell
from trials.records.log_reader import LineReader
from trials.records.observation import Observation, Outcome, RankReading

GANG = "    parallel: [{gpus: 2, strategy: fsdp2}, {gpus: 2, strategy: ddp}]\nworkload:"
SPEC_TEXT = altered("workload:", GANG)
TWO_CORES = ClusterResources((Node({"CPU": 2.0}, node_id="n1"),))
TOGETHER = DESK.model_copy(update={"parallel": Parallel(gpus=2, strategy="fsdp2")})


def test_a_block_has_a_cell_for_each_layout_and_others_keep_their_keys() -> None:
    """The key of a cell on one GPU is as it was before there were layouts."""
    (alone,) = spec_of(ONE_CELL).all_cells()
    sharded, copied = spec_of(SPEC_TEXT).all_cells()
    assert (sharded.key, copied.key) == (f"{alone.key}/2xfsdp2", f"{alone.key}/2xddp")
    assert (alone.devices, sharded.devices, sharded.gpus) == ("cpu", "2xcpu", "2xcpu fsdp2")
    assert "parallel" not in alone.model_dump_json()
    assert spec_of(SPEC_TEXT + "as_if: [A40]\n".replace("A40", "small") + SMALL).all_cells() == [
        sharded,
        copied,
    ]


SMALL = """\
catalog:
  gpus:
    - {key: small, kind: cpu, usable_memory_bytes: 1000000, source: me, recorded: 2026-01-31}
"""


@pytest.mark.parametrize(
    ("layouts", "mistake"),
    [
        ("[{gpus: 1, strategy: ddp}]", "7: cells[0].parallel[0]: gpus must be at least 2 for "),
        ("[{gpus: 2, strategy: pp}]", "7: cells[0].parallel[0].strategy: "),
        (
            "[{gpus: 2, strategy: ddp}, {gpus: 2, strategy: ddp}]",
            "7: cells[0].parallel[1]: {gpus: 2, strategy: 'ddp'} is listed twice: keep one",
        ),
        (
            "[{gpus: 3, strategy: ddp}]",
            "7: cells[0].parallel[0]: effective_batch 8 cannot be shared by 3 GPUs: use a multiple",
        ),
    ],
)
def test_mistakes_in_layouts_are_reported_with_their_place(layouts: str, mistake: str) -> None:
    """They name the value, its line and what to do."""
    text = altered("precision: fp32", "precision: fp32, effective_batch: 8")
    text = altered("workload:", f"    parallel: {layouts}\nworkload:", text)
    assert any(line.startswith(mistake) for line in mistakes_in(text)), mistakes_in(text)


def test_a_recipe_is_not_chosen_for_several_gpus() -> None:
    """The choice is by the simulation of one GPU."""
    text = altered("[cpu]", "[A40]", SPEC_TEXT).replace("{method: full, precision: fp32}", "auto")
    assert any("auto chooses a recipe for one GPU" in line for line in mistakes_in(text))


def test_drawn_lengths_are_not_measured_on_several_gpus() -> None:
    """Each rank would draw its own."""
    lines = mistakes_in(SPEC_TEXT + "lengths: drawn\n")
    assert any(
        line.startswith("7: cells[0].parallel[0]: lengths: drawn is not measured on several GPUs")
        for line in lines
    )


def test_ranks_need_one_node_that_has_all_their_gpus() -> None:
    """Two nodes of one core do not do, nor do recipes that several GPUs cannot run."""
    spec = spec_of(SPEC_TEXT)
    catalog, cells = spec.merged_catalog(), tuple(spec.all_cells())
    apart = ClusterResources((Node({"CPU": 1.0}), Node({"CPU": 1.0})))
    assert make_plan(spec, catalog, TWO_CORES, []).pending == cells
    reasons = [skip.reason for skip in make_plan(spec, catalog, apart, []).skipped]
    assert reasons == ["2 ranks need a machine with 2 cores; the largest has 1"] * 2
    compared = spec_of(SPEC_TEXT.replace("fp32", "fp32, task: orpo"))
    reasons = [skip.reason for skip in make_plan(compared, catalog, TWO_CORES, []).skipped]
    assert reasons == ["task orpo is not measured on several GPUs: use sft"] * 2


def test_a_trial_of_ranks_asks_ray_for_all_their_gpus() -> None:
    """The GPUs of a node share its cores; a rank on a CPU has one."""
    a40, cpu = (load_catalog().gpu(key) for key in ("A40", "cpu"))
    box = ClusterResources((Node({"CPU": 16.0, "GPU": 8.0, "A40": 8.0}),))
    assert box.trial_resources(a40, 4) == {"CPU": 1.0, "A40": 4.0, "GPU": 4.0}
    assert (box.at_a_time(a40, 4), box.at_a_time(a40)) == (2, 8)
    assert box.threads(a40) == 2
    assert box.trial_resources(cpu, 4) == {"CPU": 4.0}


def test_the_effective_batch_is_that_of_all_ranks() -> None:
    """Each rank tries batches up to its part of it, and an observation counts those of all."""
    text = SPEC_TEXT.replace("precision: fp32", "precision: fp32, effective_batch: 8")
    spec = spec_of(text)
    cell = spec.all_cells()[0]
    assert trial_task(spec, spec.merged_catalog(), cell, []).batch_limit == 4
    probe = observation(2, cell=cell)
    assert (probe.micro_batches, probe.examples_per_step) == (2, 8)


def test_one_gpu_and_several_wait_for_nodes_in_queues_of_their_own() -> None:
    """Each is placed as often as idle nodes hold it, and once more."""
    spec = spec_of(SPEC_TEXT)
    (alone,) = spec_of(ONE_CELL).all_cells()
    cells = [*spec.all_cells(), alone]
    catalog = spec.merged_catalog()
    requests = {"2xcpu": {"CPU": 2.0}, "cpu": {"CPU": 1.0}}
    scheduler = Scheduler(
        cells,
        lambda cell: trial_task(spec, catalog, cell, []),
        requests,
        TWO_CORES,
        wait_seconds=60.0,
        nodes_out={},
        note=lambda _: None,
    )
    placed: dict[Cell, object] = {}
    while (placement := scheduler.next()) is not None:
        placed[placement.task.cell] = placement.resources
    assert placed == {cell: requests[cell.devices] for cell in cells}
    scheduler.started(cells[0])
    scheduler.located(cells[0], NodeAddress("n1", "10.0.0.1"))
    assert scheduler.ended(cells[0], None) is None


BOX_TEXT = altered("[desk, lap, attic]", "[desk]", TEXT)


def test_an_instance_with_too_few_gpus_prices_no_node_of_several() -> None:
    """The whole instance counts, however many of its GPUs are used."""
    rates = NodePrices(spec_of(BOX_TEXT).merged_catalog())
    (one, two, many) = (rates.offer(devices) for devices in ("desk", "2xdesk", "8xdesk"))
    assert one is not None
    assert two is not None
    assert (one.instance, two.instance, many) == ("single", "whole", None)
    meter = Meter(spec_of(BOX_TEXT), rates, [probe_of(TOGETHER)])
    assert [(part.gpu, part.offer) for part in meter.spent] == [("2xdesk", two)]


def probe_of(cell: Cell) -> Observation:
    """A timed probe of a cell on a node."""
    return timed(8, 0.1, 0.1, cell=cell, environment=environment(node_id="n1"))


def test_several_gpus_are_ranked_beside_one_by_their_whole_instances() -> None:
    """Two GPUs take half the steps of as many examples each; one offer has as many."""
    spec = spec_of(
        altered("workload:", "    parallel: [{gpus: 2, strategy: fsdp2}]\nworkload:", BOX_TEXT)
    )
    ranking = ranked([timed(8, 0.1, cell=TOGETHER)], spec=spec)
    (row,) = ranking.offers
    assert row.instance == "whole"
    assert row.examples_per_second == pytest.approx(160)
    assert row.hours * 3600 == pytest.approx(3 * 1000 / 16 * 0.1)
    assert row.usd == pytest.approx(row.hours * 7.2)
    header, line = ranking_csv(ranking).splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["layout"] == "2xfsdp2"


def test_laws_hold_one_layout() -> None:
    """Step times and peaks of two GPUs say nothing about those of one."""
    both = [timed(size, 0.1 * size, cell=cell) for size in (1, 2, 4) for cell in (DESK, TOGETHER)]
    names = [family.name for family in fit_families(both)]
    assert [name.layout for name in names] == [None, "2xfsdp2"]
    assert "layout" not in json.loads(names[0].model_dump_json())
    assert memory_subject(DESK) != memory_subject(TOGETHER)


def test_ranks_of_a_cell_are_counted_by_its_layout() -> None:
    """A cell without one has one rank."""
    assert (gang_cell(gpus=4).ranks, DESK.ranks) == (4, 1)


ON_NODES = altered(
    "workload:",
    "    simulated_on: [A100-80GB-SXM]\n    parallel: [{gpus: 16, nodes: 2, strategy: hsdp, "
    "replicas: 2}]\nworkload:",
)


def test_a_simulated_layout_of_several_nodes_has_a_cell_for_each_network_of_instances() -> None:
    """One that names its network has one; memory and operators are those of one node's trace."""
    cells = spec_of(ON_NODES).all_cells()
    layouts = [cell.parallel for cell in cells]
    assert {layout.key for layout in layouts if layout is not None} == {
        "16xhsdp-2replicas-2nodes-100gbps",
        "16xhsdp-2replicas-2nodes-400gbps-rdma",
        "16xhsdp-2replicas-2nodes-1600gbps-rdma",
        "16xhsdp-2replicas-2nodes",
    }
    assert {cell.gpus for cell in cells} == {"16xA100-80GB-SXM hsdp, 2 nodes"}
    assert len({layout and layout.on_one_node for layout in layouts}) == 1
    named = ON_NODES.replace("replicas: 2}", "replicas: 2, node_network_gbps: 100, rdma: false}")
    (cell,) = spec_of(named).all_cells()
    assert cell.nodes == 2
    assert cell.parallel is not None
    assert cell.parallel.network == NodeNetwork(100, rdma=False)


@pytest.mark.parametrize(
    ("layout", "mistake"),
    [
        ("strategy: hsdp", "hsdp needs replicas, the number of copies of the model: add it"),
        ("strategy: fsdp2, degree: 2", "degree is a choice of tp, not of fsdp2: leave it out"),
        (
            "strategy: tp, degree: 3",
            "degree 3 of tp does not divide the 16 GPUs of a node: use a divisor",
        ),
        (
            "strategy: tp, reshard_after_forward: false",
            "reshard_after_forward is a choice of tp with a degree below gpus: leave it out",
        ),
        (
            "strategy: tp, nodes: 16",
            "tp needs at least 2 GPUs on a node: use fsdp2, or fewer nodes",
        ),
        ("strategy: ddp, replicas: 2", "replicas is a choice of hsdp, not of ddp: leave it out"),
        (
            "strategy: hsdp, replicas: 3",
            "16 GPUs cannot be divided into 3 replicas of at least 2: use a multiple",
        ),
        ("strategy: fsdp2, nodes: 3", "16 GPUs cannot be divided among 3 nodes: use a multiple"),
        (
            "strategy: fsdp2, node_network_gbps: 400, rdma: true",
            "node_network_gbps and rdma are those of several nodes: add nodes, or leave them",
        ),
        (
            "strategy: fsdp2, nodes: 2, node_network_gbps: 400",
            "node_network_gbps and rdma are given together or not at all",
        ),
    ],
)
def test_impossible_layouts_are_mistakes_with_their_place(layout: str, mistake: str) -> None:
    """They say what does not add up, and what to do."""
    text = altered("workload:", f"    parallel: [{{gpus: 16, {layout}}}]\nworkload:")
    assert any(
        line.startswith("7: cells[0].parallel[0]") and line.endswith(mistake)
        for line in mistakes_in(text)
    ), mistakes_in(text)


NODES_TEXT = altered("workload:", "    parallel: [{gpus: 4, strategy: ddp, nodes: 2}]\nworkload:")


def nodes_of(*cores: float) -> ClusterResources:
    """A cluster of nodes with so many cores."""
    return ClusterResources(
        tuple(Node({"CPU": count}, node_id=f"n{number}") for number, count in enumerate(cores))
    )


def test_several_nodes_have_to_be_there_at_once() -> None:
    """One large node does not do; the plan says what is missing."""
    spec = spec_of(NODES_TEXT)
    (cell,) = spec.all_cells()
    assert (cell.devices, cell.node_devices) == ("2x2xcpu", "2xcpu")
    catalog = spec.merged_catalog()
    assert make_plan(spec, catalog, nodes_of(2, 3), []).pending == (cell,)
    (skip,) = make_plan(spec, catalog, nodes_of(8, 1), []).skipped
    assert skip.reason == (
        "the cluster does not have 2 nodes with 2 CPU each, which 4 ranks on 2 nodes need: start "
        "more"
    )


@pytest.mark.parametrize(
    ("cores", "trials"), [((2, 2), 1), ((4, 4), 2), ((8, 2), 1), ((2, 2, 2), 1), ((4, 4, 2, 2), 3)]
)
def test_as_many_trials_of_two_nodes_fit_as_have_them_for_themselves(
    cores: tuple[float, ...], trials: int
) -> None:
    """A node has room for at most one part of each."""
    assert nodes_of(*cores).at_a_time(load_catalog().gpu("cpu"), 2, 2) == trials


def test_an_autoscaler_has_to_be_able_to_start_as_many_nodes() -> None:
    """The head declares how many nodes with as many GPUs it can have."""
    a40 = load_catalog().gpu("A40")
    head = [ClusterResources((Node({"scales-to-8xA40": count}),)) for count in (1.0, 2.0, 5.0)]
    assert [cluster.at_a_time(a40, 8, 2) for cluster in head] == [0, 1, 2]


def scheduler_of_nodes(*cores: float) -> tuple[Scheduler, Cell, list[Fault]]:
    """A scheduler for a cell on two nodes of two cores, the cell, and the faults to come."""
    spec, faults = spec_of(NODES_TEXT), list[Fault]()
    (cell,) = spec.all_cells()
    catalog = spec.merged_catalog()
    scheduler = Scheduler(
        [cell],
        lambda cell: trial_task(spec, catalog, cell, []),
        {"2x2xcpu": {"CPU": 2.0}},
        nodes_of(*cores),
        wait_seconds=0.0,
        nodes_out={},
        note=faults.append,
    )
    return scheduler, cell, faults


def test_a_trial_waits_while_it_has_only_one_of_its_nodes() -> None:
    """With none to come, the wait ends with one line."""
    scheduler, cell, _ = scheduler_of_nodes(2, 2)
    assert scheduler.next() is not None
    scheduler.update(nodes_of(2))
    assert scheduler.no_node[cell] == (
        "no 2 nodes with 2xcpu came back within 0 minutes (--wait-for-nodes): start more and run "
        "the same command again, which continues where this stopped"
    )


def test_a_sick_device_is_that_of_the_rank_that_the_error_names() -> None:
    """The cell goes on with the node that is well and another one."""
    scheduler, cell, faults = scheduler_of_nodes(2, 2, 2)
    assert scheduler.next() is not None
    scheduler.started(cell)
    scheduler.located(cell, NodeAddress("n0", "10.0.0.1"), NodeAddress("n1", "10.0.0.2"))
    error = "rank 3: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    scheduler.observed(
        observation(1, cell=cell, outcome=Outcome.FAILED).model_copy(update={"detail": error})
    )
    assert scheduler.ended(cell, None) == error
    assert [(fault.kind, fault.gpu) for fault in faults] == [("device", "2x2xcpu")]
    placement = scheduler.next()
    assert placement is not None
    assert placement.avoid == ("n1",)


def test_nodes_of_a_trial_are_paid_for_together() -> None:
    """A probe costs two instances for its time, and each node its start, also as `status` reads."""
    text = altered(
        "workload:", "    parallel: [{gpus: 4, strategy: ddp, nodes: 2}]\nworkload:", BOX_TEXT
    )
    spec = spec_of(text)
    (cell,) = spec.all_cells()
    offer = NodePrices(spec.merged_catalog()).offer(cell.devices)
    assert offer is not None
    assert (offer.instance, offer.usd_per_hour) == ("whole", 14.4)
    ranks = tuple(
        RankReading(rank=rank, node_id=f"n{rank // 2 + 1}", peak_allocated_bytes=1)
        for rank in range(4)
    )
    probe = probe_of(cell)
    assert probe.measurement is not None
    measured = probe.measurement.model_copy(update={"ranks": ranks})
    probe = probe.model_copy(update={"measurement": measured, "seconds": 3600.0})
    line = probe.model_dump_json().encode()
    for reader in (LineReader(), LineReader(brief=[cell], steps=False)):
        (part,) = Meter(spec, NodePrices(spec.merged_catalog()), [reader.logged(line)]).spent
        assert (part.nodes, part.startup_seconds) == (2, part.start_seconds)
        assert part.usd == pytest.approx(14.4 * (1 + part.start_seconds / 3600))


def test_each_node_of_a_layout_rents_an_instance_whole() -> None:
    """Two nodes of two GPUs cost two instances, and offers with another network do not count."""
    apart = Parallel(gpus=4, strategy="ddp", nodes=2)
    cell = DESK.model_copy(update={"parallel": apart})
    spec = spec_of(
        altered(
            "workload:", "    parallel: [{gpus: 4, strategy: ddp, nodes: 2}]\nworkload:", BOX_TEXT
        )
    )
    (row,) = ranked([timed(8, 0.1, cell=cell)], spec=spec).offers
    assert (row.instance, row.instances, row.usd_per_hour) == ("whole", 2, 14.4)
    assert row.usd == pytest.approx(row.hours * 14.4)
    offers = spec.merged_catalog().offers("desk")
    fast = apart.on_network(NodeNetwork(400, rdma=True))
    assert layout_offers(offers, fast) == []


def test_an_interruption_of_any_spot_instance_stops_the_job() -> None:
    """Two of them are interrupted twice as often."""
    job = Job(examples=1000, epochs=3)
    assert job.on_nodes(1) is job
    assert job.on_nodes(2).overheads.interruptions_per_day == pytest.approx(0.2)
