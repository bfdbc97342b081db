"""The step of a whole model out of a few of its layers: what tracing all of it would record."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.observations import recipe
from builders.whole_steps import deep, differences, traced
from fakes.torch_process import small_steps

from trials.records.recipe import Recipe
from trials.simulation.layer_expansion import whole_step
from trials.simulation.trace_cache import StepTrace
from trials.simulation.whole_step import Steps

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LLAMA, MIXTRAL, QWEN = "llama-tiny", "mixtral-tiny", "qwen3-moe-tiny"


@pytest.fixture(scope="module", autouse=True)
def made_for_small_steps() -> Iterator[None]:
    """All of this file."""
    with small_steps():
        yield


@pytest.mark.parametrize(
    ("model", "of"),
    [
        (LLAMA, recipe("full", precision="bf16")),
        (LLAMA, recipe("lora", precision="bf16", gradient_checkpointing=True)),
        (LLAMA, recipe("full", precision="bf16", optimizer="adafactor")),
        (LLAMA, recipe("full", precision="bf16", optimizer="sgd")),
        (LLAMA, recipe("full", precision="fp16", optimizer="adamw_8bit")),
        (LLAMA, recipe("lora", precision="bf16", lora_dropout=0.1, attention="eager")),
        (MIXTRAL, recipe("qlora", precision="bf16", gradient_checkpointing=True)),
        (MIXTRAL, recipe("lora", precision="bf16")),
        (MIXTRAL, recipe("full", precision="bf16")),
        (QWEN, recipe("full", precision="bf16", gradient_checkpointing=True)),
    ],
    ids=lambda each: getattr(each, "key", each),
)
def test_a_repeated_layer_does_what_each_would(model: str, of: Recipe) -> None:
    """Six layers out of three: event for event what tracing all six gives, both steps."""
    assert differences(model, 6, of) == []


def test_layers_that_take_turns_repeat_by_turns() -> None:
    """Mamba and experts, by twos: event for event as above, checkpointed and not."""
    recipes = [
        recipe("full", precision="bf16"),
        recipe("full", precision="bf16", gradient_checkpointing=True),
        recipe("lora", precision="bf16", lora_targets=("experts", "router")),
    ]
    tests = Path(__file__).parent
    path = os.pathsep.join((str(tests), str(tests.parent)))
    done = subprocess.run(
        [sys.executable, str(tests / "builders/whole_steps.py")],
        input="".join(f"{of.model_dump_json()}\n" for of in recipes),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["[]"] * len(recipes), done.stderr


def test_two_batch_sizes_tell_every_other() -> None:
    """Traced at 4 and 8: storages and work at other sizes are what tracing these gives."""
    model, of = deep(MIXTRAL, 6), recipe("qlora", precision="bf16", gradient_checkpointing=True)
    first, second = (traced(model, of, batch_size=size) for size in (4, 8))
    both = Steps(StepTrace((4, 8), (first.recording, second.recording), first.held, first.copies))
    for size in (3, 17):
        direct = traced(model, of, batch_size=size)
        alone = Steps(StepTrace((size,), (direct.recording,), direct.held, direct.copies))
        for told, traced_ in zip(both.storages(size), alone.storages(size), strict=True):
            assert np.array_equal(told, traced_)
        np.testing.assert_allclose(
            both.operators(size).numbers, alone.operators(size).numbers, rtol=1e-9
        )


def test_everything_that_comes_in_a_step_goes_but_what_the_optimizer_keeps() -> None:
    """After a steady step as much is there as before it: nothing leaks from step to step."""
    step = traced(deep(LLAMA, 6), recipe("full", precision="bf16"))
    stream = whole_step(step.recording, step.copies)
    steps = Steps(StepTrace((4,), (step.recording,), step.held, step.copies))
    _, sizes = steps.storages(4)
    moves = np.flatnonzero(stream.kinds <= 1)
    at_steady = int(np.searchsorted(moves, stream.steady_from))
    assert sizes[at_steady:].sum() == 0
    assert sizes[:at_steady].sum() > 0
