"""A traced rank takes the memory and moves the bytes of a real one, to the byte."""

import functools
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import cpu, recipe, tiny_cell
from builders.ranks import (
    BATCH,
    LENGTH,
    Answers,
    RankCase,
    collectives,
    compared,
    moved,
    on_layout,
    peak,
    real,
    traceable,
    traced,
)
from fakes.in_process_traces import InProcess
from transformers import AutoModelForCausalLM

from gpu_catalog.catalog import load_catalog
from trials.child_process.child_prober import ChildProber
from trials.models.build import auto_config
from trials.recipes.fields import Method
from trials.recipes.parallel import Parallel
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest, Setup
from trials.records.model import find_model
from trials.records.observation import Measurement, Outcome
from trials.records.timing_rule import TimingRule
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.simulated_prober import SimulatedProber
from trials.simulation.timing_model import EfficiencyConstants
from trials.training.finetune import FineTuning
from trials.training.optimizers import construction

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
FEW_STEPS = TimingRule(warmup_steps=0, warmup_seconds=0.0, max_steps=6)
SHARDED = Parallel(gpus=2, strategy="fsdp2")
RECIPES = {"full": recipe("full", max_grad_norm=1.0), "lora": recipe("lora")}


MOMENT_BYTES = 2 * 4
"""AdamW's moments of an element."""


def cases(ranks: int) -> list[RankCase]:
    """Cells on so many ranks, each with one and two micro-batches.

    Three have no ``hsdp``, which needs an even split, and no ``tp``: they divide no heads.
    """
    layouts = [
        Parallel(gpus=ranks, strategy="fsdp2"),
        Parallel(gpus=ranks, strategy="fsdp2", reshard_after_forward=False),
        Parallel(gpus=ranks, strategy="fsdp2", shards_on_host=True),
        Parallel(gpus=ranks, strategy="ddp"),
        *([Parallel(gpus=ranks, strategy="hsdp", replicas=2)] if ranks == 4 else []),
    ]
    split = [
        *([Parallel(gpus=ranks, strategy="tp")] if ranks != 3 else []),
        *([Parallel(gpus=ranks, strategy="tp", degree=2)] if ranks == 4 else []),
    ]
    pairs = product(layouts + split, RECIPES, (1, 2))
    return [
        (on_layout(tiny_cell("llama-tiny", RECIPES[method], seq_len=LENGTH), layout), micro_batches)
        for layout, method, micro_batches in pairs
    ]


QUICK = {
    ("2xfsdp2", "full"),
    ("2xfsdp2", "lora"),
    ("2xfsdp2-all-offloaded", "lora"),
    ("2xddp", "lora"),
    ("2xtp", "full"),
}
"""Cells that are compared in each run of the tests: two ranks by each strategy but ``hsdp``."""


def quick_cases() -> list[RankCase]:
    """Those of each run of the tests, with two micro-batches."""
    pairs = [(cell, count, cell.parallel) for cell, count in cases(2) if count == 2]
    return [(c, n) for c, n, layout in pairs if layout and (layout.key, c.recipe.method) in QUICK]


SPLIT = [
    (on_layout(tiny_cell("llama-tiny", made, seq_len=LENGTH), Parallel(gpus=2, strategy="tp")), 1)
    for made in RECIPES.values()
]


@pytest.fixture(scope="module")
def with_norms(tmp_path_factory: pytest.TempPathFactory) -> RankCase:
    """A model whose plan has more than two styles: norms of queries and keys, left frozen."""
    config = find_model("llama-tiny").config
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = tmp_path_factory.mktemp("model") / "qwen3.json"
    model.write_text(json.dumps(config | {"model_type": "qwen3"} | sizes), encoding="utf-8")
    cell = tiny_cell(str(model), RECIPES["lora"], seq_len=LENGTH)
    return on_layout(cell, Parallel(gpus=2, strategy="tp")), 1


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> RankCase:
    """Weights that ranks load from a file, and divide."""
    folder = str(tmp_path_factory.mktemp("model"))
    stock = auto_config(find_model("llama-tiny"), None)
    AutoModelForCausalLM.from_config(stock).save_pretrained(folder)
    cell = tiny_cell(folder, RECIPES["lora"], seq_len=LENGTH)
    return on_layout(cell.model_copy(update={"weights": "pretrained"}), SHARDED), 1


@pytest.fixture(scope="module")
def counted(
    with_norms: RankCase, loaded: RankCase, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """What two ranks, started once, count in the cases of every run of the tests."""
    cases = [*quick_cases(), *SPLIT, with_norms, loaded]
    return real(cases, tmp_path_factory.mktemp("ranks"))


def more_bytes(count: int) -> int:
    """A real step holds the tokens of all micro-batches, and the loss of each for its sum."""
    return (count - 1) * (BATCH * LENGTH * 8 + 12)


def uneven_bytes(cell: Cell) -> list[int]:
    """Bytes that each rank takes more than the first, which is traced.

    Where ranks do not divide the rows of a weight, the last has fewer. FSDP pads its shard and its
    gradient to those of the others; the optimizer's state is as small as the shard.
    """
    assert cell.parallel is not None
    less = 0
    if cell.parallel.strategy == "fsdp2":
        for rows, elements in trained_shapes(cell.model_copy(update={"parallel": None})):
            first = -(-rows // cell.ranks)
            last = max(rows - first * (cell.ranks - 1), 0)
            less += (first - last) * elements // rows * MOMENT_BYTES
    return [0] * (cell.ranks - 1) + [-less]


@functools.cache
def trained_shapes(cell: Cell) -> list[tuple[int, int]]:
    """Rows and elements of each trained weight."""
    weights = traceable(cell).model.parameters()
    return [(len(weight), weight.numel()) for weight in weights if weight.requires_grad]


def check_peaks(counted: Answers) -> None:
    """Check that real ranks take the bytes of the traced one, but for uneven shards."""
    expected = [uneven_bytes(cell) for cell, _ in counted]
    apart = compared(counted, more_bytes)
    assert apart == dict(zip(apart, expected, strict=True))


def test_a_traced_rank_is_the_real_one(counted: Answers) -> None:
    """It is so for whole weights and shards, full training and adapters, with accumulation."""
    check_peaks(counted)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_traced_rank_is_the_real_one_in_all_cases(ranks: int, tmp_path: Path) -> None:
    """With and without accumulation, and without resharding.

    Of three ranks it is the first two, and the last takes less.
    """
    check_peaks(real(cases(ranks), tmp_path))


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (Parallel(gpus=2, strategy="fsdp2"), "full"),
        *long_cases(
            (
                (Parallel(gpus=2, strategy="fsdp2", shards_on_host=True), "full"),
                (Parallel(gpus=2, strategy="tp"), "lora"),
                (Parallel(gpus=2, strategy="ddp"), "lora"),
                (Parallel(gpus=2, strategy="tp"), "full"),
            )
        ),
    ],
    ids=lambda value: value.key if isinstance(value, Parallel) else value,
)
def test_a_trial_measures_the_peak_that_is_traced(layout: Parallel, method: Method) -> None:
    """It runs the same step, so that both ranks take the bytes of the trace.

    Before it times steps, it counts the collectives of one. A simulated step has as many, of as
    many bytes, and says for how long they keep a GPU waiting.
    """
    cell = on_layout(tiny_cell("llama-tiny", RECIPES[method], seq_len=LENGTH), layout)
    setup = Setup(cell=cell, model=find_model(cell.model), gpu=cpu(), seed=0, threads=1)
    with ChildProber(setup, build_timeout_seconds=300, probe_timeout_seconds=120) as prober:
        end = prober.probe(ProbeRequest(batch_size=BATCH, timing=FEW_STEPS))
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    assert end.measurement is not None
    peaks = [rank.peak_allocated_bytes for rank in end.measurement.ranks]
    assert peaks == [peak(traced(cell, 1))] * 2
    assert end.measurement.exposed_seconds is None
    simulated = simulated_step(cell)
    assert simulated.step_collectives == end.measurement.step_collectives
    assert simulated.step_collectives == collectives(traced(cell, 1)) != ()
    assert simulated.exposed_seconds is not None
    assert 0 <= simulated.exposed_seconds < simulated.step_seconds[0]


def simulated_step(cell: Cell) -> Measurement:
    """Measurement of a step of these ranks on simulated GPUs."""
    gpu = load_catalog().gpu("A100-80GB-SXM")
    on_gpus = cell.model_copy(update={"gpu": gpu.key, "simulated": True})
    simulated = SimulatedCell(on_gpus, find_model(cell.model), InProcess())
    prober = SimulatedProber(simulated, gpu, EfficiencyConstants())
    end = prober.probe(ProbeRequest(batch_size=BATCH, timing=FEW_STEPS))
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    assert end.measurement is not None
    return end.measurement


def test_a_simulated_step_of_one_gpu_has_no_collectives() -> None:
    """Its record is as it was before there were several."""
    cell = tiny_cell("llama-tiny", RECIPES["lora"], seq_len=LENGTH)
    written = simulated_step(cell).model_dump_json()
    assert "collectives" not in written
    assert "exposed" not in written


def test_collectives_of_many_micro_batches_are_those_of_a_few() -> None:
    """A step that accumulates gradients of seven gathers shards for each; none is counted twice."""
    cell = on_layout(
        tiny_cell("llama-tiny", recipe("lora", effective_batch=7 * 2 * BATCH), seq_len=LENGTH),
        Parallel(gpus=2, strategy="fsdp2"),
    )
    assert simulated_step(cell).step_collectives == collectives(traced(cell, 7), 7)


def test_collectives_have_the_closed_forms_of_zero_3_hsdp_and_ddp() -> None:
    """Shards gather every weight twice, but those of the head once; ddp sums each gradient.

    Copies of shards sum what has been reduced, each rank its shard.
    """
    cell = tiny_cell("llama-tiny", RECIPES["full"], seq_len=LENGTH)
    fsdp2 = traced(on_layout(cell, Parallel(gpus=4, strategy="fsdp2")), 1)
    hsdp = traced(on_layout(cell, Parallel(gpus=8, strategy="hsdp", replicas=2)), 1)
    ddp = traced(on_layout(cell, Parallel(gpus=4, strategy="ddp")), 1)
    config = find_model("llama-tiny").config
    weights = 4 * traced_elements(cell)
    tail = 4 * config["hidden_size"] * (config["vocab_size"] + 1)
    assert moved(fsdp2)["ALL_GATHER"] == 2 * weights - tail
    assert moved(fsdp2)["REDUCE_SCATTER"] == weights
    norm = moved(fsdp2)["ALL_REDUCE"]
    assert moved(hsdp) == moved(fsdp2) | {"ALL_REDUCE": weights // 4 + norm}
    assert moved(ddp) == {"ALL_GATHER": 0, "REDUCE_SCATTER": 0, "ALL_REDUCE": weights}


def test_collectives_have_the_closed_form_of_tensor_parallelism() -> None:
    """Each layer sums two results in the forward pass, and two gradients in the backward pass.

    A rank holds its part of the linear layers of the blocks, and the rest whole.
    """
    cell = tiny_cell("llama-tiny", recipe("full"), seq_len=LENGTH)
    config = find_model("llama-tiny").config
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    outside = 2 * hidden * config["vocab_size"] + hidden * (2 * layers + 1)
    for ranks in (2, 4):
        steps = traced(on_layout(cell, Parallel(gpus=ranks, strategy="tp")), 1)
        summed = 4 * layers * BATCH * LENGTH * hidden * 4
        assert moved(steps) == {"ALL_GATHER": 0, "REDUCE_SCATTER": 0, "ALL_REDUCE": summed}
        weights = 4 * (outside + (traced_elements(cell) - outside) // ranks)
        buffers = int(steps.held.sizes.sum()) - weights
        assert 0 <= buffers < 256


def test_collectives_have_the_closed_form_of_split_adapters() -> None:
    """A layer that is divided sums its result, or the gradient of its input; so does its adapter.

    The adapter's half sums as many elements as its rank. The input of the first layer needs no
    gradient, but its adapters do.
    """
    adapters = recipe("lora")
    cell = tiny_cell("llama-tiny", adapters, seq_len=LENGTH)
    config = find_model("llama-tiny").config
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    assert adapters.lora_rank is not None
    steps = traced(on_layout(cell, Parallel(gpus=2, strategy="tp")), 1)
    by_columns, by_rows = 5, 2  # q, k, v, gate and up; o and down
    whole = layers * (by_columns + by_rows) - 3
    halves = layers * (by_columns + by_rows)
    summed = BATCH * LENGTH * 4 * (hidden * whole + adapters.lora_rank * halves)
    assert moved(steps) == {"ALL_GATHER": 0, "REDUCE_SCATTER": 0, "ALL_REDUCE": summed}


@pytest.mark.parametrize("case", SPLIT, ids=RECIPES)
def test_split_layers_have_the_loss_and_gradients_of_whole_ones(
    case: RankCase, counted: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process with the same weights and tokens has the same clipped gradients."""
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    cell, ranks = case[0].model_copy(update={"parallel": None}), counted[case]
    alone = FineTuning(cell, find_model(cell.model), device=torch.device("cpu"), seed=0)
    # In the first step, half of each adapter is zero, and so is a gradient.
    for _ in range(ranks[0]["steps"]):
        loss = alone.step(alone.tokens(BATCH))
    norms = [float(p.grad.norm()) for p in alone.trainable if p.grad is not None]
    assert all(norms)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss, rel=1e-5)
        assert rank["norms"] == pytest.approx(norms, rel=1e-3)


def test_ranks_that_build_in_slices_have_the_loss_of_one_process(
    counted: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank and one process have the same tokens: so they have the same weights.

    Weights are drawn, of a full training and below adapters, and loaded from a file.
    """
    monkeypatch.setattr(construction, "LEARNING_RATE", 1e-12)
    cases = [case for case in counted if case[0].parallel == SHARDED]
    assert sorted((c.weights, c.recipe.method) for c, _ in cases) == [
        ("pretrained", "lora"),
        ("random", "full"),
        ("random", "lora"),
    ]
    for case in cases:
        cell = case[0].model_copy(update={"parallel": None})
        alone = FineTuning(cell, find_model(cell.model), device=torch.device("cpu"), seed=0)
        assert counted[case][0]["loss"] == pytest.approx(alone.step(alone.tokens(BATCH)), rel=1e-6)


def test_the_last_of_three_ranks_takes_less_than_the_traced_one() -> None:
    """It lacks moments of AdamW: of 128 rows it has 42, and of an adapter's four rows none."""
    three = Parallel(gpus=3, strategy="fsdp2")
    cells = (tiny_cell("llama-tiny", made, seq_len=LENGTH) for made in RECIPES.values())
    apart = [uneven_bytes(on_layout(cell, three)) for cell in cells]
    assert apart == [[0, 0, -21_928], [0, 0, -36_032]]


def test_the_ranks_of_a_group_train_on_one_batch() -> None:
    """Groups have batches of their own: two of two ranks have two."""
    cell = tiny_cell("llama-tiny", recipe("full", effective_batch=8), seq_len=LENGTH)
    layout = Parallel(gpus=4, strategy="tp", degree=2)
    assert on_layout(cell, layout).rank_recipe.effective_batch == 4
    numbers = [layout.data_rank(number) for number in range(4)]
    assert numbers == [0, 0, 1, 1]


def traced_elements(cell: Cell) -> int:
    """Elements of a model's weights."""
    return sum(parameter.numel() for parameter in traceable(cell).model.parameters())
