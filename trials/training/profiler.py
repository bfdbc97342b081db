"""Profiles steps of the training code: its stages by marks, its layers by ranges around modules.

The training code is what it always is; everything here hangs on hooks and is taken off again.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from trials.devices.device import Device
from trials.models.experts import LoopedExperts
from trials.records.profile import ExpertLoad, Profile, ProfileRow, ProfileRule, Stage
from trials.training.finetune import FineTuning
from trials.training.module_ranges import (
    ATTENTION,
    PRODUCTS_OF_SHAPES,
    Handle,
    Ranges,
    Step,
    expert_modules,
    whole_stage,
)
from trials.training.operator_attribution import GROUPED_PRODUCTS, Event, rows


def profiled(
    tuning: FineTuning, device: Device, tokens: torch.Tensor, rule: ProfileRule
) -> Profile:
    """Where the time of a step on these tokens goes. Some steps must have been made.

    Args:
        tuning: the model under its recipe.
        device: its clock.
        tokens: (batch_size, length).
        rule: how many steps to take.
    """

    def step() -> None:
        tuning.step(tokens)

    plain: list[float] = []
    marked: list[tuple[float, float, float]] = []
    # By turns, so that a machine that slows down does so for both.
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
    """Tells when a step's stages end. A context manager.

    The forward pass ends with the model's own, the backward pass where the optimizer begins; under
    fp16 that is after the gradients were scaled back. Between them the device is waited for.

    Args:
        tuning: whose steps they are.
        device: what is waited for.
        on_stage: is told of each stage as it begins.
    """

    def __init__(
        self,
        tuning: FineTuning,
        device: Device,
        on_stage: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._model = tuning.model
        self._optimizer = _torch_optimizer(tuning.stepper.optimizer)
        self._device = device
        self._on_stage = on_stage
        self._ends: list[float] = []
        self._active = False
        self._hooks: list[Handle] = []

    def __enter__(self) -> Self:
        self._hooks = [
            self._model.register_forward_hook(lambda *_: self._mark("backward")),
            self._optimizer.register_step_pre_hook(lambda *_: self._mark("optimizer")),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def timed(self, step: Step) -> tuple[float, float, float]:
        """One step: seconds of its forward and backward pass and of the optimizer."""
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
    """DeepSpeed's wraps the one that does the update."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _under_profiler(
    tuning: FineTuning, device: Device, step: Step, rule: ProfileRule
) -> tuple[list[ProfileRow], list[float]]:
    """The rows of the median of some steps, and how long each took."""
    on_gpu = device.torch_device.type == "cuda"

    def once(*, shapes: bool) -> tuple[list[ProfileRow], float]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, record_shapes=shapes, acc_events=True) as seen:
            seconds = sum(marks.timed(step))
            ranges.close()
        events = [event for event in seen.events() or () if event.device_type.name == "CPU"]
        found = rows(events, event_flops if shapes else lambda _: 0, on_gpu=on_gpu)
        found += _idle(events, found) if on_gpu else ()
        del seen, events
        gc.collect()  # parents and children hold one another
        return found, seconds

    with Ranges(tuning.model) as ranges, StageMarks(tuning, device, ranges.stage) as marks:
        # Shapes take time to record, so their step is another; it warms the profiler up.
        shaped, _ = once(shapes=True)
        # Each step's events are let go of before the next. Until there are holes of their size in
        # the heap, they break up the blocks that tensors would have had again, and every tensor
        # is one that the kernel must map: steps take many times as long.
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


def _idle(events: Sequence[Event], found: Sequence[ProfileRow]) -> Iterator[ProfileRow]:
    """What of each stage no kernel took: the GPU waited for its host."""
    stages: tuple[Stage, ...] = ("forward", "backward", "optimizer")
    for stage in stages:
        name = whole_stage(stage).range_name
        whole = sum(e.time_range.elapsed_us() for e in events if e.name == name) / 1e6
        parts = (stage, "recompute") if stage == "backward" else (stage,)
        busy = sum(row.seconds for row in found if row.stage in parts)
        if whole > busy:
            yield ProfileRow(
                stage=stage, layer="idle", kernel="idle", seconds=whole - busy, calls=0, flops=0
            )


def event_flops(event: Event) -> int:
    """Floating-point operations of one event by its shapes: of products and of attention.

    By the formulas of torch.utils.flop_counter; the grouped product, (S, K) by (experts, K, N) or
    (K, S) by (S, N), has none there: it takes ``2 S K N``.
    """
    shapes = [tuple(shape) for shape in event.input_shapes]
    parent = event.cpu_parent
    if not shapes or (parent is not None and parent.name in GROUPED_PRODUCTS):
        return 0  # on a CPU the grouped product is made of plain ones
    if event.name in GROUPED_PRODUCTS:
        return int(2 * shapes[0][0] * shapes[0][1] * shapes[1][-1])
    if event.name.startswith(ATTENTION) and "math" not in event.name:  # that is made of others
        # Heads of examples that share keys and values each take their own products.
        heads = max(shape[1] for shape in shapes if len(shape) == 4)
        whole = [(s[0], heads, *s[2:]) if len(s) == 4 else s for s in shapes]
        is_backward = event.name.endswith("_backward")
        return int(sdpa_backward_flop(*whole[:4]) if is_backward else sdpa_flop(*whole[:3]))
    if event.name not in PRODUCTS_OF_SHAPES:
        return 0  # a convolution's formula needs more than shapes; Mamba's is a small one
    formula = flop_registry[getattr(torch.ops.aten, event.name.removeprefix("aten::"))]
    return int(formula(*shapes, out_val=None))


def expert_load(tuning: FineTuning, tokens: torch.Tensor, training_steps: int) -> ExpertLoad | None:
    """Tokens of each expert at the first weights, and after so many steps on other batches."""
    if not any(expert_modules(tuning.model)):
        return None
    tuning.start_over()
    before = _expert_counts(tuning, tokens)
    examples = tokens.shape[0]
    for draw in range(1, training_steps + 1):
        tuning.step(tuning.tokens(examples, draw))
    after = _expert_counts(tuning, tokens)
    return ExpertLoad(examples=examples, training_steps=training_steps, before=before, after=after)


def _expert_counts(tuning: FineTuning, tokens: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """How many tokens each expert is given, (layers, experts)."""
    counts: list[tuple[int, ...]] = []

    def count(module: Any, inputs: tuple[Any, ...]) -> None:
        experts = len(module.each) if isinstance(module, LoopedExperts) else module.num_experts
        chosen = inputs[1].flatten()
        counts.append(tuple(torch.bincount(chosen, minlength=experts).tolist()))

    with ExitStack() as hooks:
        for _, module in expert_modules(tuning.model):
            hooks.callback(module.register_forward_pre_hook(count).remove)
        tuning.look(tokens)
    return tuple(counts)
