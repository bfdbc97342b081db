"""A whole model's step expanded from a few traced layers equals a trace of all layers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders.long_cases import long_cases
from builders.observations import recipe
from builders.whole_steps import deep, differences, traced

from trials.recipes.fields import Method, Precision, Reference, Task
from trials.recipes.recipe import Recipe
from trials.simulation.layer_expansion import whole_steps
from trials.simulation.recording import Column, Purpose
from trials.simulation.trace_cache import StepTrace
from trials.simulation.whole_step import Steps

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LLAMA, MIXTRAL, QWEN = "llama-tiny", "mixtral-tiny", "qwen3-moe-tiny"


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (LLAMA, recipe("full", precision="bf16")),
        (LLAMA, recipe("lora", precision="bf16", gradient_checkpointing=True)),
        (
            QWEN,
            recipe(
                "full",
                precision="bf16",
                gradient_checkpointing=True,
                loss="chunked",
                router_loss=True,
            ),
        ),
        *long_cases(
            (
                (LLAMA, recipe("full", precision="bf16", optimizer="adafactor")),
                (LLAMA, recipe("full", precision="bf16", optimizer="sgd")),
                (LLAMA, recipe("full", precision="fp16", optimizer="adamw_8bit")),
                (LLAMA, recipe("lora", precision="bf16", lora_dropout=0.1, attention="eager")),
                (LLAMA, recipe("qlora", precision="bf16-mixed", quantisation="int8")),
                (MIXTRAL, recipe("full", precision="bf16-mixed", router_loss=True)),
                (LLAMA, recipe("full", precision="bf16-mixed", task="orpo")),
                (LLAMA, recipe("full", precision="bf16-mixed", task="reward")),
                (MIXTRAL, recipe("qlora", precision="bf16", gradient_checkpointing=True)),
                (MIXTRAL, recipe("lora", precision="bf16")),
                (LLAMA, recipe("lora", precision="bf16", task="orpo", gradient_checkpointing=True)),
                (
                    LLAMA,
                    recipe("qlora", precision="bf16", task="reward", gradient_checkpointing=True),
                ),
            )
        ),
    ],
    ids=lambda each: getattr(each, "key", each),
)
def test_an_expanded_trace_equals_a_full_trace(model: str, settings: Recipe) -> None:
    """Six layers expanded from three give the same events as tracing all six, in both steps."""
    assert differences(model, 6, settings) == []


QUICK_REFERRING = (
    ("dpo", "lora", "adapter-off", "bf16-mixed"),
    ("kto", "full", "separate", "bf16"),
)
REFERRING = (
    *(("dpo", "lora", kind) for kind in ("adapter-off", "precomputed")),
    *(("dpo", method, "separate") for method in ("full", "qlora")),
    *(("kto", "lora", "adapter-off"), ("kto", "full", "separate")),
    ("grpo", "lora", "adapter-off"),
)
"""Tasks with a reference."""


@pytest.mark.parametrize(
    ("task", "method", "reference", "precision"),
    [
        *QUICK_REFERRING,
        *long_cases(
            (*referring, precision)
            for referring in REFERRING
            for precision in ("bf16", "bf16-mixed")
            if (*referring, precision) not in QUICK_REFERRING
        ),
    ],
)
def test_passes_without_gradients_expand_alike(
    task: Task, method: Method, reference: Reference, precision: Precision
) -> None:
    """Passes of a reference run in every layer, under autocast with casts of all."""
    settings = recipe(
        method,
        precision=precision,
        gradient_checkpointing=True,
        task=task,
        reference=reference,
    )
    assert differences(LLAMA, 6, settings, micro_batches=2) == []


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (LLAMA, recipe("full", precision="bf16-mixed", max_grad_norm=1.0)),
        *long_cases(
            (
                (LLAMA, recipe("full", precision="bf16", optimizer="adamw_foreach")),
                (MIXTRAL, recipe("qlora", precision="bf16", gradient_checkpointing=True)),
            )
        ),
    ],
    ids=lambda value: getattr(value, "key", value),
)
def test_accumulated_micro_batches_expand_alike(model: str, settings: Recipe) -> None:
    """Each copied layer's gradient is added to that of the first micro-batch."""
    assert differences(model, 6, settings, micro_batches=3) == []


def test_inputs_of_eight_bit_products_live_until_the_backward_pass_ends() -> None:
    """Checkpointing does not free them, and an expanded trace has them in every layer."""
    settings = recipe("qlora", precision="bf16", quantisation="int8", gradient_checkpointing=True)
    model = deep(LLAMA, 6)
    traces = [
        StepTrace((4,), (step.recording,), step.held, step.copies)
        for step in (traced(model, settings), traced(model, settings, whole=True))
    ]
    width, inner = model.config["hidden_size"], model.config["intermediate_size"]
    inputs = 6 * 4 * 24 * 2 * (3 * width + inner)  # of q, o, gate and down, in bf16
    for micro_batches in (1, 3):
        few, whole = (Steps(trace, micro_batches) for trace in traces)
        assert few.peak_bytes(4) == whole.peak_bytes(4)
        assert few.storages(4)[1].sum() == whole.storages(4)[1].sum()
        assert few.at_peak(4)[Purpose.CHECKPOINT] >= inputs


def test_gradients_live_from_the_first_micro_batch_to_the_update() -> None:
    """At most one more set of gradients is live, and the second micro-batch leaves nothing else."""
    settings = recipe("full", precision="fp32")
    step = traced(deep(LLAMA, 6), settings)
    trace = StepTrace((4,), (step.recording,), step.held, step.copies)
    once, twice, often = (Steps(trace, number) for number in (1, 2, 8))
    weights = once.held.sizes[once.held.purposes == Purpose.WEIGHT].sum()
    assert 0 < twice.peak_bytes(4) - once.peak_bytes(4) <= weights
    assert often.peak_bytes(4) == twice.peak_bytes(4)
    assert twice.storages(4)[1].sum() == once.storages(4)[1].sum()


def test_a_further_micro_batch_repeats_the_last() -> None:
    """Eight micro-batches run the operators of two, with the second one seven times."""
    step = traced(deep(LLAMA, 6), recipe("full", precision="fp32"))
    steps = Steps(StepTrace((4,), (step.recording,), step.held, step.copies), 2)
    whole = [steps.operators(4, number).in_full for number in (2, 3, 8)]
    flops = [operators.numbers[:, Column.FLOPS].sum() for operators in whole]
    one = flops[1] - flops[0]
    assert one > 0
    assert flops[2] == pytest.approx(flops[0] + 6 * one)


@pytest.mark.long
def test_alternating_layers_are_repeated_in_turn() -> None:
    """Mamba and expert layers alternate, with and without checkpointing."""
    recipes = [
        recipe("full", precision="bf16"),
        recipe("full", precision="bf16", gradient_checkpointing=True),
        recipe("lora", precision="bf16", lora_targets=("experts", "router")),
    ]
    tests = Path(__file__).parent
    path = os.pathsep.join((str(tests), str(tests.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "trials.child_process.bootstrap", "builders.whole_steps"],
        input="".join(f"{settings.model_dump_json()}\n" for settings in recipes),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["[]"] * len(recipes), done.stderr


@pytest.mark.long
def test_two_traced_batch_sizes_give_every_other() -> None:
    """Traces at 4 and 8 give the storages and work that direct traces of other sizes have."""
    model, settings = (
        deep(MIXTRAL, 6),
        recipe("qlora", precision="bf16", gradient_checkpointing=True),
    )
    first, second = (traced(model, settings, batch_size=size) for size in (4, 8))
    both = Steps(StepTrace((4, 8), (first.recording, second.recording), first.held, first.copies))
    for size in (3, 17):
        direct = traced(model, settings, batch_size=size)
        alone = Steps(StepTrace((size,), (direct.recording,), direct.held, direct.copies))
        for expanded, traced_ in zip(both.storages(size), alone.storages(size), strict=True):
            assert np.array_equal(expanded, traced_)
        np.testing.assert_allclose(
            both.operators(size).in_full.numbers, alone.operators(size).in_full.numbers, rtol=1e-9
        )


def test_a_steady_step_leaks_no_storage() -> None:
    """As many storages live after a steady step as before it."""
    step = traced(deep(LLAMA, 6), recipe("full", precision="bf16"))
    stream = whole_steps([step.recording], step.copies)[0]
    steps = Steps(StepTrace((4,), (step.recording,), step.held, step.copies))
    _, sizes = steps.storages(4)
    moves = np.flatnonzero(stream.kinds <= 1)
    at_steady = int(np.searchsorted(moves, stream.steady_from))
    assert sizes[at_steady:].sum() == 0
    assert sizes[:at_steady].sum() > 0
