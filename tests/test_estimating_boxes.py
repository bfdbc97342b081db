"""Number of GPUs of each kind, where an estimate is asked for neither GPU nor number."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from gpu_catalog.catalog import load_catalog
from gpu_catalog.errors import UserError
from orchestrator.estimating.choosing.boxes import numbers_tried
from orchestrator.estimating.choosing.layouts import layouts, on_layout
from orchestrator.estimating.choosing.recipe_choice import fits
from orchestrator.estimating.estimate_job import Simulation, best_boxes, best_on
from orchestrator.estimating.estimate_request import EstimateRequest, question_of
from orchestrator.estimating.question import Question
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.request import request_of
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import TraceError, Traces
from trials.simulation.trace_request import TraceRequest

CATALOG = load_catalog()
TODAY = dt.date(2026, 11, 25)
AWS_ALONE: dict[str, Any] = {"providers": ["aws"]}  # its instances have one GPU or eight
# Its three layers make a trace of DeepSpeed, which has every layer, as short as others.
HALF_A_BILLION = str(Path(__file__).parent / "data" / "half-a-billion.json")


def asked(**options: object) -> tuple[EstimateRequest, Question, Simulation]:
    """A job of half a billion weights, all of them trained, and what it is estimated with."""
    given = {"model": HALF_A_BILLION, "method": "full", "seq_len": 1024, **options}
    request = request_of(EstimateRequest, given)
    assert request.chooses_number
    question = question_of(request, CATALOG, TODAY)
    return request, question, Simulation(CATALOG, EfficiencyConstants(), Traces())


def test_weights_are_divided_among_as_many_as_an_instance_has_where_one_gpu_is_too_small() -> None:
    """Full training of half a billion weights takes 8 GB: a GPU of 6 GiB is too small."""
    small = CATALOG.gpu("H100-SXM").model_copy(update={"usable_memory_bytes": 6 * 2**30})
    (row,), _ = best_boxes([small], *asked(gradient_checkpointing="on", **AWS_ALONE))
    assert fits(row)
    assert row.estimate.gpus > 1
    assert row.estimate.strategy == "fsdp2"
    assert row.estimate.price is not None
    assert row.estimate.price.gpus_per_instance == row.estimate.gpus
    assert row.estimate.batch_size * row.estimate.micro_batches * row.estimate.gpus == 16


@pytest.mark.long
def test_an_open_number_of_gpus_leaves_to_the_host_what_is_asked() -> None:
    """A GPU of 3 GiB is too small for it all; several leave it to the host."""
    small = CATALOG.gpu("H100-SXM").model_copy(update={"usable_memory_bytes": 3 * 2**30})
    asks = asked(strategy="fsdp2", offload="all", seq_len=128, **AWS_ALONE)
    (row,), _ = best_boxes([small], *asks)
    assert fits(row)
    assert row.question.parallel is not None
    assert row.question.parallel.shards_on_host


@pytest.mark.long
def test_one_gpu_of_an_open_number_offloads_as_is_asked() -> None:
    """By DeepSpeed, beside several that do."""
    fields: dict[str, Any] = {"strategy": "deepspeed-zero2", "offload": "optimizer", "seq_len": 128}
    fields |= {"model": "llama-tiny", "gradient_checkpointing": "off"}
    tiny = asked(**fields, **AWS_ALONE)
    (row,), _ = best_boxes([CATALOG.gpu("H100-SXM")], *tiny)
    assert row.question.parallel is not None
    assert row.question.parallel.offload == "optimizer"
    assert row.estimate.gpus == 1
    assert row.estimate.host_gib is not None


def test_copies_on_all_gpus_of_an_instance_cost_less_than_one_that_works_alone() -> None:
    """One GPU of an instance with eight pays for all, and the table says that the others idle."""
    gpus = [CATALOG.gpu("A100-80GB-SXM")]
    job = asked(**AWS_ALONE)
    (row,), _ = best_boxes(gpus, *job)
    assert (row.estimate.gpus, row.estimate.strategy) == (8, "ddp")
    (box,) = row.estimate.boxes
    assert (box.gpus, box.strategy) == (1, None)
    assert row.estimate.price is not None
    assert box.usd is not None
    assert row.estimate.price.usd < box.usd
    text = as_table([row], row.question)
    assert "(8 GPUs)" in text
    assert "Other numbers of A100-80GB-SXM: 1 in" in text
    request, question, simulation = job
    (alone,), _ = best_on([(question, gpus)], request, simulation)
    assert "(8 GPUs, 7 idle)" in as_table([alone], alone.question)


def test_numbers_that_cannot_share_the_effective_batch_are_left_out_by_name() -> None:
    """Eight GPUs cannot share 12 examples; the numbers that are named can be asked for."""
    job = asked(model="llama-tiny", effective_batch=12)
    rows, _ = best_boxes([CATALOG.gpu("H100-SXM")], *job)
    tried = numbers_tried(rows, rows[0].question)
    assert tried == [1, 2, 4]
    assert "1,2,4 is shown" in as_table(rows, rows[0].question)
    tiny = {"model": "llama-tiny", "method": "full", "seq_len": 128, "effective_batch": 12}
    options: dict[str, Any] = tiny | {"gpu": "H100-SXM", "strategy": "ddp"}
    found = orchestrator.estimate(**options, gpus=(*tried, 8))
    assert sorted(row.estimate.gpus for row in found) == tried
    (reason,) = found.skipped
    assert "give a multiple of 8, or --strategy tp" in reason
    with pytest.raises(UserError, match="give a multiple of 8, or --strategy tp"):
        orchestrator.estimate(**options, gpus=8)


class Unsharded(Traces):
    """Traces of one GPU alone."""

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Refuse those of several."""
        for request in requests:
            if request.cell.parallel is not None:
                raise TraceError(f"{request.model.name} cannot be traced: it is made so")
        super().prepare(requests)


@pytest.mark.long
def test_an_estimate_of_one_gpu_stays_where_shards_cannot_be_traced() -> None:
    """The reason against several is kept beside it."""
    small = CATALOG.gpu("H100-SXM").model_copy(update={"usable_memory_bytes": 6 * 2**30})
    request, question, simulation = asked()
    (row,), reasons = best_boxes(
        [small], request, question, replace(simulation, traces=Unsharded())
    )
    assert row.estimate.gpus == 1
    assert reasons == [f"several GPUs: {HALF_A_BILLION} cannot be traced: it is made so"]


@pytest.mark.parametrize(
    "given", [{"gpu": "H100-SXM"}, {"gpus": 1}, {"seq_len": "max"}, {"gpu": "8xH100-SXM"}]
)
def test_what_is_given_is_not_chosen(given: dict[str, object]) -> None:
    """A named GPU is one GPU; the longest sequence is that of one."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 128, **given})
    assert not request.chooses_number
    assert request.counts == (1,)


@pytest.mark.long
def test_an_assumed_batch_that_three_gpus_cannot_share_is_rounded_up_and_says_so() -> None:
    """16 examples become 18 of three GPUs; two share the 16 themselves, or train on one batch."""
    request, question, simulation = asked()
    assert question.assumes_batch
    rounded = ": 16, rounded up for the GPUs to share"
    for gpus, strategy, size, why in (
        (3, "ddp", 18, rounded),
        (2, "ddp", 16, ""),
        (2, "tp", 16, ""),
    ):
        (layout,) = layouts(gpus, strategy, 1)
        shared = on_layout(question, layout, question.batch_limit)
        (row,), _ = best_on([(shared, [CATALOG.gpu("H100-SXM")])], request, simulation)
        sentence = f"optimizer steps of {size} examples, which is assumed{why} (--effective-batch)."
        assert sentence in as_table([row], row.question)


@pytest.mark.long
def test_where_no_number_fits_the_largest_is_shown_with_what_helps() -> None:
    """Eight GPUs are too small for a shard each, and leave theirs to the host."""
    small = CATALOG.gpu("H100-SXM").model_copy(update={"usable_memory_bytes": 3 * 2**30})
    (row,), _ = best_boxes([small], *asked(gradient_checkpointing="on", **AWS_ALONE))
    assert not fits(row)
    assert row.estimate.gpus == 8
    (change,) = row.estimate.alternatives
    assert change.options == "--strategy fsdp2 --offload all"
