"""Estimates of several nodes: their strategies, networks and instances."""

import datetime as dt
from functools import cache

import pytest

from gpu_catalog.catalog import load_catalog
from gpu_catalog.errors import UserError
from orchestrator.estimating.estimate_job import estimate_job
from orchestrator.estimating.estimate_records import Estimates
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.exporting.chosen_offers import estimated_training
from orchestrator.exporting.training import ExportError
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.request import request_of

OFFERS = load_catalog().offers("H100-SXM")
TODAY = dt.date(2026, 11, 26)
TINY = {
    "model": "llama-tiny",
    "method": "full",
    "gradient_checkpointing": "off",
    "seq_len": 128,
    "gpu": "H100-SXM",
    "gpus": 4,
    "nodes": 2,
    "batch_size": 1,
}


@cache
def estimated(**options: object) -> Estimates:
    """Estimate of a tiny model on two nodes of two GPUs."""
    return estimate_job(request_of(EstimateRequest, TINY | options), TODAY)


def test_nodes_are_rented_whole_and_their_gpus_share_the_batch() -> None:
    """Two instances with eight GPUs have six idle ones each."""
    result = estimated(strategy="hsdp", providers="aws")
    (row,) = result
    estimate, price = row.estimate, row.estimate.price
    assert (estimate.gpu, estimate.gpus, estimate.nodes) == ("4xH100-SXM", 4, 2)
    assert (estimate.replicas, estimate.node_network_gbps, estimate.rdma) == (2, 3200, True)
    assert price is not None
    assert (price.instance, price.instances) == ("p5.48xlarge", 2)
    prices = [o.usd_per_hour for o in OFFERS if (o.instance, o.market) == ("p5.48xlarge", "spot")]
    assert price.usd_per_hour == pytest.approx(2 * min(prices))
    assert estimate.batch_size * estimate.micro_batches * 4 == 16
    text = as_table([row], row.question)
    assert "2 x aws p5.48xlarge (8 GPUs, 6 idle)" in text
    assert "(2 x p5.48xlarge, 8 GPUs, " in text
    training = estimated_training(result, request_of(EstimateRequest, TINY))
    assert (training.gpus, training.nodes, training.replicas) == (4, 2, 2)
    place = training.placements[0]
    assert (place.instances, place.rdma, place.usd_per_hour) == (2, True, price.usd_per_hour)
    assert training.effective_batch == 16


@pytest.mark.long
def test_an_unknown_network_is_timed_as_the_slowest() -> None:
    """So the job takes longer on a provider whose network the catalog does not have."""
    (known,), (unknown,) = (estimated(strategy="ddp", providers=name) for name in ("aws", "lambda"))
    assert known.estimate.step_seconds is not None
    assert unknown.estimate.step_seconds is not None
    assert unknown.estimate.node_network_gbps is None
    assert unknown.estimate.step_seconds > known.estimate.step_seconds
    assert unknown.estimate.peak_gib == known.estimate.peak_gib
    (note,) = (line for line in unknown.estimate.approximations if "nodes" in line)
    assert note.startswith("all-reduce on 4 GPUs of 2 nodes by an unknown network is timed as")


def test_further_micro_batches_do_not_hide_the_last_ones_reduction() -> None:
    """They come before it, so that the wait for the network stays."""
    waits = []
    two = estimated(strategy="ddp", providers="lambda", effective_batch=8)
    four = estimated(strategy="ddp", providers="lambda")
    for (row,), count in ((two, 2), (four, 4)):
        assert row.estimate.micro_batches == count
        waits.append(row.estimate.exposed_seconds)
    assert waits[0] > 1e-4
    assert waits[1] == pytest.approx(waits[0])


@pytest.mark.long
def test_tensor_parallelism_on_several_nodes_is_not_exported() -> None:
    """The line names the layout, and what to choose."""
    divided = estimated(strategy="tp", providers="aws")
    with pytest.raises(ExportError, match="no task file starts tensor parallelism: choose fsdp2"):
        estimated_training(divided, request_of(EstimateRequest, TINY))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"gpus": 5}, "--nodes 2: 5 GPUs cannot be divided among them: give a multiple"),
        ({"gpus": 2, "strategy": "hsdp"}, "--strategy hsdp: 2 GPUs on 2 nodes: it copies"),
    ],
)
def test_nodes_that_cannot_be_are_one_line(options: dict[str, object], line: str) -> None:
    """It names the numbers, and what to give."""
    with pytest.raises(UserError, match=line):
        estimated(**options)
