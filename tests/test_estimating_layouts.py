"""Numbers of GPUs and strategies that one estimate compares."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orchestrator
from gpu_catalog.catalog import load_catalog
from gpu_catalog.links.between_nodes import NodeNetwork
from orchestrator.datasets.lengths import DataLengths
from orchestrator.estimating.batch_choice import simulations, timed_length
from orchestrator.estimating.choosing.layouts import (
    best_layouts,
    layouts,
    names_by_count,
    on_changed_layout,
    on_layout,
    placed_layouts,
)
from orchestrator.estimating.estimate_request import EstimateRequest, question_of
from orchestrator.estimating.question import EstimateError
from orchestrator.pricing.layout_offers import layout_offers
from orchestrator.request import request_of
from trials.recipes.parallel import Parallel
from trials.records.observation import Outcome
from trials.simulation.ranks.rank_timeline import collective_seconds
from trials.simulation.recording import Collective, Column
from trials.simulation.trace_cache import StepTrace
from trials.simulation.trace_request import TraceRequest

CATALOG = load_catalog()
ALL_REDUCE = np.array([Collective.ALL_REDUCE])
MOVED = np.zeros((1, len(Column)))
MOVED[:, Column.BYTES], MOVED[:, [Column.PRODUCTS, Column.COLUMNS]] = 1e9, (2, 1)
TODAY = dt.date(2026, 11, 23)


class Asked:
    """Source of traces that keeps what it is asked for, call by call, and makes none."""

    folder: Path | None = None

    def __init__(self) -> None:
        self.calls: list[set[str]] = []

    def get(self, request: TraceRequest) -> StepTrace:
        """No trace."""
        raise AssertionError(request.key)

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Keep the keys of the traces."""
        self.calls.append({request.key for request in requests})


@pytest.mark.parametrize(
    ("trainer", "alone", "together"),
    [("TRL", False, False), ("axolotl", True, True), ("LLaMA-Factory", False, True)],
)
def test_the_allocator_is_set_as_the_trainers_command_sets_it(
    *, trainer: str, alone: bool, together: bool
) -> None:
    """LLaMA-Factory's does it for several GPUs."""
    request = request_of(
        EstimateRequest, {"model": "llama-tiny", "seq_len": 512, "trainer": trainer}
    )
    question = question_of(request, CATALOG, TODAY)
    (layout,) = layouts(2, "ddp", 1)
    assert question.expandable_segments == alone
    assert on_layout(question, layout, 64).expandable_segments == together


def test_all_layouts_are_traced_at_once_and_ddp_has_the_trace_of_one_gpu() -> None:
    """Each number of shards has a trace of its own."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 512})
    question = question_of(request, CATALOG, TODAY)
    on_layouts = [layout for count in (1, 2, 4) for layout in layouts(count, "auto", 1)]
    source = Asked()
    gpu = CATALOG.gpu("H100-SXM")
    simulations([(on_layout(question, layout, 64), gpu) for layout in on_layouts], source)
    assert len(on_layouts) == 5
    assert [len(call) for call in source.calls] == [3]


def test_of_strategies_that_do_not_fit_the_one_with_the_least_memory_is_shown() -> None:
    """Changes that make it fit are looked for there, too."""
    job: dict[str, Any] = {"method": "full", "seq_len": 16, "gpu": "A40", "strategy": "ddp"}
    (row,) = orchestrator.estimate("llama-tiny", **job, gpus=2, batch_size=2)
    misfits = [
        replace(row, estimate=row.estimate.model_copy(update=update | {"price": None}))
        for update in (
            {"strategy": "fsdp2", "reserved_gib": 2.0, "outcome": Outcome.OUT_OF_MEMORY},
            {"strategy": "ddp", "reserved_gib": 1.0, "outcome": Outcome.OUT_OF_MEMORY},
        )
    ]
    assert [best.estimate.strategy for best in best_layouts(misfits)] == ["ddp"]
    assert best_layouts([*misfits, row]) == [row]


def test_a_count_in_the_name_of_a_gpu_replaces_those_of_the_option() -> None:
    """Too many GPUs are an error."""
    names = names_by_count(["8xH100-SXM", "A40"], [1, 2])
    assert names == {8: ("H100-SXM",), 1: ("A40",), 2: ("A40",)}
    with pytest.raises(EstimateError, match="1024 GPUs"):
        names_by_count(["A40"], [1024])


def test_layouts_of_several_nodes_have_as_many_gpus_on_each() -> None:
    """A copy of the model on each node is one of them, where it has GPUs to share it."""
    keys = [layout.key for layout in layouts(16, "auto", 2) if layout is not None]
    assert keys == ["16xfsdp2-2nodes", "16xhsdp-2replicas-2nodes", "16xddp-2nodes"]
    assert [layout and layout.key for layout in layouts(2, "auto", 2)] == [
        "2xfsdp2-2nodes",
        "2xddp-2nodes",
    ]
    with pytest.raises(EstimateError, match="--nodes 2: 9 GPUs cannot be divided among them"):
        layouts(9, "auto", 2)
    with pytest.raises(EstimateError, match="--strategy hsdp: 8 GPUs on 1 node: "):
        layouts(8, "hsdp", 1)


def test_tensor_parallelism_takes_the_gpus_of_a_node_and_auto_leaves_it_out() -> None:
    """One GPU a node has no others to divide layers with."""
    keys = [layout and layout.key for layout in layouts(16, "tp", 2)]
    assert keys == ["16xtp-8degree-2nodes"]
    with pytest.raises(EstimateError, match="--strategy tp: 2 GPUs on 2 nodes: it divides "):
        layouts(2, "tp", 2)


def test_a_change_of_layout_keeps_gpus_and_contradicts_no_given_strategy() -> None:
    """A group of ``tp`` trains on one batch, so that each rank's part of it is larger."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 128})
    question = question_of(request, CATALOG, TODAY)
    (layout, _) = layouts(8, "auto", 1)
    sharded = on_layout(question, layout, 64)
    by_tp = on_changed_layout(sharded, {"strategy": "tp"}, "auto", 64)
    assert by_tp is not None
    assert by_tp.parallel == Parallel(gpus=8, strategy="tp")
    assert (sharded.batch_limit, by_tp.batch_limit) == (2, 16)
    on_host = on_changed_layout(sharded, {"strategy": "fsdp2", "offload": "all"}, "fsdp2", 64)
    assert on_host is not None
    assert on_host.parallel == Parallel(gpus=8, strategy="fsdp2", shards_on_host=True)
    assert on_changed_layout(sharded, {"strategy": "tp"}, "fsdp2", 64) is None
    assert on_changed_layout(sharded, {"precision": "bf16"}, "ddp", 64) is sharded


def test_a_change_of_layout_keeps_the_link_between_the_gpus_of_its_instance() -> None:
    """By which it is timed, and without which no offer of that instance prices it."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 128})
    question = question_of(request, CATALOG, TODAY)
    for nodes, network in ((1, None), (2, NodeNetwork(80, rdma=False))):
        (layout,) = layouts(4 * nodes, "ddp", nodes)
        assert layout is not None
        joined = on_layout(question, layout.on_network(network, "nvlink-pair-3"), 64)
        changed = on_changed_layout(joined, {"strategy": "fsdp2", "offload": "all"}, "auto", 64)
        assert changed is not None
        assert changed.parallel is not None
        offers = layout_offers(CATALOG.offers("A100-80GB-PCIe"), changed.parallel)
        assert {offer.instance for offer in offers} == {"Standard_NC96ads_A100_v4"}


def test_a_step_of_several_gpus_is_timed_at_the_longest_of_their_batches() -> None:
    """Every other example has 100 tokens: of one batch the mean is 150, of eight almost 200."""
    data = DataLengths(source="made", histogram=((100, 500), (200, 500)))
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 256})
    question = question_of(request, CATALOG, TODAY)
    job = question.workload.model_copy(update={"lengths": data, "pad_to_multiple": 1})
    lengths = [
        timed_length(on_layout(replace(question, workload=job), layout, 64), 1)
        for layout in (None, Parallel(gpus=8, strategy="fsdp2"), Parallel(gpus=8, strategy="tp"))
    ]
    assert lengths == [150, 200, 150]


def test_the_degree_of_tensor_parallelism_divides_the_gpus_of_a_node() -> None:
    """Two groups of four on each of two nodes; no other strategy has one."""
    assert [layout and layout.key for layout in layouts(16, "tp", 2, 4)] == ["16xtp-4degree-2nodes"]
    assert layouts(8, "tp", 1, 8) == layouts(8, "tp", 1)
    for degree in (1, 3, 16):
        with pytest.raises(EstimateError, match=f"--degree {degree}: the 8 GPUs of a node cannot"):
            layouts(8, "tp", 1, degree)
    with pytest.raises(EstimateError, match="--degree 2 is a choice of tp: add --strategy tp"):
        layouts(8, "auto", 1, 2)


def test_nodes_alone_stand_for_instances_with_eight_gpus() -> None:
    """Given numbers are those of all nodes."""
    given = {"model": "llama-tiny", "seq_len": 128, "nodes": 2}
    assert request_of(EstimateRequest, given).counts == (16,)
    assert request_of(EstimateRequest, given | {"gpus": (8,)}).counts == (8,)
    assert not request_of(EstimateRequest, given).chooses_number


def test_a_layout_of_several_nodes_is_estimated_on_each_network_of_the_instances() -> None:
    """Offers of providers that are left out add none; a layout of one node has none."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 128})
    question = question_of(request, CATALOG, TODAY)
    gpus = [CATALOG.gpu("A100-80GB-SXM"), CATALOG.gpu("H100-SXM")]
    (layout,) = layouts(16, "fsdp2", 2)
    placed = placed_layouts(layout, gpus, CATALOG, question.allows)
    assert {one and one.network: [gpu.key for gpu in some] for one, some in placed} == {
        NodeNetwork(25, rdma=False): ["H100-SXM"],
        NodeNetwork(100, rdma=False): ["A100-80GB-SXM"],
        NodeNetwork(350, rdma=False): ["H100-SXM"],
        NodeNetwork(400, rdma=True): ["A100-80GB-SXM"],
        NodeNetwork(800, rdma=False): ["H100-SXM"],
        NodeNetwork(1600, rdma=True): ["A100-80GB-SXM"],
        NodeNetwork(3200, rdma=True): ["H100-SXM"],
        None: ["A100-80GB-SXM", "H100-SXM"],
    }
    only = question.constraints.model_copy(update={"providers": ("aws",)})
    ((one, _),) = placed_layouts(layout, gpus[:1], CATALOG, only.allows)
    assert one is not None
    assert one.network == NodeNetwork(400, rdma=True)
    (beside,) = layouts(8, "fsdp2", 1)
    assert placed_layouts(beside, gpus, CATALOG, only.allows) == [(beside, gpus)]


def test_a_layout_of_one_node_is_estimated_on_each_link_between_its_gpus() -> None:
    """A100 PCIe that Azure joins in pairs are another layout, priced by Azure's offers alone.

    Of two GPUs as of four; a measured layout, whose link nobody states, is priced by all offers.
    """
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 128})
    question = question_of(request, CATALOG, TODAY)
    gpu = CATALOG.gpu("A100-80GB-PCIe")
    offers = CATALOG.offers(gpu.key)
    for count in (2, 4):
        (layout,) = layouts(count, "ddp", 1)
        placed = dict(placed_layouts(layout, [gpu], CATALOG, question.allows))
        assert {one and one.interconnect for one in placed} == {None, "nvlink-pair-3"}
        for one in placed:
            assert one is not None
            instances = {offer.instance for offer in layout_offers(offers, one)}
            joined = "Standard_NC96ads_A100_v4" in instances
            assert joined == (one.interconnect is not None)
            assert (instances == {"Standard_NC96ads_A100_v4"}) == joined
            seconds = collective_seconds(ALL_REDUCE, MOVED, gpu, one)
            own = gpu.model_copy(update={"interconnect": one.interconnect or gpu.interconnect})
            assert seconds == collective_seconds(ALL_REDUCE, MOVED, own, layout)
        every = layout_offers(offers, layout, is_simulated=False)
        assert len(every) == sum(len(layout_offers(offers, one)) for one in placed)
        assert {one and one.on_one_node for one in placed} == {layout}  # of one trace
    assert {one and one.key for one in placed} == {"4xddp", "4xddp-nvlink-pair-3"}
