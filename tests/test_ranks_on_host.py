"""Shards that the host holds, by FSDP2: what stays on a traced GPU, and what the host does."""

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import recipe, tiny_cell
from builders.ranks import (
    BATCH,
    LENGTH,
    host_bytes,
    moved,
    on_gpu,
    on_layout,
    traceable,
)

from gpu_catalog.catalog import load_catalog
from trials.recipes.host_bytes import least_host_bytes
from trials.recipes.parallel import Parallel, Strategy
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.model import find_model
from trials.simulation.ranks.rank_timeline import rank_seconds
from trials.simulation.ranks.stream_events import Action, StreamEvent
from trials.simulation.recording import Kind, OperatorClass, Purpose
from trials.simulation.trace_cache import StepTrace
from trials.simulation.trace_request import approximations
from trials.simulation.tracing.ranks.host_tensors import pinned_bytes
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps
from trials.training.optimizers.construction import make_stepper

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
RANKS = 2
FULL = recipe("full", precision="bf16-mixed", max_grad_norm=1.0)
LORA = recipe("lora", precision="bf16", gradient_checkpointing=True)
QLORA = recipe("qlora", precision="bf16", gradient_checkpointing=True)
ON_HOST = (Purpose.WEIGHT, Purpose.GRADIENT, Purpose.OPTIMIZER)
"""Purposes of what the host holds."""
FREQUENCIES = 64
"""Bytes of fp32 frequencies, which two buffers of a model have and no rank divides."""


def sharded(settings: Recipe, *, on_host: bool, strategy: Strategy = "fsdp2") -> Cell:
    """A tiny model in shards on ranks, which the host may hold."""
    copies = 2 if strategy == "hsdp" else None
    layout = Parallel(
        gpus=RANKS * (copies or 1),
        strategy=strategy,
        replicas=copies,
        shards_on_host=on_host or None,
    )
    return on_layout(tiny_cell("llama-tiny", settings, seq_len=LENGTH), layout)


def freed(settings: Recipe, strategy: Strategy) -> tuple[float, float]:
    """Bytes by which the host lowers a GPU's peak, and those of the shards that were in the peak.

    Between two steps the GPU holds frequencies and the constants of 4-bit weights, which are whole
    on each rank.
    """
    on_gpus, on_host = (
        on_gpu(sharded(settings, on_host=place, strategy=strategy)) for place in (False, True)
    )
    assert moved(on_gpus) == moved(on_host)
    weights = on_host.held.sizes[on_host.held.purposes == Purpose.WEIGHT]
    assert weights.sum() == 2 * FREQUENCIES
    left = on_host.at_peak(BATCH)
    assert left.keys() & set(ON_HOST) == {Purpose.WEIGHT}
    held = on_gpus.at_peak(BATCH)
    shards = sum(held.get(purpose, 0) for purpose in ON_HOST) - left[Purpose.WEIGHT]
    return on_gpus.peak_bytes(BATCH) - on_host.peak_bytes(BATCH), shards


@pytest.mark.parametrize(
    "settings", [LORA, *long_cases((FULL, QLORA))], ids=["lora", "full", "qlora"]
)
def test_a_gpu_has_what_it_has_without_but_no_shards(settings: Recipe) -> None:
    """Its peak lacks just the shards of weights, gradients and optimizer state that were in it."""
    less, shards = freed(settings, "fsdp2")
    assert less == shards > 400_000


def test_copies_of_shards_have_none_either() -> None:
    """What gradients of a unit are summed in stays until those of the next: it is in the peak."""
    less, shards = freed(FULL, "hsdp")
    assert 0.9 * shards < less < shards


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_shards_are_copied_as_they_are_gathered_and_reduced(settings: Recipe) -> None:
    """In their own dtype before they are gathered in that of the products; gradients come back.

    Full training has fp32 shards and gathers them in bf16; adapters and frozen weights are in bf16.
    """
    steps = on_gpu(sharded(settings, on_host=True))
    gathered, reduced = (moved(steps)[name] for name in ("ALL_GATHER", "REDUCE_SCATTER"))
    itself = 2 if settings is FULL else 1  # bytes of a shard for each that is gathered
    copied = host_bytes(steps, OperatorClass.HOST_COPY)
    assert copied == itself * (gathered + reduced) / RANKS
    assert host_bytes(on_gpu(sharded(settings, on_host=False)), OperatorClass.HOST_COPY) == 0


def test_the_host_clips_and_updates() -> None:
    """Of each weight: its gradient is read for the norm, and read and written to be clipped.

    AdamW reads weight, gradient and both moments, and writes all but the gradient: 28 bytes.
    """
    cell = sharded(FULL, on_host=True)
    shard = sum(p.numel() for p in traceable(cell).model.parameters()) / RANKS
    steps = on_gpu(cell)
    done = host_bytes(steps, OperatorClass.HOST_MEMORY)
    assert done == pytest.approx((4 + 8 + 28) * shard, rel=1e-3)


def test_the_host_adds_the_gradients_of_later_micro_batches() -> None:
    """It waits for each, for only then it can read it: two are read and one is written.

    Those of the first come while the backward pass goes on.
    """
    cell = sharded(FULL, on_host=True)
    made = traceable(cell).model
    parameters = len(list(made.parameters()))
    shard = sum(p.numel() for p in made.parameters()) / RANKS
    one, two = (on_gpu(cell, count) for count in (1, 2))
    memory = [host_bytes(steps, OperatorClass.HOST_MEMORY) for steps in (one, two)]
    assert memory[1] - memory[0] == 12 * shard
    waits = [int((s.operators(BATCH).in_full.kinds == Kind.WAITED).sum()) for s in (one, two)]
    assert waits[1] - waits[0] >= parameters
    assert waits[0] < parameters
    assert two.peak_bytes(BATCH) == one.peak_bytes(BATCH)


def test_the_memory_of_the_host_is_that_of_all_shards() -> None:
    """Weight and gradient at powers of two of bytes, both moments as they are.

    A model of which a few layers are traced has that of all.
    """
    cell = sharded(FULL, on_host=True)
    model = find_model(cell.model)
    few, every = (
        TraceableCell(cell, model, whole=whole).trace(BATCH, lambda _: 0) for whole in (False, True)
    )
    assert few.host_bytes == every.host_bytes
    sizes = [4 * -(-len(p) // RANKS) * p[0].numel() for p in traceable_weights(cell)]
    assert every.host_bytes == (sum(2 * pinned_bytes(size) + 2 * size for size in sizes),)
    assert least_host_bytes(Parallel(gpus=4, strategy="fsdp2", shards_on_host=True), 10, 6) == 50
    on_gpus = TraceableCell(sharded(FULL, on_host=False), model, whole=True)
    assert on_gpus.trace(BATCH, lambda _: 0).host_bytes == ()


def traceable_weights(cell: Cell) -> list[torch.Tensor]:
    """Whole weights of a cell's model."""
    return list(traceable(cell.model_copy(update={"parallel": None})).model.parameters())


def test_two_batch_sizes_determine_a_third() -> None:
    """Copies and the work of the host do not depend on the batch."""
    cell = sharded(FULL, on_host=True)
    whole = TraceableCell(cell, find_model(cell.model), whole=True)
    first = whole.trace(2, lambda _: 0)
    second = whole.trace(4, lambda _: 0, first.recording)
    both = StepTrace((2, 4), (first.recording, second.recording), first.held, first.copies)
    third = whole.trace(3, lambda _: 0)
    alone = StepTrace((3,), (third.recording,), third.held, third.copies)
    of_two, of_one = (Steps(trace, 2, cell.parallel) for trace in (both, alone))
    assert of_two.peak_bytes(3) == of_one.peak_bytes(3)
    for name in ("kinds", "names", "numbers"):
        columns = [getattr(steps.operators(3).in_full, name) for steps in (of_two, of_one)]
        np.testing.assert_allclose(*columns)


def test_an_answer_names_what_is_assumed_of_the_host() -> None:
    """The rate of its update and of copies, and the memory that it holds."""
    gpu = load_catalog().gpu("A100-80GB-SXM")
    for on_host in (True, False):
        cell = sharded(FULL, on_host=on_host)
        notes = " ".join(approximations(cell, find_model(cell.model), gpu))
        for said in ("40 GB/s of a node's memory", "about 16 bytes", "0.8 of PCIe's rate"):
            assert (said in notes) is on_host


def test_the_host_waits_for_the_stream_that_copies() -> None:
    """A copy of two seconds on its own stream, and one on that of the computation after it."""
    to_copies, back = (StreamEvent(Action.RUN, number).number for number in (2, 0))
    host, links = np.zeros(4), np.zeros(4, np.int64)
    device = np.array([0.0, 2.0, 0.0, 0.0])
    streams = np.array([to_copies, 0, 0, back])
    host[3] = 1.0  # after the wait
    assert rank_seconds(host, device, links, streams, np.array([2])) == 3.0
    assert rank_seconds(host, device, links, streams, np.array([], np.int64)) == 2.0


def test_a_measured_update_has_the_kernels_of_the_host() -> None:
    """PyTorch updates a CPU's tensors one by one, wherever the model computes."""
    model = torch.nn.Linear(2, 2)
    settings = recipe("full", precision="fp32", optimizer="sgd")
    for on_host, together in ((True, False), (False, True)):
        stepper = make_stepper(
            model,
            list(model.parameters()),
            settings,
            torch.device("cuda"),
            parallel=sharded(settings, on_host=on_host).parallel,
        )
        assert stepper.optimizer.defaults["foreach"] is together
