"""A rank's step from a few traced layers takes the memory and collectives of a trace of all."""

from typing import Any

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import recipe
from builders.whole_steps import deep, simulated_cell
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from trials.ranks.sharding import unseen_propagation
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.model import Model, find_model
from trials.simulation.clock.operators import Operators
from trials.simulation.recording import Column, Kind, OperatorClass
from trials.simulation.trace_cache import StepTrace
from trials.simulation.trace_request import Routing, TraceRequest
from trials.simulation.tracing.ranks.fake_rank import fake_mesh
from trials.simulation.tracing.tracing_worker import Tracing
from trials.simulation.whole_step import Steps

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
BATCH = 2
FULL = recipe("full", precision="bf16-mixed", gradient_checkpointing=True, max_grad_norm=1.0)
LORA = recipe("lora", precision="bf16", gradient_checkpointing=True)
SHARDED = Parallel(gpus=8, strategy="fsdp2")
ON_HOST = Parallel(gpus=8, strategy="fsdp2", shards_on_host=True)
COPIED_ON_HOST = Parallel(gpus=8, strategy="hsdp", replicas=2, shards_on_host=True)
COPIED = Parallel(gpus=8, strategy="hsdp", replicas=2)
SPLIT = Parallel(gpus=2, strategy="tp")
SPLIT_AND_SHARDED = Parallel(gpus=4, strategy="tp", degree=2)
UNRESHARDED = Parallel(gpus=2, strategy="fsdp2", reshard_after_forward=False)


def traced(
    model: Model, settings: Recipe, layout: Parallel, seq_len: int, *, whole: bool
) -> StepTrace:
    """Trace of a step of the first rank."""
    cell = simulated_cell(model, settings, seq_len, layout)
    request = TraceRequest(cell=cell, model=model, routing=Routing(), batch_size=BATCH, whole=whole)
    return Tracing().trace(request)


def collectives(operators: Operators) -> np.ndarray:
    """Kind and bytes of each collective, (collectives, 2), in their order."""
    runs = operators.kinds == Kind.RUN
    chosen = runs & (operators.names // 4 == OperatorClass.COLLECTIVE)
    return np.c_[operators.names[chosen], operators.numbers[chosen, Column.BYTES]]


def check(model: Model, settings: Recipe, layout: Parallel, seq_len: int = 24) -> None:
    """Compare both traces, with one and two micro-batches."""
    cut, whole = (
        traced(model, settings, layout, seq_len, whole=all_layers) for all_layers in (False, True)
    )
    assert cut.copies > 0 == whole.copies
    for micro_batches in (1, 2):
        few, every = (Steps(trace, micro_batches, layout) for trace in (cut, whole))
        assert few.peak_bytes(BATCH) == every.peak_bytes(BATCH)
        made = collectives(few.operators(BATCH).in_full)
        assert len(made) > 0
        assert np.array_equal(made, collectives(every.operators(BATCH).in_full))


@pytest.mark.parametrize(
    ("name", "settings", "layout"),
    [
        ("llama-tiny", FULL, SHARDED),
        ("llama-tiny", LORA, SPLIT),
        *long_cases(
            (
                ("llama-tiny", FULL, COPIED),
                ("llama-tiny", FULL, ON_HOST),
                ("llama-tiny", LORA, ON_HOST),
                ("llama-tiny", FULL, COPIED_ON_HOST),
                ("llama-tiny", FULL, SPLIT),
                ("llama-tiny", FULL, SPLIT_AND_SHARDED),
                ("llama-tiny", LORA, SPLIT_AND_SHARDED),
                ("llama-tiny", LORA, COPIED),
                ("llama-tiny", LORA, UNRESHARDED),
                ("mixtral-tiny", LORA, UNRESHARDED),
            )
        ),
    ],
    ids=[
        "llama",
        "llama split, lora",
        "llama copies",
        "llama on the host",
        "llama on the host, lora",
        "llama copies on the host",
        "llama split",
        "llama split and sharded",
        "llama split and sharded, lora",
        "llama copies, lora",
        "llama unresharded",
        "mixtral unresharded",
    ],
)
def test_few_layers_stand_for_all_on_each_rank(
    name: str, settings: Recipe, layout: Parallel
) -> None:
    """Six layers expanded from a few have the peak and collectives of six traced ones."""
    check(deep(name, 6), settings, layout)


@pytest.mark.long
@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b"])
def test_few_layers_stand_for_all_of_a_real_model(name: str, settings: Recipe) -> None:
    """So they do for 32 layers of Llama and Mixtral, and for 80."""
    check(find_model(name), settings, SHARDED, seq_len=2048)


def test_shardings_of_a_list_are_those_of_its_distinct_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DTensor works them out for two shapes, and all nine results have shapes and parts as ever."""
    worked_out: list[int] = []
    own = ShardingPropagator.propagate_op_sharding_non_cached

    def counted(propagator: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        tensors: Any = schema.args_schema[0]
        worked_out.append(len(tensors))
        return own(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", counted)
    mesh = fake_mesh(4, None)
    with FakeTensorMode(), unseen_propagation():
        rows = [16, 8, 16, 16, 8, 16, 16, 8, 16]
        tensors: list[Any] = [
            DTensor.from_local(torch.empty(n // 4, 3), mesh, [Shard(0)]) for n in rows
        ]
        roots: Any = torch._foreach_sqrt(tensors)
    assert worked_out == [2]
    assert [root.shape for root in roots] == [(n, 3) for n in rows]
    assert {root.placements for root in roots} == {(Shard(0),)}
