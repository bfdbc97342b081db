"""Profiler of training steps: stages by timed marks, layers by ranges around modules.

The training code stays unchanged: hooks do all of it and are removed at the end.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

from trials.devices.device import Device
from trials.models.experts import LoopedExperts, experts_in_use
from trials.records.profile import ExpertLoad, Profile, ProfileRow, ProfileRule, Stage
from trials.training.finetune import FineTuning
from trials.training.profiling.module_ranges import (
    ATTENTION,
    LEFT_FACTOR,
    Handle,
    Ranges,
    Step,
    expert_modules,
    whole_stage,
)
from trials.training.profiling.operator_attribution import GROUPED_PRODUCTS, Event, rows


def profiled(
    tuning: FineTuning, device: Device, tokens: torch.Tensor, rule: ProfileRule
) -> Profile:
    """Profile steps on a batch. Some steps must have run before.

    Args:
        tuning: the model under its recipe.
        device: device of the model.
        tokens: (sequences, length) token ids.
        rule: number of steps.
    """

    def step() -> None:
        tuning.step(tokens)

    plain: list[float] = []
    marked: list[tuple[float, float, float]] = []
    # Plain and marked steps alternate, so that a slowing machine affects both.
    with StageMarks(tuning, device) as marks:
        while not rule.is_enough(plain):
            plain.append(device.step_seconds(step))
            marked.append(marks.timed(step))
    by_part, seconds = _under_profiler(tuning, device, step, rule)
    forward, backward, optimizer = zip(*marked, strict=True)
    return Profile(
        of="cpu" if device.torch_device.type == "cpu" else "gpu",
        plain_seconds=tuple(plain),
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=optimizer,
        profiled_seconds=tuple(seconds),
        rows=tuple(by_part),
        load=expert_load(tuning, tokens, rule.training_steps),
    )


class StageMarks:
    """Times the stages of steps. A context manager.

    The forward pass ends with the loss, the backward pass where the optimizer
    begins; under fp16 that is after gradients were unscaled. The device is synchronised in between.

    Args:
        tuning: the model under its recipe.
        device: device to synchronise.
        on_stage: called with each stage as it begins.
    """

    def __init__(
        self,
        tuning: FineTuning,
        device: Device,
        on_stage: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._tuning = tuning
        self._optimizer = _torch_optimizer(tuning.stepper.optimizer)
        self._device = device
        self._on_stage = on_stage
        self._ends: list[float] = []
        self._active = False
        self._hooks: list[Handle] = []

    def __enter__(self) -> Self:
        self._tuning.on_loss = lambda: self._mark("backward")
        hook = self._optimizer.register_step_pre_hook(lambda *_: self._mark("optimizer"))
        self._hooks = [hook]
        return self

    def __exit__(self, *exception: object) -> None:
        self._tuning.on_loss = lambda: None
        for hook in self._hooks:
            hook.remove()

    def timed(self, step: Step) -> tuple[float, float, float]:
        """Run one step; return seconds of forward pass, backward pass and optimizer."""
        self._synchronise()
        self._ends, self._active = [], True
        self._on_stage("forward")
        started = time.perf_counter()
        step()
        self._synchronise()
        ended = time.perf_counter()
        self._active = False
        forward, backward = self._ends
        return forward - started, backward - forward, ended - backward

    def _mark(self, following: Stage) -> None:
        if self._active:
            self._synchronise()
            self._ends.append(time.perf_counter())
            self._on_stage(following)

    def _synchronise(self) -> None:
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize()


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Optimizer that updates the weights, inside DeepSpeed's wrappers."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _under_profiler(
    tuning: FineTuning, device: Device, step: Step, rule: ProfileRule
) -> tuple[list[ProfileRow], list[float]]:
    """Rows of the median of some profiled steps, and the seconds of each step."""
    on_gpu = device.torch_device.type == "cuda"

    def once(*, shapes: bool) -> tuple[list[ProfileRow], float]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, record_shapes=shapes, acc_events=True) as profiler:
            seconds = sum(marks.timed(step))
            ranges.close()
        events = [event for event in profiler.events() or () if event.device_type.name == "CPU"]
        step_rows = rows(events, event_flops if shapes else lambda _: 0, on_gpu=on_gpu)
        step_rows += _idle(events, step_rows) if on_gpu else ()
        del profiler, events
        gc.collect()  # events refer to their parents and children
        return step_rows, seconds

    with Ranges(tuning.model) as ranges, StageMarks(tuning, device, ranges.stage) as marks:
        # Recording shapes takes time, so a separate step does it, which also warms the profiler up.
        shaped, _ = once(shapes=True)
        # Each step's events are freed before the next. Until the heap has holes of their size, they
        # fragment the blocks that tensors would reuse; then the kernel must map every tensor anew,
        # and steps take many times as long.
        for _ in range(rule.warmup_steps):
            once(shapes=False)
        made = [once(shapes=False) for _ in range(rule.steps)]
    counted = {(r.stage, r.layer, r.kernel): r.flops for r in shaped}
    median, _ = sorted(made, key=lambda one: one[1])[(rule.steps - 1) // 2]
    with_flops = [
        row.model_copy(update={"flops": counted.get((row.stage, row.layer, row.kernel), 0)})
        for row in median
    ]
    return with_flops, [seconds for _, seconds in made]


def _idle(events: Sequence[Event], busy_rows: Sequence[ProfileRow]) -> Iterator[ProfileRow]:
    """Rows of the time in each stage without a kernel, in which the GPU waited for its host."""
    stages: tuple[Stage, ...] = ("forward", "backward", "optimizer")
    for stage in stages:
        name = whole_stage(stage).range_name
        whole = sum(e.time_range.elapsed_us() for e in events if e.name == name) / 1e6
        parts = (stage, "recompute") if stage == "backward" else (stage,)
        busy = sum(row.seconds for row in busy_rows if row.stage in parts)
        if whole > busy:
            yield ProfileRow(
                stage=stage, layer="idle", kernel="idle", seconds=whole - busy, calls=0, flops=0
            )


def event_flops(event: Event) -> int:
    """Floating-point operations of a matrix product or attention, by the shapes of its event.

    A product of (S, K) by (K, N) takes ``2 S K N``; the grouped one of (S, K) by (experts, K, N) or
    of (K, S) by (S, N), too. The formulas of attention are those of torch.utils.flop_counter.
    """
    shapes = [tuple(shape) for shape in event.input_shapes]
    parent = event.cpu_parent
    if not shapes or (parent is not None and parent.name in GROUPED_PRODUCTS):
        return 0  # on a CPU the grouped product consists of plain ones
    if event.name in GROUPED_PRODUCTS:
        return int(2 * shapes[0][0] * shapes[0][1] * shapes[1][-1])
    if (
        event.name.startswith(ATTENTION) and "math" not in event.name
    ):  # which consists of other operators
        # Query heads that share keys and values each take their own products.
        heads = max(shape[1] for shape in shapes if len(shape) == 4)
        whole = [(s[0], heads, *s[2:]) if len(s) == 4 else s for s in shapes]
        is_backward = event.name.endswith("_backward")
        return int(sdpa_backward_flop(*whole[:4]) if is_backward else sdpa_flop(*whole[:3]))
    if event.name not in LEFT_FACTOR:
        return 0  # a convolution's formula needs more than shapes; that of Mamba is small
    left = LEFT_FACTOR[event.name]
    return int(2 * math.prod(shapes[left]) * shapes[left + 1][-1])


def expert_load(tuning: FineTuning, tokens: torch.Tensor, training_steps: int) -> ExpertLoad | None:
    """Tokens of each expert at the initial weights and after training steps on other batches.

    None without experts, and where all tokens are those of every expert.
    """
    is_loaded_alike = experts_in_use(tuning.model) == "all-tokens"
    if is_loaded_alike or not any(expert_modules(tuning.model)):
        return None
    tuning.start_over()
    before = _expert_counts(tuning, tokens)
    sequences = len(tokens)
    examples = sequences // tuning.sequences
    for draw in range(1, training_steps + 1):
        tuning.step(tuning.tokens(examples, draw)[:sequences])
    after = _expert_counts(tuning, tokens)
    return ExpertLoad(examples=examples, training_steps=training_steps, before=before, after=after)


def _expert_counts(tuning: FineTuning, tokens: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Tokens routed to each expert, (layers, experts)."""
    counts: list[tuple[int, ...]] = []

    def count(module: Any, inputs: tuple[Any, ...]) -> None:
        experts = len(module.each) if isinstance(module, LoopedExperts) else module.num_experts
        chosen = inputs[1].flatten()
        counts.append(tuple(torch.bincount(chosen, minlength=experts).tolist()))

    with ExitStack() as hooks:
        for _, module in expert_modules(tuning.model):
            hooks.callback(module.register_forward_pre_hook(count).remove)
        tuning.forward(tokens)
    return tuple(counts)
