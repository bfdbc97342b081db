from types import SimpleNamespace

import pytest
import torch
from builders.observations import cpu, recipe, tiny_cell
from torch import nn

from trials.devices.cpu import CpuDevice
from trials.recipes.fields import Method
from trials.records.cell import Cell
from trials.records.model import Model, find_model
from trials.training.finetune import FineTuning, NotTrainingError

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ENOUGH = 2**40
CPU = torch.device("cpu")
ALL_EXPERTS = {"mixtral-tiny": 8, "blackmamba-tiny": 8, "qwen3-moe-tiny": 8, "olmoe-tiny": 16}


def tuning_of(cell: Cell, model: Model | None = None) -> FineTuning:
    """Build a cell of a preset."""
    return FineTuning(cell, model or find_model(cell.model), device=CPU, seed=0)


def tuning(
    model: str = "llama-tiny",
    method: Method = "full",
    *,
    active: int | None = None,
    seq_len: int = 8,
    **fields: object,
) -> FineTuning:
    """Build a preset with a recipe."""
    return tuning_of(
        tiny_cell(model, recipe(method, **fields), active=active, seq_len=seq_len)  # type: ignore[arg-type]
    )


def learns_fast(trained: FineTuning) -> None:
    """Make steps a hundred times as large."""
    for group in trained.stepper.optimizer.param_groups:
        group["lr"] = 1e-2


@pytest.mark.parametrize("model", ["llama-tiny", *ALL_EXPERTS])
def test_the_loss_falls_when_one_batch_is_learned_by_heart(model: str) -> None:
    """Ten large steps on the same tokens take at least a nat off the initial loss."""
    trained = tuning(model)
    learns_fast(trained)
    batch = trained.tokens(2)
    losses = [trained.step(batch) for _ in range(10)]
    guessing = torch.tensor(1024.0).log().item()
    assert losses[0] == pytest.approx(guessing, abs=0.5)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("method", ["full", "lora"])
def test_starting_over_is_like_a_fresh_process(method: Method) -> None:
    """Weights, optimizer, dropout and tokens restart: losses are equal to the last bit."""
    dropout = {"lora_dropout": 0.2} if method == "lora" else {}
    one = tuning(method=method, **dropout)
    one.start_over()
    losses = [one.step(one.tokens(2)) for _ in range(3)]
    one.start_over()
    again = [one.step(one.tokens(2)) for _ in range(3)]
    other = tuning(method=method, **dropout)
    other.start_over()
    fresh = [other.step(other.tokens(2)) for _ in range(3)]
    assert losses == again == fresh
    assert len(set(losses)) == 3


def test_tokens_are_full_examples_of_the_vocabulary() -> None:
    """Every example has the cell's length; tokens depend on batch size and draw, not on the run."""
    one = tuning(seq_len=8)
    tokens = one.tokens(3)
    assert tokens.shape == (3, 8)
    assert 0 <= int(tokens.min()) < int(tokens.max()) < 1024
    assert torch.equal(tokens, one.tokens(3))
    assert not torch.equal(tokens[:2], one.tokens(2))
    assert not torch.equal(tokens, one.tokens(3, draw=1))


def test_a_step_has_the_gradients_of_its_own_batch_alone() -> None:
    """Equal weights and batches give equal gradients, whatever the step before."""
    trained = tuning()
    for group in trained.stepper.optimizer.param_groups:
        group["lr"] = 0.0
    gradients = []
    for _ in range(2):
        trained.step(trained.tokens(2))
        gradients.append([p.grad.clone() for p in trained.trainable if p.grad is not None])
    assert len(gradients[0]) == len(trained.trainable)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


class AlwaysLoses(nn.Module):
    """A model with a given loss."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self._loss = loss

    def forward(self, **_unused: object) -> SimpleNamespace:
        return SimpleNamespace(loss=self.weight * self._loss)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_an_error(loss: float) -> None:
    """A step that trains nothing must not count as a fast one."""
    broken = tuning()
    broken.stepper._model = AlwaysLoses(loss)  # type: ignore[attr-defined]
    with pytest.raises(NotTrainingError, match=f"the loss is {loss}: these steps train nothing"):
        broken.step(broken.tokens(1))


def four_bit_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that bitsandbytes quantises, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if getattr(parameter, "quant_state", None) is not None
    }


def test_qlora_weights_are_stored_in_4_bits() -> None:
    """Every linear layer except the head is doubly quantised NF4, half a byte per weight."""
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
    """A weight takes half a byte instead of four; a block's constants add 1/64 byte per weight."""
    sizes = {}
    for method in ("lora", "qlora"):
        built = tuning("llama-tiny", method)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in built.tensors()}
        sizes[method] = sum(storage.nbytes() for storage in storages.values())
        weights = built.built().parameters.four_bit
    saved = sizes["lora"] - sizes["qlora"]
    # Each layer's code books and offset, 256 + 16 levels in fp32, tell at this size.
    constants = len(four_bit_weights(built.model)) * (256 + 16 + 64) * 4
    assert 3.5 * weights > saved > (3.5 - 1 / 32) * weights - constants


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("model", ["llama-tiny", "mixtral-tiny", "qwen3-moe-tiny", "olmoe-tiny"])
def test_adapters_learn_and_frozen_weights_stay(
    model: str,
    method: Method,
    checkpointed: bool,  # noqa: FBT001
) -> None:
    """Two steps change every adapter (first B, then A) and no bit of the other weights."""
    # All experts are active: one that no token reaches would rightly stay as it was.
    active = ALL_EXPERTS.get(model)
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
    """No weight is frozen by accident: embedding, head and norms change too."""
    trained = tuning("llama-tiny")
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.step(trained.tokens(2))
    unmoved = [n for n, p in trained.model.named_parameters() if torch.equal(p, before[n])]
    assert unmoved == []


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_everything_but_4_bit_weights_has_the_precision_of_the_recipe(method: Method) -> None:
    """PEFT would keep its adapters in fp32 by default."""
    model = tuning("llama-tiny", method, precision="bf16").model
    four_bit = four_bit_weights(model)
    dtypes = {p.dtype for name, p in model.named_parameters() if name not in four_bit}
    assert dtypes == {torch.bfloat16}
    assert bool(four_bit) is (method == "qlora")


def peak_and_losses(
    model: str, method: Method, *, gradient_checkpointing: bool
) -> tuple[int, list[float]]:
    """Return the counted peak memory of two steps, and their losses."""
    settings = recipe(method, gradient_checkpointing=gradient_checkpointing)
    # The layer that is worked out again is live whole, so it takes two alike to save anything:
    # BlackMamba has one Mamba layer in two.
    facts = find_model(model)
    layers = {"num_hidden_layers": 4 if model == "blackmamba-tiny" else 2}
    deeper = facts.model_copy(update={"config": facts.config | layers})
    trained = tuning_of(tiny_cell(model, settings, seq_len=16), deeper)
    batch = trained.tokens(24)
    losses: list[float] = []
    memory = CpuDevice(cpu(ENOUGH), threads=1).measure_memory(
        lambda: losses.append(trained.step(batch)),
        steps=2,
        already_live=[*trained.tensors(), batch],
    )
    return memory.peak_allocated_bytes, losses


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
    """The backward pass recomputes activations, and the losses are the same."""
    plain_peak, plain_losses = peak_and_losses(model, method, gradient_checkpointing=False)
    peak, losses = peak_and_losses(model, method, gradient_checkpointing=True)
    assert peak < 0.9 * plain_peak
    assert losses == plain_losses
