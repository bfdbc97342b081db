"""The training code: that it computes what it should, trains what the recipe says, and only that.

The models are built for real, at 8 to 32 tokens.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from observations import cpu, recipe, tiny_cell
from torch import nn
from torch_process import small_steps
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from trials import worker
from trials.devices.cpu import CpuDevice
from trials.finetune import FineTuning, NotTrainingError
from trials.models.experts import LoopedExperts
from trials.models.preset import preset_by_name
from trials.observation import Outcome
from trials.probe import Ready, Refused, Setup
from trials.worker import Line, RecipeError, Worker, serve
from trials.workload import Cell, Method

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

ENOUGH = 2**40
HIDDEN, WIDTH, EXPERTS = 16, 24, 8


@pytest.fixture(scope="module", autouse=True)
def made_for_small_steps() -> Iterator[None]:
    """All of this file."""
    with small_steps():
        yield


def tuning_of(cell: Cell) -> FineTuning:
    """A cell of a preset, built."""
    return FineTuning(cell, preset_by_name(cell.model), seed=0)


def tuning(
    model: str = "llama-tiny",
    method: Method = "full",
    *,
    active: int | None = None,
    seq_len: int = 8,
    **fields: object,
) -> FineTuning:
    """A preset under a recipe, built."""
    of = recipe(method, **fields)  # type: ignore[arg-type]
    return tuning_of(tiny_cell(model, of, active=active, seq_len=seq_len))


def moe_pair(active: int) -> tuple[LoopedExperts, MixtralSparseMoeBlock]:
    """Our experts and those of transformers, on the same random weights."""
    torch.manual_seed(0)
    ours = LoopedExperts(HIDDEN, WIDTH, EXPERTS, active)
    theirs = MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_local_experts=EXPERTS,
            num_experts_per_tok=active,
        )
    )
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router_linear.weight)
        for index, expert in enumerate(ours.experts):
            gate_and_up = torch.cat([expert.gate_linear.weight, expert.up_linear.weight])
            theirs.experts.gate_up_proj[index].copy_(gate_and_up)
            theirs.experts.down_proj[index].copy_(expert.down_linear.weight)
    return ours, theirs


@pytest.mark.parametrize("active", [2, EXPERTS], ids=["sparse", "dense"])
def test_looped_experts_equal_those_of_transformers(active: int) -> None:
    """Outputs, and the gradients of the input, the router and every expert's three matrices."""
    ours, theirs = moe_pair(active)
    inputs = [torch.randn(3, 5, HIDDEN).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    direction = torch.randn(3, 5, HIDDEN)  # the gradient that comes in, different everywhere
    outputs = [block(x) for block, x in zip((ours, theirs), inputs, strict=True)]
    for output in outputs:
        output.backward(direction)

    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(ours.router_linear.weight.grad, theirs.gate.weight.grad)
    for index, expert in enumerate(ours.experts):
        gate, up = theirs.experts.gate_up_proj.grad[index].chunk(2)
        torch.testing.assert_close(expert.gate_linear.weight.grad, gate)
        torch.testing.assert_close(expert.up_linear.weight.grad, up)
        down = theirs.experts.down_proj.grad[index]
        torch.testing.assert_close(expert.down_linear.weight.grad, down)


def test_an_expert_no_token_is_routed_to_takes_no_part() -> None:
    """One token to two of eight experts leaves six without a gradient."""
    ours, _ = moe_pair(active=2)
    ours(torch.randn(1, 1, HIDDEN)).sum().backward()
    routed = [expert.down_linear.weight.grad is not None for expert in ours.experts]
    assert routed.count(True) == 2


@pytest.mark.parametrize(
    ("model", "active"),
    [
        ("llama-tiny", None),
        ("mixtral-tiny", 2),
        ("mixtral-tiny", EXPERTS),
        ("blackmamba-tiny", 2),
        ("blackmamba-tiny", EXPERTS),
    ],
)
def test_the_loss_falls_when_one_batch_is_learnt_by_heart(model: str, active: int | None) -> None:
    """Ten large steps on the same tokens take at least a nat off, from guessing at the start."""
    trained = tuning(model, active=active)
    for group in trained.optimizer.param_groups:
        group["lr"] = 1e-2
    batch = trained.tokens(2)
    losses = [trained.step(batch) for _ in range(10)]
    guessing = torch.tensor(1024.0).log().item()
    assert losses[0] == pytest.approx(guessing, abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_starting_over_is_like_a_fresh_process() -> None:
    """Weights, optimizer and tokens are as at first, so the losses are the same to the last bit."""
    one = tuning()
    losses = [one.step(one.tokens(2)) for _ in range(3)]
    one.start_over()
    again = [one.step(one.tokens(2)) for _ in range(3)]
    other = tuning()
    fresh = [other.step(other.tokens(2)) for _ in range(3)]
    assert losses == again == fresh
    assert losses[0] > losses[2]


def test_tokens_are_full_queries_of_the_vocabulary() -> None:
    """Every query has the cell's length; batch sizes differ in their tokens, runs do not."""
    one = tuning(seq_len=8)
    tokens = one.tokens(3)
    assert tokens.shape == (3, 8)
    assert 0 <= int(tokens.min()) < int(tokens.max()) < 1024
    assert torch.equal(tokens, one.tokens(3))
    assert not torch.equal(tokens[:2], one.tokens(2))


def test_a_step_has_the_gradients_of_its_own_batch_alone() -> None:
    """At the same weights the same batch has the same gradients, whatever step came before."""
    trained = tuning()
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    gradients = []
    for _ in range(2):
        trained.step(trained.tokens(2))
        gradients.append([p.grad.clone() for p in trained.trainable if p.grad is not None])
    assert len(gradients[0]) == len(trained.trainable)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class AlwaysLoses(nn.Module):
    """A model whose loss is what it is told."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self._loss = loss

    def forward(self, **_unused: object) -> SimpleNamespace:
        return SimpleNamespace(loss=self.weight * self._loss)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_an_error(loss: float) -> None:
    """A step that trains nothing must not pass for a fast one."""
    broken = tuning()
    broken.model = AlwaysLoses(loss)
    with pytest.raises(NotTrainingError, match=f"the loss is {loss}: these steps train nothing"):
        broken.step(broken.tokens(1))


def four_bit_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights bitsandbytes holds quantised, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if getattr(parameter, "quant_state", None) is not None
    }


def test_qlora_weights_are_stored_in_4_bits() -> None:
    """Every linear layer but the head is NF4, doubly quantised, at half a byte a weight."""
    import bitsandbytes.functional as bnb  # noqa: PLC0415 - seconds that only this test needs

    plain = dict(tuning("llama-tiny").model.named_parameters())
    quantised = tuning("llama-tiny", "qlora")
    four_bit = four_bit_weights(quantised.model)
    linears = {name for name in plain if "_proj" in name}
    bare = {name.removeprefix("base_model.model.").replace(".base_layer", "") for name in four_bit}
    assert bare == linears
    for name, weight in four_bit.items():
        original = plain[name.removeprefix("base_model.model.").replace(".base_layer", "")]
        assert (weight.quant_state.quant_type, weight.quant_state.nested) == ("nf4", True)
        assert weight.untyped_storage().nbytes() * 2 == original.numel()
        restored = bnb.dequantize_4bit(weight.data, weight.quant_state).detach()
        # Sixteen levels to a block of 64 weights, and levels near the weights they stand for.
        assert all(len(block.unique()) <= 16 for block in restored.view(-1, 64)[:50])
        error = (restored - original.detach()).norm() / original.detach().norm()
        assert 0.01 < float(error) < 0.15


def test_qlora_takes_less_memory_than_lora_by_what_4_bits_save() -> None:
    """From four bytes a weight to half of one and the constants: 1/64 byte in a block's scale."""
    sizes = {}
    for method in ("lora", "qlora"):
        built = tuning("llama-tiny", method)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in built.tensors()}
        sizes[method] = sum(storage.nbytes() for storage in storages.values())
        weights = built.parameters().four_bit
    saved = sizes["lora"] - sizes["qlora"]
    # Each layer's code books and offset, 256 + 16 levels in fp32, tell at this size.
    constants = len(four_bit_weights(built.model)) * (256 + 16 + 64) * 4
    assert 3.5 * weights > saved > (3.5 - 1 / 32) * weights - constants


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("model", ["llama-tiny", "mixtral-tiny"])
def test_adapters_learn_and_frozen_weights_stay(
    model: str,
    method: Method,
    checkpointed: bool,  # noqa: FBT001
) -> None:
    """Two steps move every adapter (the first B, the second A) and not one bit beside them."""
    # All experts are active: one that no token reaches would rightly stay as it was.
    active = EXPERTS if model == "mixtral-tiny" else None
    trained = tuning(model, method, active=active, gradient_checkpointing=checkpointed)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    for _ in range(2):
        trained.step(trained.tokens(2))
    changed = {
        name for name, p in trained.model.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}
    assert changed == {name for name, p in trained.model.named_parameters() if p.requires_grad}


def test_full_fine_tuning_moves_every_weight() -> None:
    """Nothing is frozen by accident: embedding, head and norms move as well."""
    trained = tuning("llama-tiny")
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.step(trained.tokens(2))
    unmoved = [n for n, p in trained.model.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_everything_but_4_bit_weights_has_the_precision_of_the_recipe(method: Method) -> None:
    """PEFT would keep its adapters in fp32 if it were let."""
    model = tuning("llama-tiny", method, precision="bf16").model
    four_bit = four_bit_weights(model)
    dtypes = {p.dtype for name, p in model.named_parameters() if name not in four_bit}
    assert dtypes == {torch.bfloat16}
    assert bool(four_bit) is (method == "qlora")


def peak_and_losses(
    model: str, method: Method, *, gradient_checkpointing: bool
) -> tuple[int, list[float]]:
    """Counted peak memory of two steps, and their losses."""
    of = recipe(method, gradient_checkpointing=gradient_checkpointing)
    facts = preset_by_name(model)
    # The layer that is worked out again is live whole, so it takes two alike to save anything:
    # BlackMamba has one Mamba layer in two.
    layers = 4 if model == "blackmamba-tiny" else 2
    deeper = facts.architecture.model_copy(update={"layers": layers})
    preset = facts.model_copy(update={"architecture": deeper})
    trained = FineTuning(tiny_cell(model, of, seq_len=16), preset, seed=0)
    batch = trained.tokens(24)
    losses: list[float] = []
    peak = CpuDevice(cpu(ENOUGH), threads=1).peak_memory_bytes(
        lambda: losses.append(trained.step(batch)),
        steps=2,
        already_live=[*trained.tensors(), batch],
    )
    return peak, losses


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("mixtral-tiny", "full"),
        ("mixtral-tiny", "lora"),
        ("llama-tiny", "full"),
        ("blackmamba-tiny", "full"),
    ],
)
def test_checkpointing_takes_less_memory_and_trains_alike(model: str, method: Method) -> None:
    """Activations are worked out again in the backward pass, to the same losses."""
    plain_peak, plain_losses = peak_and_losses(model, method, gradient_checkpointing=False)
    peak, losses = peak_and_losses(model, method, gradient_checkpointing=True)
    assert peak < 0.9 * plain_peak
    assert losses == plain_losses


class UnfreezesTheHead(FineTuning):
    """Trains a layer that no adapter recipe trains."""

    def __init__(self, cell: Cell, preset: object, *, seed: int) -> None:
        super().__init__(cell, preset, seed=seed)  # type: ignore[arg-type]
        self.model.get_output_embeddings().weight.requires_grad_(True)  # type: ignore[operator] # noqa: FBT003


class LeavesAnAdapterOut(FineTuning):
    """Freezes one adapter, as a target name that matches nothing would."""

    def __init__(self, cell: Cell, preset: object, *, seed: int) -> None:
        super().__init__(cell, preset, seed=seed)  # type: ignore[arg-type]
        self.trainable[0].requires_grad_(False)  # noqa: FBT003


class QuantisesNothing(FineTuning):
    """Takes qlora for lora, as a quantiser that does not know the layers would."""

    def __init__(self, cell: Cell, preset: object, *, seed: int) -> None:
        plain = cell.model_copy(update={"recipe": recipe("lora")})
        super().__init__(plain, preset, seed=seed)  # type: ignore[arg-type]


class FewerLayers(FineTuning):
    """Builds another model than the one that was asked for."""

    def __init__(self, cell: Cell, preset: object, *, seed: int) -> None:
        del preset
        facts = preset_by_name(cell.model)
        smaller = facts.architecture.model_copy(update={"layers": 1})
        fewer = facts.model_copy(update={"architecture": smaller})
        super().__init__(cell, fewer, seed=seed)


def setup(method: Method) -> Setup:
    """llama-tiny under a recipe, to be built by a Worker."""
    return Setup(cell=tiny_cell(of=recipe(method), seq_len=8), gpu=cpu(), seed=0, threads=1)


@pytest.mark.parametrize(
    ("wrong", "method"),
    [
        (UnfreezesTheHead, "lora"),
        (LeavesAnAdapterOut, "qlora"),
        (QuantisesNothing, "qlora"),
        (FewerLayers, "full"),
    ],
)
def test_a_recipe_that_silently_did_something_else_is_refused(
    wrong: type[FineTuning], method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of the built model are held against the recipe's before anything is measured."""
    monkeypatch.setattr(worker, "FineTuning", wrong)
    with pytest.raises(RecipeError, match=f"{method}.* on llama-tiny implies total="):
        Worker(setup(method))


class Transcript(Line):
    """A line with nobody at the other end: hears nothing, keeps what is said."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def hear(self) -> str:
        return ""

    def say(self, message: object) -> None:
        self.said.append(message)


def test_a_child_whose_recipe_does_not_hold_says_why_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial hears one line, as an outcome that says nothing about memory."""
    monkeypatch.setattr(worker, "FineTuning", FewerLayers)
    line = Transcript()
    serve(setup("full"), line)
    (refused,) = line.said
    assert isinstance(refused, Refused)
    assert refused.outcome is Outcome.FAILED
    assert refused.detail.startswith("RecipeError: full-fp32 on llama-tiny implies")


def test_a_child_whose_recipe_holds_says_what_it_built() -> None:
    """The counts are in its first word, for the record."""
    line = Transcript()
    serve(setup("full"), line)
    (ready,) = line.said
    assert isinstance(ready, Ready)
    assert ready.parameters == preset_by_name("llama-tiny").parameters(recipe("full"))
