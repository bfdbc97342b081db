"""Bytes of live tensors, in programs small enough to count them by hand."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.observations import cpu
from torch import nn

from trials.devices.cpu import CpuDevice
from trials.devices.device import DeviceOutOfMemoryError
from trials.devices.live_tensors import LiveTensorCounter

pytestmark = pytest.mark.usefixtures("made_for_small_steps")

FLOAT_BYTES = 4
ENOUGH = 2**40


def counter(*already_live: torch.Tensor, budget_bytes: int = ENOUGH) -> LiveTensorCounter:
    """A counter whose budget these programs do not reach by default."""
    return LiveTensorCounter(already_live, budget_bytes)


class TrainingStep:
    """A small model trained one optimizer step at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(8, 32)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        output: torch.Tensor = self.model(self.batch)
        return output.square().mean()

    def already_live(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), self.batch]


def training_peak_bytes() -> int:
    """Counted peak of the first three steps, in bytes."""
    step = TrainingStep()
    device = CpuDevice(cpu(ENOUGH), threads=1)
    memory = device.measure_memory(step, steps=3, already_live=step.already_live())
    return memory.peak_allocated_bytes


def test_tensors_live_before_counting_count_from_the_start() -> None:
    """Weights made before counting are in the budget, each storage once."""
    weight = torch.zeros(10)
    assert counter(weight, weight[2:], torch.zeros(5)).peak_bytes == 15 * FLOAT_BYTES


def test_views_share_their_storage() -> None:
    """Slices, reshapes, transposes and detached tensors add nothing."""
    with counter() as count:
        whole = torch.ones(6, 4)
        views = [whole[2:], whole.view(-1), whole.t(), whole.detach(), whole.expand(3, 6, 4)]
        whole.add_(1)
    assert len(views) == 5
    assert (count.current_bytes, count.peak_bytes) == (24 * FLOAT_BYTES, 24 * FLOAT_BYTES)


def test_a_view_keeps_its_whole_storage() -> None:
    """One referenced element keeps the whole tensor's memory."""
    with counter() as count:
        last = torch.ones(100)[-1:]
    assert last.numel() == 1
    assert count.current_bytes == 100 * FLOAT_BYTES


def test_freed_storages_leave_and_the_peak_stays() -> None:
    """Two tensors that never live together do not add up."""
    with counter() as count:
        first = torch.ones(100)
        del first
        assert count.current_bytes == 0
        second = torch.ones(60)
    assert second.numel() == 60
    assert (count.current_bytes, count.peak_bytes) == (60 * FLOAT_BYTES, 100 * FLOAT_BYTES)


def test_weights_freed_while_counting_are_subtracted() -> None:
    """Tensors made before counting are subtracted when they are freed."""
    weights = [torch.ones(100), torch.ones(10)]
    with counter(*weights) as count:
        weights.pop(0)
        assert count.current_bytes == 10 * FLOAT_BYTES


def test_an_intermediate_result_lives_beside_its_operands() -> None:
    """The peak is inside the expression: a, b and their sum, then the product as well."""
    with counter() as count:
        a, b = torch.ones(100), torch.ones(100)
        result = (a + b) * b
        del a, b
    assert result.numel() == 100
    assert (count.current_bytes, count.peak_bytes) == (100 * FLOAT_BYTES, 400 * FLOAT_BYTES)


def test_every_dtype_counts_its_own_bytes() -> None:
    """A bf16 element takes two bytes; a uint8 holds two 4-bit values in one."""
    with counter() as count:
        kept = [torch.ones(100, dtype=dtype) for dtype in (torch.bfloat16, torch.uint8)]
    assert len(kept) == 2
    assert count.current_bytes == 300


def test_a_storage_that_grows_counts_at_its_new_size() -> None:
    """A tensor resized in place is still one storage."""
    with counter() as count:
        tensor = torch.ones(100)
        tensor.resize_(150)
    assert count.current_bytes == 150 * FLOAT_BYTES


def test_tensors_saved_for_backward_count() -> None:
    """Autograd keeps the result of exp for its gradient; adding 1 keeps nothing."""
    weight = torch.ones(100, requires_grad=True)
    with counter(weight) as count:
        loss = weight.exp().sum()
        assert count.current_bytes == (100 + 100 + 1) * FLOAT_BYTES
        loss = (weight + 1).sum()
        assert count.current_bytes == (100 + 1) * FLOAT_BYTES
    assert loss.numel() == 1


def test_backward_frees_saved_tensors_and_keeps_the_gradient() -> None:
    """The weight, its gradient and the loss remain after backward."""
    weight = torch.ones(100, requires_grad=True)
    with counter(weight) as count:
        loss = weight.exp().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert count.current_bytes == (100 + 100 + 1) * FLOAT_BYTES
        weight.grad = None
        assert count.current_bytes == (100 + 1) * FLOAT_BYTES


def test_optimizer_state_counts_from_the_first_step_on() -> None:
    """AdamW keeps two numbers per weight, and one step count (a float) per tensor."""
    weight = nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    with counter(weight, weight.grad) as count:
        optimizer.step()
        assert count.current_bytes == (4 * 100 + 1) * FLOAT_BYTES


def test_a_reference_cycle_is_memory_until_counting_ends() -> None:
    """Collecting a cycle at a moment that Python chooses would make the peak random."""
    with counter() as count:
        for _ in range(3):
            cycle: list[object] = [torch.ones(100)]
            cycle.append(cycle)
            del cycle
            _ = [[] for _ in range(10_000)]  # far more than sets a collection off
    assert count.peak_bytes == 300 * FLOAT_BYTES


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_left_as_it_was(enabled: bool) -> None:  # noqa: FBT001
    """Counting disables the collector and restores it, also when the budget is exceeded."""
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(DeviceOutOfMemoryError), counter(budget_bytes=1):
            torch.ones(100)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_nothing_is_counted_after_the_end() -> None:
    """Tensors made or freed after counting do not change the numbers."""
    with counter() as count:
        kept = torch.ones(100)
    later = torch.ones(1000)
    del kept, later
    assert (count.current_bytes, count.peak_bytes) == (100 * FLOAT_BYTES, 100 * FLOAT_BYTES)


def test_the_same_steps_have_the_same_peak_every_time() -> None:
    """The peak is the same in the first run, in the next, and after running out of memory."""
    first = training_peak_bytes()
    step = TrainingStep()
    with pytest.raises(DeviceOutOfMemoryError):
        CpuDevice(cpu(first - 1), threads=1).measure_memory(
            step, steps=3, already_live=step.already_live()
        )
    assert [training_peak_bytes(), training_peak_bytes()] == [first, first]


@pytest.mark.long
def test_a_fresh_process_counts_the_same_peak_as_a_used_one() -> None:
    """Nothing that ran earlier in the process is in the peak."""
    tests = Path(__file__).parent
    fresh = subprocess.run(
        [
            sys.executable,
            "-c",
            "import test_devices_live_tensors as t; print(t.training_peak_bytes())",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent)))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(fresh.stdout) == training_peak_bytes()


def test_the_peak_of_a_step_rises_once_the_optimizer_has_state() -> None:
    """The first step has no AdamW state during backward; from the second on peaks are equal.

    A probe therefore runs three steps.
    """
    step = TrainingStep()
    device = CpuDevice(cpu(ENOUGH), threads=1)
    peaks = [
        device.measure_memory(
            step,
            steps=1,
            already_live=[
                *step.already_live(),
                *(p.grad for p in step.model.parameters() if p.grad is not None),
                *(v for state in step.optimizer.state.values() for v in state.values()),
            ],
        ).peak_allocated_bytes
        for _ in range(3)
    ]
    assert peaks[0] < peaks[1] == peaks[2]


@pytest.mark.parametrize(
    "program",
    [lambda: torch.ones(1000), lambda: torch.ones(300) + 1, lambda: torch.ones(100).repeat(7)],
)
def test_a_peak_of_exactly_the_budget_fits_and_one_byte_less_does_not(
    program: Callable[[], torch.Tensor],
) -> None:
    """The budget is inclusive."""
    with counter() as count:
        program()
    peak = count.peak_bytes
    with counter(budget_bytes=peak) as count:
        program()
    assert count.peak_bytes == peak
    with (
        pytest.raises(DeviceOutOfMemoryError, match=f"exceed the budget of {peak - 1} bytes"),
        counter(budget_bytes=peak - 1),
    ):
        program()


def test_weights_alone_can_exceed_the_budget() -> None:
    """A model that does not fit is out of memory before its first step."""
    with pytest.raises(DeviceOutOfMemoryError, match="400 bytes of live tensors exceed"):
        counter(torch.ones(100), budget_bytes=399)


def test_backward_can_run_out_of_memory_after_a_forward_that_fits() -> None:
    """Autograd raises the error unchanged, at the exact byte."""
    weight = torch.ones(100, requires_grad=True)

    def forward() -> torch.Tensor:
        return weight.sin().sum()

    with counter(weight) as count:
        loss = forward()
        forward_peak = count.peak_bytes
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    weight.grad = None
    assert count.peak_bytes > forward_peak

    with counter(weight, budget_bytes=count.peak_bytes):
        forward().backward()  # type: ignore[no-untyped-call]
    weight.grad = None

    with counter(weight, budget_bytes=count.peak_bytes - 1):
        loss = forward()
        with pytest.raises(DeviceOutOfMemoryError, match="exceed the budget"):
            loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None


def test_a_sum_of_two_gradients_takes_no_memory_of_its_own() -> None:
    """Autograd writes it to the first gradient, unless a mode watches; the count is that without.

    The weight, two gradients of it, and numbers of 4 bytes are alive at most.
    """
    weight = torch.ones(1 << 16, requires_grad=True)
    size = weight.nbytes
    with LiveTensorCounter([weight], budget_bytes=1 << 30) as counter:
        ((weight * 2).sum() + (weight * 3).sum()).backward()  # type: ignore[no-untyped-call]
    assert 3 * size < counter.peak_bytes < 3.1 * size
    assert counter.current_bytes < 2.1 * size


def test_a_gradient_that_is_still_held_is_kept_beside_the_sum() -> None:
    """A hook that keeps the first gradient makes autograd take a new tensor for the sum."""
    weight, kept = torch.ones(1 << 16, requires_grad=True), []
    size = weight.nbytes
    with LiveTensorCounter([weight], budget_bytes=1 << 30) as counter:
        parts = weight * 2, weight * 3
        for part in parts:
            part.register_hook(lambda grad: kept.append(grad * 1) or kept[-1])
        (parts[0].sum() + parts[1].sum()).backward()
    assert len(kept) == 2
    assert counter.peak_bytes > 3.1 * size
