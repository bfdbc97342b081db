"""Optimizer steps: trained weights, optimizer state, fp16 and offloading."""

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from trials.recipes.fields import Optimizer
from trials.recipes.recipe import Recipe
from trials.training.optimizers import construction
from trials.training.optimizers.construction import make_stepper
from trials.training.optimizers.deepspeed_stepper import offload_config
from trials.training.optimizers.stepper import DeviceStepper, SkippedStepError
from trials.training.recipe_check import OPTIMIZER_CLASSES, RecipeError

pytestmark = pytest.mark.usefixtures("made_for_small_steps")

CPU = torch.device("cpu")


class Frozen(nn.Module):
    """A trained layer on top of a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(64, 128)
        self.trained = nn.Linear(128, 64)
        self.frozen.requires_grad_(False)  # noqa: FBT003 - torch's own signature

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        trained: torch.Tensor = self.trained(self.frozen(inputs))
        return trained


def loss_of(model: nn.Module) -> torch.Tensor:
    """A loss that depends on the weights only."""
    inputs = torch.ones(4, 64)
    output: torch.Tensor = model(inputs)
    return output.float().square().mean()


def recipe(optimizer: Optimizer = "adamw", **fields: object) -> Recipe:
    """Full fine-tuning with this optimizer."""
    return Recipe.model_validate(
        {"method": "full", "precision": "fp32", "optimizer": optimizer} | fields
    )


STATE = {
    "adamw": {torch.float32},
    "adamw_8bit": {torch.uint8, torch.float32},
    "adafactor": {torch.float32},
    "sgd": set(),
    "muon": {torch.float32},
}


@pytest.mark.parametrize("optimizer", STATE)
def test_a_step_changes_trained_weights_only(optimizer: Optimizer) -> None:
    """The requested optimizer runs, with the state that is typical of it."""
    model = Frozen()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(optimizer), CPU)
    losses = [stepper.step(loss_of) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"trained.weight", "trained.bias"}
    assert stepper.name == OPTIMIZER_CLASSES[optimizer]
    state = stepper.optimizer.state[model.trained.weight]
    dtypes = {v.dtype for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1}
    assert dtypes == STATE[optimizer]


def test_8_bit_state_takes_a_quarter_of_the_memory() -> None:
    """Two numbers per weight take a byte instead of four each, plus the scales."""
    sizes = {}
    for optimizer in ("adamw", "adamw_8bit"):
        model = Frozen()
        stepper = make_stepper(model, [model.trained.weight], recipe(optimizer), CPU)  # type: ignore[list-item] # torch types a layer's weight as Tensor
        stepper.step(loss_of)
        state = stepper.optimizer.state[model.trained.weight]
        whole = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() == 2]
        sizes[optimizer] = sum(v.numel() * v.element_size() for v in whole)
    assert sizes["adamw"] == 4 * sizes["adamw_8bit"] == 8 * 64 * 128


def test_fp16_trains_from_the_first_step_on() -> None:
    """No step is skipped for overflow: optimizer state exists when memory is counted."""
    model = Frozen()
    model.frozen.half()
    before = model.trained.weight.detach().clone()
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(precision="fp16"), CPU)
    losses = []
    model.trained.register_forward_hook(lambda *args: losses.append(args[2].dtype))
    stepper.step(loss_of)
    assert losses == [torch.float16]
    assert not torch.equal(model.trained.weight, before)
    assert stepper.optimizer.state[model.trained.weight]["exp_avg"].dtype == torch.float32


def test_a_step_skipped_for_overflow_is_an_error() -> None:
    """A skipped step is fast and trains nothing, and the loss would not show it."""
    model = Frozen()
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(precision="fp16"), CPU)
    with pytest.raises(SkippedStepError, match=r"overflowed in fp16 at loss scale 1024 .*bf16"):
        stepper.step(lambda m: loss_of(m) * 1e7)


def test_a_state_resumes_at_its_loss_scale() -> None:
    """At the initial scale, fp16 would skip steps that an uninterrupted run takes."""
    before, after = (
        make_stepper(model, list(model.trained.parameters()), recipe(precision="fp16"), CPU)
        for model in (Frozen(), Frozen())
    )
    before.step(loss_of)
    with pytest.raises(SkippedStepError, match="at loss scale 1024 "):
        before.step(lambda m: loss_of(m) * 1e7)
    after.load_state_dict(before.state_dict())
    with pytest.raises(SkippedStepError, match="at loss scale 512 "):
        after.step(lambda m: loss_of(m) * 1e7)


def test_a_loss_that_is_no_number_is_returned_in_fp16_too() -> None:
    """The caller refuses it, in any precision."""
    model = Frozen()
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(precision="fp16"), CPU)
    assert stepper.step(lambda m: loss_of(m) * float("inf")) == float("inf")


@pytest.mark.parametrize("optimizer", STATE)
def test_training_restarts_identically(optimizer: Optimizer) -> None:
    """From the same weights, a second stepper makes the same losses and weights."""
    model = Frozen()
    trainable = list(model.trained.parameters())
    initial = [p.detach().clone() for p in trainable]
    runs = []
    for _ in range(2):
        with torch.no_grad():
            for parameter, first in zip(trainable, initial, strict=True):
                parameter.copy_(first)
        stepper = make_stepper(model, trainable, recipe(optimizer), CPU)
        losses = [stepper.step(loss_of) for _ in range(3)]
        stepper.close()
        runs.append((losses, model.trained.weight.detach().clone()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_paged_optimizer_is_refused_where_nothing_is_paged() -> None:
    """On a CPU, bitsandbytes would continue unpaged under the same class name."""
    model = Frozen()
    with pytest.raises(RecipeError, match=r"paged_adamw_8bit needs a CUDA GPU.*use adamw_8bit"):
        make_stepper(model, list(model.trained.parameters()), recipe("paged_adamw_8bit"), CPU)


class Pages:
    """The record of managed memory that bitsandbytes keeps."""

    def __init__(self) -> None:
        self.paged_tensors: list[Any] = []


class PagedOptimizer:
    """An optimizer that takes state like bitsandbytes: paged when large, and never freed."""

    def __init__(self, pages: Pages, parameter: torch.Tensor) -> None:
        self.page_mng = pages
        self.parameter = parameter
        self.state: dict[Any, dict[str, Any]] = {}

    def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        buffer: Any = torch.zeros_like(p, dtype=dtype)
        if p.numel() >= 100_000:
            buffer.is_paged = True
            self.page_mng.paged_tensors.append(buffer)
        return buffer  # type: ignore[no-any-return] # Any, for its mark

    def take_state(self) -> None:
        self.state[self.parameter] = {
            "step": 0,
            "state1": self.get_state_buffer(self.parameter, torch.uint8),
            "state2": self.get_state_buffer(self.parameter, torch.uint8),
        }


def test_paged_state_is_taken_once_however_often_training_starts_over() -> None:
    """Managed memory is never freed: the state of a closed optimizer is cleared and reused."""
    pages, parameter = Pages(), torch.zeros(512, 512)
    states = []
    for _ in range(3):
        made: Any = PagedOptimizer(pages, parameter)
        construction._page_again(made, lambda buffer, value: buffer.fill_(value))
        made.take_state()
        one, two = made.state[parameter]["state1"], made.state[parameter]["state2"]
        assert not one.any()
        assert one is not two
        one.fill_(7)
        states.append({id(one), id(two)})
        DeviceStepper(nn.Linear(1, 1), made, recipe("paged_adamw_8bit"), CPU).close()
    assert states[0] == states[1] == states[2]
    assert len(pages.paged_tensors) == 2


def test_paged_state_of_another_size_or_in_use_is_not_reused() -> None:
    """Only state of the same size without an owner is reused."""
    pages = Pages()
    for side in (512, 512, 640):
        made: Any = PagedOptimizer(pages, torch.zeros(side, side))
        construction._page_again(made, lambda buffer, value: buffer.fill_(value))
        made.take_state()
    assert len(pages.paged_tensors) == 6


def test_a_closed_stepper_frees_its_state() -> None:
    """The next probe's optimizer starts without state."""
    model = Frozen()
    stepper = make_stepper(model, list(model.trained.parameters()), recipe(), CPU)
    stepper.step(loss_of)
    stepper.close()
    assert not stepper.optimizer.state


def test_offloading_without_deepspeed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    model = Frozen()
    with pytest.raises(ImportError, match=r"DeepSpeed is not installed.*extra"):
        make_stepper(model, list(model.parameters()), recipe(offload_optimizer=True), CPU)


class HostOptimizer:
    """A stand-in for the optimizer that updates on the host."""


class Zero:
    """A stand-in for DeepSpeed's wrapper of it."""

    def __init__(self) -> None:
        self.optimizer = HostOptimizer()


class Engine:
    """An engine that hooks itself onto a model like DeepSpeed's, and stays there when destroyed."""

    def __init__(self, model: nn.Module, trained: list[nn.Parameter], config: object) -> None:
        self.model, self.config, self.destroyed = model, config, False
        self.calls: list[str] = []
        self.itself = self  # only the garbage collector ends it
        model.register_forward_pre_hook(lambda *_: self.calls.append("hook"))
        model.register_forward_hook(lambda *_: self.calls.append("hook"))
        for parameter in trained:
            parameter._zero_optimizer = self  # type: ignore[attr-defined] # as DeepSpeed does

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append("forward")
        output: torch.Tensor = self.model(inputs)
        return output

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        self.calls.append("backward")
        loss.backward()  # type: ignore[no-untyped-call] # torch types it not

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:  # noqa: FBT001 - DeepSpeed's
        self.calls.append("last" if is_boundary else "earlier")

    def step(self) -> None:
        self.calls.append("step")

    def destroy(self) -> None:
        self.destroyed = True


class FakeDeepSpeed(ModuleType):
    """A module that remembers its engines as long as others hold them."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.ops = ModuleType("deepspeed.ops")
        self.engines: list[weakref.ref[Engine]] = []
        self.groups: list[dict[str, Any]] = []

    def init_distributed(self, **how: Any) -> None:
        self.groups.append(how)

    def initialize(
        self, *, model: nn.Module, model_parameters: list[nn.Parameter], config: object
    ) -> tuple[Any, ...]:
        engine = Engine(model, model_parameters, config)
        self.engines.append(weakref.ref(engine))
        return engine, Zero(), None, None


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDeepSpeed]:
    """Replace the package in this process; garbage is collected only on request."""
    fake = FakeDeepSpeed()
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that what is set is put back
    # A test before in this process may have traced fake ranks, whose group stays.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    gc.disable()
    yield fake
    gc.enable()


def test_offloaded_steps_go_through_the_engine(deepspeed: FakeDeepSpeed) -> None:
    """The group has one process; the engine gets the recipe and the trained weights."""
    model = Frozen()
    trainable = list(model.trained.parameters())
    stepper = make_stepper(model, trainable, recipe(offload_optimizer=True), CPU)
    assert stepper.step(loss_of) == pytest.approx(loss_of(model).item())
    engine = deepspeed.engines[0]()
    assert engine is not None
    calls = [call for call in engine.calls if call != "hook"]
    assert calls == ["last", "forward", "backward", "step"]
    assert engine.config == offload_config(recipe(offload_optimizer=True), 64 * 128 + 64)
    assert stepper.name.endswith("HostOptimizer")
    (group,) = deepspeed.groups
    assert (group["rank"], group["world_size"], group["auto_mpi_discovery"]) == (0, 1, False)
    assert group["init_method"].startswith("tcp://127.0.0.1:")


def test_an_offloaded_step_updates_after_its_last_micro_batch(deepspeed: FakeDeepSpeed) -> None:
    """Under an effective batch the number of micro-batches depends on their size."""
    model = Frozen()
    accumulating = recipe(offload_optimizer=True, effective_batch=8)
    stepper = make_stepper(model, list(model.trained.parameters()), accumulating, CPU)
    for count in (3, 1):
        stepper.step(*[loss_of] * count)
    engine = deepspeed.engines[0]()
    assert engine is not None
    marks = [call for call in engine.calls if call in {"earlier", "last", "step"}]
    assert marks == ["earlier", "earlier", "last", "step", "last", "step"]
    assert offload_config(accumulating, 1000)["gradient_accumulation_steps"] == 8


def test_a_closed_engine_is_freed(deepspeed: FakeDeepSpeed) -> None:
    """Each restart would otherwise keep a copy of all trained weights; other hooks stay."""
    model = Frozen()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("mine"))
    model.trained.weight.mark = "mine"  # type: ignore[attr-defined] # anything may hang there
    trainable = list(model.trained.parameters())
    for _ in range(3):
        stepper = make_stepper(model, trainable, recipe(offload_optimizer=True), CPU)
        stepper.step(loss_of)
        stepper.close()
    assert [engine() for engine in deepspeed.engines] == [None] * 3
    assert len(calls) == 3
    assert vars(model.trained.weight) == {"mark": "mine"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deepspeed_gets_the_recipe(precision: str) -> None:
    """The optimizer on the host, its learning rate and the precision."""
    config = offload_config(recipe(precision=precision, offload_optimizer=True), 1000)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"]["lr"] == 5e-5
    assert config["bf16"]["enabled"] is (precision == "bf16")
    assert config["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("trained_parameters", "elements"), [(1000, 1000), (7_000_000_000, 500_000_000)]
)
def test_no_buffer_is_larger_than_all_trained_weights(
    trained_parameters: int, elements: int
) -> None:
    """DeepSpeed's default is the other upper limit."""
    config = offload_config(recipe(offload_optimizer=True), trained_parameters)
    assert config["zero_optimization"]["reduce_bucket_size"] == elements
