"""The child process: it checks its recipe before it measures, and reports what it built."""

from importlib import metadata

import pytest
import torch
from builders.observations import cpu, recipe, tiny_cell

from trials.recipes.fields import Method
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest, Ready, Refused, Setup
from trials.records.model import Model, find_model
from trials.records.observation import MemoryReading, Outcome
from trials.records.profile import ProfileRule
from trials.records.timing_rule import TimingRule
from trials.training import worker
from trials.training.finetune import FineTuning
from trials.training.recipe_check import RecipeError
from trials.training.serving.fork_loop import serve
from trials.training.serving.message_pipe import MessagePipe
from trials.training.worker import Worker

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class UnfreezesTheHead(FineTuning):
    """A model that trains a layer which no adapter recipe trains."""

    def __init__(
        self, cell: Cell, model: Model, *, device: torch.device, seed: int, rank: None
    ) -> None:
        super().__init__(cell, model, device=device, seed=seed, rank=rank)
        self.model.get_output_embeddings().weight.requires_grad_(True)  # type: ignore[operator] # noqa: FBT003


class LeavesAnAdapterOut(FineTuning):
    """A model that freezes one adapter, like a target name without a match."""

    def __init__(
        self, cell: Cell, model: Model, *, device: torch.device, seed: int, rank: None
    ) -> None:
        super().__init__(cell, model, device=device, seed=seed, rank=rank)
        self.trainable[0].requires_grad_(False)  # noqa: FBT003


class AnotherRecipe(FineTuning):
    """A model built with another recipe than the requested one."""

    instead: dict[str, object]

    def __init__(
        self, cell: Cell, model: Model, *, device: torch.device, seed: int, rank: None
    ) -> None:
        other = recipe(**(cell.recipe.model_dump(exclude_none=True) | self.instead))
        super().__init__(
            tiny_cell(cell.model, other, seq_len=8), model, device=device, seed=seed, rank=rank
        )
        self._cell = cell


class QuantisesNothing(AnotherRecipe):
    instead = {"method": "lora", "quantisation": None, "double_quantisation": None}  # noqa: RUF012 - a test's constant


class ForgetsToCheckpoint(AnotherRecipe):
    instead = {"gradient_checkpointing": False}  # noqa: RUF012 - as above


class FallsBackToEager(AnotherRecipe):
    instead = {"attention": "eager"}  # noqa: RUF012 - as above


class ForgetsToClip(AnotherRecipe):
    instead = {"max_grad_norm": None}  # noqa: RUF012 - as above


class TakesAnotherOptimizer(AnotherRecipe):
    instead = {"optimizer": "sgd"}  # noqa: RUF012 - as above

    def start_over(self) -> None:
        """Restart the other model."""


class FewerLayers(FineTuning):
    """A model with fewer layers than the requested one."""

    def __init__(
        self, cell: Cell, model: Model, *, device: torch.device, seed: int, rank: None
    ) -> None:
        fewer = model.model_copy(update={"config": model.config | {"num_hidden_layers": 1}})
        super().__init__(cell, fewer, device=device, seed=seed, rank=rank)
        self._facts = model


def setup(method: Method = "full", **fields: object) -> Setup:
    """llama-tiny with a recipe, for a Worker to build."""
    return Setup(
        cell=tiny_cell(recipe=recipe(method, **fields), seq_len=8),  # type: ignore[arg-type]
        model=find_model("llama-tiny"),
        gpu=cpu(),
        seed=0,
        threads=1,
    )


@pytest.mark.parametrize(
    ("wrong", "requested", "reason"),
    [
        (UnfreezesTheHead, setup("lora"), "trainable parameters: the recipe implies"),
        (LeavesAnAdapterOut, setup("qlora"), "trainable parameters: the recipe implies"),
        (QuantisesNothing, setup("qlora"), "four_bit parameters: the recipe implies [0-9]+, .* 0"),
        (FewerLayers, setup("full"), "total parameters: the recipe implies"),
        (
            ForgetsToCheckpoint,
            setup("full", gradient_checkpointing=True),
            "checkpointed layers: the recipe implies 2, the built model has 0",
        ),
        (
            FallsBackToEager,
            setup("full", attention="sdpa"),
            "attention: the recipe implies sdpa, the built model has eager",
        ),
        (
            ForgetsToClip,
            setup("lora", dora=True, max_grad_norm=1.0),
            "norm of the gradients: the recipe implies True, the built model has False",
        ),
        (
            TakesAnotherOptimizer,
            setup("full"),
            "optimizer: the recipe implies torch.optim.adamw.AdamW, the built model has .*SGD",
        ),
    ],
)
def test_a_recipe_that_silently_did_something_else_is_refused(
    wrong: type[FineTuning], requested: Setup, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built model is compared with the recipe before any measurement."""
    monkeypatch.setattr(worker, "FineTuning", wrong)
    with pytest.raises(RecipeError, match=f"on llama-tiny did not take hold: .*{reason}"):
        Worker(requested)


class Transcript(MessagePipe):
    """A pipe without a trial: it receives nothing and keeps its messages."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def receive(self) -> str:
        return ""

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_a_child_with_a_wrong_model_reports_the_reason_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial gets one line, as an outcome that is no verdict about memory."""
    monkeypatch.setattr(worker, "FineTuning", FewerLayers)
    pipe = Transcript()
    serve(setup("full"), pipe, Worker)
    (refused,) = pipe.sent
    assert isinstance(refused, Refused)
    assert refused.outcome is Outcome.FAILED
    assert refused.detail.startswith("RecipeError: full-fp32")


def test_a_child_with_a_correct_model_reports_its_environment() -> None:
    """Its first message has the stack and the memory limit."""
    pipe = Transcript()
    serve(setup("full"), pipe, Worker)
    (ready,) = pipe.sent
    assert isinstance(ready, Ready)
    assert ready.memory_limit_bytes == cpu().usable_memory_bytes
    assert dict(ready.environment.versions)["torch"] == metadata.version("torch")


def test_a_memory_cap_simulates_a_smaller_device() -> None:
    """A batch that fits without a cap is out of memory under one of 6 MiB."""
    capped = setup("full").model_copy(update={"memory_cap_bytes": 6 * 2**20})
    request = ProbeRequest(batch_size=64, timing=None)
    assert Worker(setup("full")).probe(request).outcome is Outcome.FITS
    pipe = Transcript()
    pipe.receive = iter([request.model_dump_json(), ""]).__next__  # type: ignore[method-assign]
    serve(capped, pipe, Worker)
    ready, reply = pipe.sent
    assert ready.memory_limit_bytes == 6 * 2**20  # type: ignore[attr-defined]
    assert reply.outcome is Outcome.OUT_OF_MEMORY  # type: ignore[attr-defined]


def test_a_model_beyond_the_budget_of_a_cpu_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven billion parameters against 48 MiB take neither the memory nor the time of a build."""
    monkeypatch.setattr(worker, "FineTuning", None)
    large = Setup(
        cell=tiny_cell("llama-2-7b", recipe("qlora"), seq_len=8),
        model=find_model("llama-2-7b"),
        gpu=cpu(48 * 2**20),
        seed=0,
        threads=1,
    )
    pipe = Transcript()
    serve(large, pipe, Worker)
    (refused,) = pipe.sent
    assert isinstance(refused, Refused)
    assert (refused.outcome, refused.final) == (Outcome.OUT_OF_MEMORY, False)
    assert "of a budget of 48 MiB: the model was not built" in refused.detail


def test_a_profile_comes_with_the_measurement_where_it_is_asked_for() -> None:
    """It has all stages of a step; another probe has none."""
    rule = ProfileRule(steps=1, least_seconds=0.0, warmup_steps=0, training_steps=1)
    asked = Worker(setup("full"))
    request = ProbeRequest(batch_size=1, timing=None, profile=rule)
    reply = asked.probe(request)
    assert reply.outcome is Outcome.FITS
    assert reply.profile is not None
    assert {row.stage for row in reply.profile.rows} >= {"forward", "backward", "optimizer"}
    assert asked.probe(request.model_copy(update={"profile": None})).profile is None


def test_steps_are_timed_after_a_warm_up_and_both_are_kept() -> None:
    """The measurement has raw durations of warm-up and timed steps, and the built model."""
    rule = TimingRule(warmup_steps=4, warmup_seconds=0.0, min_steps=6, max_steps=6, max_seconds=60)
    reply = Worker(setup("lora")).probe(ProbeRequest(batch_size=1, timing=rule))
    assert reply.measurement is not None
    assert len(reply.measurement.warmup_seconds) == 4
    assert len(reply.measurement.step_seconds) == 6
    assert reply.measurement.built.adapters == 14  # two layers of seven linear layers


def test_steps_with_allocator_retries_are_thrashing() -> None:
    """They ran, so they are measured, but the memory limit is too close for training."""
    one = Worker(setup("full"))
    real = one.device.measure_memory

    def retried(*args: object, **kwargs: object) -> MemoryReading:
        reading: MemoryReading = real(*args, **kwargs)  # type: ignore[arg-type]
        return reading.model_copy(update={"allocator_retries": 2})

    one.device.measure_memory = retried  # type: ignore[method-assign]
    reply = one.probe(ProbeRequest(batch_size=1, timing=TimingRule()))
    assert reply.outcome is Outcome.THRASHING
    assert reply.detail is not None
    assert "2 times in 3 steps" in reply.detail
    assert reply.measurement is not None
    assert reply.measurement.step_seconds == ()


def test_the_counted_peak_is_equal_in_two_workers() -> None:
    """Memory depends on the steps only, not on the process or its history."""
    request = ProbeRequest(batch_size=3, timing=None)
    one, two = Worker(setup("qlora")), Worker(setup("qlora"))
    two.probe(ProbeRequest(batch_size=7, timing=None))
    peaks = [w.probe(request).measurement for w in (one, two)]
    assert peaks[0] is not None
    assert peaks[0] == peaks[1]
