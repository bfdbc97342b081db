"""DeepSpeed's ZeRO on real ranks, and the same engine traced: equal memory and collectives."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import cpu, recipe, tiny_cell
from builders.ranks import (
    BATCH,
    LENGTH,
    Answers,
    RankCase,
    compared,
    host_bytes,
    moved,
    on_gpu,
    on_layout,
    peak,
    real,
    traceable,
    traced,
    traced_on_gpu,
)
from torch.nn import functional

from trials.child_process.child_prober import ChildProber
from trials.recipes.host_bytes import least_host_bytes
from trials.recipes.parallel import ZERO_STRATEGIES, Parallel, ZeroStrategy, default_zero
from trials.recipes.zero_settings import Offload, ZeroSettings
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest, Setup
from trials.records.model import find_model
from trials.records.observation import Measurement, Outcome
from trials.simulation.recording import OperatorClass
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.ranks.zero_rank import _InOrder
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps
from trials.training.finetune import FineTuning

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed's own
]
RECIPES = {
    "full": recipe("full", precision="bf16", max_grad_norm=1.0),
    "lora": recipe("lora", precision="bf16", max_grad_norm=1.0, gradient_checkpointing=True),
}
FREQUENCIES = 64
"""Bytes of the fp32 frequencies that transformers keeps beside those that DeepSpeed casts. A GPU's
are on the host."""


LINEAR = functional.linear
LARGEST_WEIGHT = 88_064
"""Bytes of a layer's largest weight in bf16."""
NORM_BYTES = 9
"""Bytes of the norm of the gradients and of a flag of overflows, which the ranks compare."""


RELEASING = ZeroSettings(
    reduce_bucket_size=10_000,
    stage3_prefetch_bucket_size=20_000,
    stage3_param_persistence_threshold=0,
    stage3_max_live_parameters=0,
    stage3_max_reuse_distance=0,
)
"""Settings under which stage 3 frees weights after each use, as a large model's."""


def by_zero(
    strategy: ZeroStrategy,
    method: str = "full",
    ranks: int = 2,
    zero: ZeroSettings | None = None,
    *,
    model: str = "llama-tiny",
    offload: Offload | None = None,
) -> Cell:
    """A tiny model on ranks by a stage of ZeRO."""
    experts = {"experts": "grouped" if model == "mixtral-tiny" else None}
    cell = tiny_cell(model, RECIPES[method].model_copy(update=experts), seq_len=LENGTH)
    if offload is not None:
        zero = (zero or default_zero(strategy)).model_copy(update={"offload": offload})
    return on_layout(cell, Parallel(gpus=ranks, strategy=strategy, zero=zero))


def all_cases(ranks: int, counts: tuple[int, ...]) -> list[RankCase]:
    """Each stage with each recipe and number of micro-batches."""
    return [
        (by_zero(strategy, method, ranks), count)
        for strategy, method, count in product(ZERO_STRATEGIES, RECIPES, counts)
    ]


OFFLOADED = [
    (by_zero(strategy, method, offload=offload), 2)
    for strategy, method, offload in (
        ("deepspeed-zero3", "lora", "all"),
        ("deepspeed-zero2", "lora", "optimizer"),
        ("deepspeed-zero1", "full", "optimizer"),
        ("deepspeed-zero3", "full", "optimizer"),
        ("deepspeed-zero3", "full", "parameters"),
    )
]
RELEASED = [(by_zero("deepspeed-zero3", method, zero=RELEASING), 2) for method in RECIPES]
EXPERTS = [
    (by_zero("deepspeed-zero3", method, zero=RELEASING, model="mixtral-tiny"), 2)
    for method in RECIPES
]
ALONE = [(by_zero("deepspeed-zero1"), 2), (by_zero("deepspeed-zero3"), 2)]
QUICK = [
    *ALONE,
    (by_zero("deepspeed-zero2", "lora"), 1),
]
"""Cases of every run of the tests."""
ON_ONE_GPU = [
    (by_zero(strategy, method, 1, offload=offload), count)
    for strategy, method, offload, count in (
        ("deepspeed-zero2", "lora", "optimizer", 2),
        ("deepspeed-zero3", "full", "all", 2),
    )
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What ranks, started once, count in the cases of every run of the tests."""
    return real(QUICK, tmp_path_factory.mktemp("ranks"))


def more_bytes(count: int) -> int:
    """A real step holds the tokens of all micro-batches; with several, losses and their sum."""
    return (count - 1) * BATCH * LENGTH * 8 + FREQUENCIES + (4 * count if count > 1 else 0)


def among(cases: list[RankCase], all_counted: Answers) -> dict[str, list[int]]:
    """Differences of some cases of those that were counted."""
    return compared({case: all_counted[case] for case in cases}, more_bytes)


def test_a_traced_rank_is_the_real_one(counted: Answers) -> None:
    """DeepSpeed itself runs on both; frequencies and losses aside, to the byte."""
    apart = among(QUICK, counted)
    assert apart == {key: [0] * 2 for key in apart}


@pytest.mark.long
def test_the_host_holds_the_optimizer_in_place_of_the_gpu() -> None:
    """Of stage 3: state and fp32 weights leave the GPU, gradients follow in fp32, weights return.

    AdamW reads weight, gradient and both moments, and writes all but the gradient: 28 bytes.
    """
    strategy, shard = "deepspeed-zero3", weight_bytes() / 2 / 2  # elements of a rank
    plain, offloaded = (
        on_gpu(by_zero(strategy, offload=offload)) for offload in (None, "optimizer")
    )
    freed = peak(plain) - peak(offloaded)
    assert 12 * shard < freed < 16 * shard
    copied = host_bytes(offloaded, OperatorClass.HOST_COPY)
    assert copied == pytest.approx((4 + 2) * shard, rel=0.7)
    assert host_bytes(plain, OperatorClass.HOST_COPY) == 0
    assert host_bytes(offloaded, OperatorClass.HOST_MEMORY) >= 28 * shard


def test_the_host_holds_the_weights_until_they_are_gathered() -> None:
    """The GPU keeps the frequencies alone between two steps, and gathers what it takes up."""
    offloaded = on_gpu(by_zero("deepspeed-zero3", offload="parameters"))
    assert offloaded.held.sizes.sum() == FREQUENCIES
    shard = weight_bytes() / 2
    assert host_bytes(offloaded, OperatorClass.HOST_COPY) >= shard


@pytest.mark.parametrize(
    ("strategy", "offload", "pinned"),
    [
        ("deepspeed-zero3", "all", 10),
        *long_cases(
            (
                ("deepspeed-zero2", "optimizer", 10),
                ("deepspeed-zero3", "optimizer", 6),
                ("deepspeed-zero3", "parameters", 6),
            )
        ),
    ],
)
def test_the_host_holds_state_master_weights_and_gradients(
    strategy: ZeroStrategy, offload: Offload, pinned: int
) -> None:
    """Of each weight 4 bytes in fp32, 8 of moments, 4 and 2 of gradients or of its 16-bit copies.

    Pinned ones take up to twice as much, and copies of the largest weights come beside them.
    """
    weights = weight_bytes() // 2
    cell = by_zero(strategy, offload=offload)
    assert cell.parallel is not None
    least = least_host_bytes(cell.parallel, weights, weights) / 2
    alone, several = traced_on_gpu(cell).host_bytes
    assert least <= alone <= several <= least + pinned * weights / 2 + 2 * LARGEST_WEIGHT


def test_a_rank_that_offloads_nothing_keeps_nothing_on_the_host() -> None:
    """Its tensors are all on the GPU."""
    assert traced_on_gpu(by_zero("deepspeed-zero2")).host_bytes == ()


@pytest.mark.long
def test_a_traced_rank_is_the_real_one_in_all_cases(tmp_path: Path) -> None:
    """One, two and three micro-batches have passes of their own.

    Ranks on a CPU that offload have what a GPU's have on the GPU and on the host. The only rank of
    one GPU runs the same engine, and nothing waits for a link. Stage 3 gathers all experts of a
    layer at once, of which traced ranks take 16 bytes more.
    """
    cases = [*all_cases(2, (1, 2, 3)), *RELEASED, *OFFLOADED]
    all_counted = real([*cases, *EXPERTS, *ON_ONE_GPU], tmp_path)
    assert_loss_of_one_process((by_zero("deepspeed-zero2"), 1), all_counted)
    apart = among(EXPERTS, all_counted)
    assert apart == {key: [-16] * 2 for key in apart}
    rest = among(cases, all_counted)
    assert rest == {key: [0] * 2 for key in rest}
    alone = among(ON_ONE_GPU, all_counted)
    assert alone == {key: [0] for key in alone}
    cell, count = ON_ONE_GPU[0]
    assert not any(moved(traced(cell, count)).values())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_of_more_ranks_each_is_like_the_traced_one(ranks: int, tmp_path: Path) -> None:
    """Parts end inside of weights there: ranks differ by less than the largest one of a layer."""
    of_more = real(all_cases(ranks, (1, 2, 3)), tmp_path)
    for of_ranks in compared(of_more, more_bytes).values():
        assert max(map(abs, of_ranks)) < LARGEST_WEIGHT


def test_collectives_have_the_closed_forms_of_zero() -> None:
    """All stages gather each weight once. Stage 1 sums gradients once a step, the others always.

    Stage 3 gathers before every forward pass, and keeps so small a model until the update.
    """
    weights = weight_bytes()
    for strategy, count in product(ZERO_STRATEGIES, (1, 2)):
        bytes_moved = moved(traced(by_zero(strategy), count))
        if strategy == "deepspeed-zero3":
            assert bytes_moved["REDUCE_SCATTER"] == count * weights
            assert bytes_moved["ALL_GATHER"] == pytest.approx(count * weights, rel=2e-3)
        else:
            reduced = weights * (1 if strategy == "deepspeed-zero1" else count)
            assert bytes_moved["ALL_REDUCE"] == reduced + NORM_BYTES
            assert bytes_moved["ALL_GATHER"] == weights


@pytest.mark.parametrize("case", ALONE, ids=["deepspeed-zero1", "deepspeed-zero3"])
def test_ranks_have_the_loss_of_one_process(case: RankCase, counted: Answers) -> None:
    """Their updates are too small to change it."""
    assert_loss_of_one_process(case, counted)


def assert_loss_of_one_process(case: RankCase, all_counted: Answers) -> None:
    """Compare the loss of ranks with that of a process alone."""
    one = case[0].model_copy(update={"parallel": None})
    alone = FineTuning(one, find_model(one.model), device=torch.device("cpu"), seed=0)
    loss = alone.step(alone.tokens(BATCH))
    assert all_counted[case][0]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_trace_gathers_weights_in_the_order_of_their_module() -> None:
    """A set's own order is that of addresses, and two traces would differ."""
    weights = _InOrder([3, 1, 2])
    weights.add(0)
    weights.discard(1)
    weights.discard(7)
    weights.update([2, 5])
    assert list(weights) == [3, 2, 0, 5]
    assert weights == _InOrder([0, 2, 3, 5])


def probed(cell: Cell, *sizes: int) -> Measurement:
    """The last measurement of a trial whose probes all fit."""
    budget = cpu(4 * 2**30)  # of which a bucket takes one
    setup = Setup(cell=cell, model=find_model(cell.model), gpu=budget, seed=0, threads=1)
    with ChildProber(setup, build_timeout_seconds=300, probe_timeout_seconds=120) as prober:
        ends = [prober.probe(ProbeRequest(batch_size=size, timing=None)) for size in sizes]
    assert [(end.outcome, end.detail) for end in ends] == [(Outcome.FITS, None)] * len(sizes)
    assert ends[-1].measurement is not None
    return ends[-1].measurement


@pytest.mark.long
def test_a_trial_of_divided_experts_runs_them_as_the_recipe_says() -> None:
    """Weights that are elsewhere have their shape still. Gloo's copies are in its peak."""
    built = probed(by_zero("deepspeed-zero3", model="mixtral-tiny"), 1).built
    assert built is not None
    assert built.experts == "grouped"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["deepspeed-zero1", "deepspeed-zero3"])
def test_a_trial_measures_the_peak_that_is_traced(strategy: ZeroStrategy) -> None:
    """Its probes begin with new engines, one after another."""
    cell = by_zero(strategy)
    peaks = [rank.peak_allocated_bytes for rank in probed(cell, 1, BATCH).ranks]
    assert peaks == [peak(traced(cell, 1)) + FREQUENCIES] * 2


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trial_that_offloads_measures_the_peak_that_is_traced(ranks: int) -> None:
    """It compiles DeepSpeed's AdamW on the CPU, which its record names."""
    cell = by_zero("deepspeed-zero3", ranks=ranks, offload="all")
    measured = probed(cell, 1, BATCH)
    peaks = [rank.peak_allocated_bytes for rank in measured.ranks]
    assert peaks == [peak(traced(cell, 1)) + FREQUENCIES] * ranks
    assert measured.built is not None
    assert measured.built.optimizer == "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"


def test_weights_are_gathered_for_each_pass_where_they_are_freed() -> None:
    """Once forward and once backward, but for the last, which the backward pass begins with."""
    (cell, _), weights = EXPERTS[0], weight_bytes("mixtral-tiny")
    gathered = moved(traced(cell, 1))["ALL_GATHER"]
    assert 1.5 * weights < gathered <= 2 * weights


def test_a_trace_leaves_the_linear_of_other_models() -> None:
    """DeepSpeed's own would meet the proxies of routers that experts one by one have."""
    traced(by_zero("deepspeed-zero3"), 1)
    assert functional.linear is LINEAR


@pytest.mark.parametrize(
    "cell",
    [
        by_zero("deepspeed-zero2"),
        *long_cases(
            (
                by_zero("deepspeed-zero1"),
                by_zero("deepspeed-zero3"),
                by_zero("deepspeed-zero3", offload="all"),
                by_zero("deepspeed-zero3", "lora", zero=RELEASING),
                by_zero("deepspeed-zero2", offload="optimizer"),
            )
        ),
    ],
    ids=lambda cell: cell.parallel.key,
)
def test_two_batch_sizes_determine_a_third(cell: Cell) -> None:
    """Each trace has an engine of its own, and the same events; weights go in any order."""
    whole = TraceableCell(cell, find_model(cell.model), target="cuda", whole=True)
    first = whole.trace(2, lambda _: 0)
    second = whole.trace(4, lambda _: 0, first.recording)
    both = StepTrace((2, 4), (first.recording, second.recording), first.held, first.copies)
    for count in (1, 2):
        of_two, of_one = Steps(both, count, cell.parallel), on_gpu(cell, count)
        assert of_two.peak_bytes(BATCH) == of_one.peak_bytes(BATCH)
        for name in ("kinds", "names", "numbers"):
            columns = [
                getattr(steps.operators(BATCH, 2 * count).in_full, name)
                for steps in (of_two, of_one)
            ]
            np.testing.assert_allclose(*columns)


def test_further_micro_batches_reduce_from_stage_2_on() -> None:
    """A step of five has the passes between the first and the last three times."""
    for strategy, reduced in (("deepspeed-zero1", 1), ("deepspeed-zero2", 5)):
        steps = traced(by_zero(strategy), 5)
        summed = moved(steps, 5)["ALL_REDUCE"]
        assert summed - NORM_BYTES == reduced * weight_bytes()


def weight_bytes(model: str = "llama-tiny") -> int:
    """Bytes of a model's weights in bf16."""
    made = traceable(by_zero("deepspeed-zero1", model=model))
    return sum(2 * parameter.numel() for parameter in made.model.parameters())
