"""Traces between traced lengths or numbers of ranks equal traces at theirs."""

import numpy as np
import pytest
from builders.long_cases import long_cases
from builders.observations import recipe, tiny_cell
from fakes.in_process_traces import InProcess

from gpu_catalog.catalog import load_catalog
from trials.recipes.fields import Quantisation
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.simulation.length_traces import LengthTraces, RankTraces
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_request import TraceRequest

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
GPU = load_catalog().gpu("A40")
LENGTHS = (1024, 512, 256)


LLAMA = ("llama-tiny", recipe("lora", precision="bf16", gradient_checkpointing=True), 1)
FP32 = ("llama-tiny", recipe("full", precision="fp32", attention="eager"), 3)
MIXTRAL = ("mixtral-tiny", recipe("qlora", precision="bf16-mixed", loss="chunked"), 3)


@pytest.mark.parametrize(
    ("model", "settings", "batch_size"),
    [
        LLAMA,
        *long_cases((FP32, MIXTRAL)),
    ],
    ids=["llama", "fp32", "mixtral"],
)
def test_memory_and_time_between_traced_lengths_are_those_of_a_trace(
    model: str, settings: Recipe, batch_size: int
) -> None:
    """Three lengths are traced. Numbers are equal at multiples of 128, times at any length."""
    traced, apart = InProcess(), InProcess()
    between = LengthTraces(traced, LENGTHS)
    for tokens in (2048, 333):
        cell = tiny_cell(model, settings, seq_len=tokens)
        one, other = (SimulatedCell(cell, find_model(model), source) for source in (between, apart))
        if tokens % 128 == 0:
            made = (source.get(one.request_of(batch_size)) for source in (between, apart))
            numbers = [[r.numbers for r in trace.recordings] for trace in made]
            np.testing.assert_allclose(*numbers, rtol=1e-12, atol=1e-6)
            assert one.without_limit(batch_size, GPU) == other.without_limit(batch_size, GPU)
        seconds = [
            c.step_time(batch_size, GPU, EfficiencyConstants()).seconds for c in (one, other)
        ]
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
    assert traced.lengths == set(LENGTHS)


def test_without_three_lengths_each_length_is_traced() -> None:
    """Operations grow with the square of the length."""
    traced = InProcess()
    cell = SimulatedCell(tiny_cell(seq_len=320), find_model("llama-tiny"), traced)
    LengthTraces(traced, LENGTHS[:2]).get(cell.request_of(1))
    assert traced.lengths == {320}


def on_ranks(settings: Recipe, *counts: int) -> list[TraceRequest]:
    """Requests for a model in shards of FSDP2 on each number of GPUs."""
    model, cell = find_model("llama-tiny"), tiny_cell("llama-tiny", settings, seq_len=64)
    layouts = [Parallel(gpus=count, strategy="fsdp2") for count in counts]
    return [
        TraceRequest(cell=cell.model_copy(update={"parallel": layout}), model=model)
        for layout in layouts
    ]


@pytest.mark.parametrize(
    "settings",
    [
        recipe("qlora", lora_rank=8, precision="bf16-mixed", loss="chunked"),
        *long_cases(
            (
                recipe("lora", lora_rank=8, precision="bf16"),
                recipe("full", precision="bf16-mixed"),
            )
        ),
    ],
    ids=["qlora", "lora", "full"],
)
def test_a_trace_of_four_ranks_follows_from_those_of_two_and_eight(settings: Recipe) -> None:
    """An estimate of several numbers of GPUs traces the least and the greatest of them."""
    requests, traced = on_ranks(settings, 2, 4, 8), InProcess()
    between = RankTraces(traced)
    between.prepare(requests)
    made = between.get(requests[1])
    assert traced.ranks == {2, 8}
    assert made.digest == traced.get(requests[1]).digest


def test_ranks_with_uneven_shards_are_traced() -> None:
    """Four rows of an adapter on eight ranks: the first has one, as of four ranks."""
    requests, traced = on_ranks(recipe("lora", precision="bf16"), 2, 4, 8), InProcess()
    between = RankTraces(traced)
    between.prepare(requests)
    assert between.get(requests[1]) is traced.get(requests[1])


@pytest.mark.parametrize("quantisation", ["nf4", "int8"])
def test_biases_of_quantised_layers_are_cast_before_the_traced_step(
    quantisation: Quantisation,
) -> None:
    """The library casts them once: steps of all batch sizes have one structure."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    shape = sizes | {"num_attention_heads": 2, "num_hidden_layers": 3}
    model = find_model("qwen2.5-0.5b")
    small = model.model_copy(update={"config": model.config | shape})
    settings = recipe(
        "qlora", precision="fp32-mixed-load", quantisation=quantisation, adapter_dtype="bf16"
    )
    cell = tiny_cell(model.name, settings, seq_len=256)
    trace = InProcess().get(TraceRequest(cell=cell, model=small))
    assert trace.batch_sizes == (2, 4)
