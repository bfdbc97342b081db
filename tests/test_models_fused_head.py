"""Heads fused with the loss: the functions of liger-kernel and cut-cross-entropy, on fakes."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from trials.models.build import KernelError
from trials.models.fused_head import IGNORED, LIKELIEST, MODULES, fuse_head, loss_in_use
from trials.recipes.fields import Loss

TOKENS = torch.arange(12).reshape(2, 6)
LABELS = TOKENS.clone()
LABELS[0, :3] = IGNORED


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Cross entropy of labels that are shifted already."""
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight.T
    return functional.cross_entropy(logits, labels.reshape(-1), reduction=reduction)


class FakeLiger:
    """Has the signature of liger-kernel 0.8.5."""

    def LigerForCausalLMLoss(  # noqa: N802, PLR0917 - its own name and signature
        self,
        hidden_states: Tensor,
        lm_head_weight: Tensor,
        labels: Tensor,
        hidden_size: int,
        num_items_in_batch: Tensor,
        final_logit_softcapping: float | None,
    ) -> Tensor:
        assert final_logit_softcapping is None
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        hidden = hidden_states.view(-1, hidden_size)
        return plain_loss(hidden, lm_head_weight, shifted, "sum") / num_items_in_batch


class FakeCce:
    """Has the signature of cut-cross-entropy 25.1.1."""

    dtype: torch.dtype | None = None

    def linear_cross_entropy(
        self,
        e: Tensor,
        c: Tensor,
        targets: Tensor,
        ignore_index: int,
        softcap: None,
        *,
        shift: bool,
    ) -> Tensor:
        assert shift
        assert softcap is None
        assert ignore_index == IGNORED
        self.dtype = e.dtype
        return plain_loss(e[:, :-1].to(c.dtype), c, targets[:, 1:], "mean")


def llama(**fields: object) -> Any:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    kind = {"model_type": "llama"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind | sizes | heads | fields))


@pytest.mark.parametrize(("loss", "fake"), [("liger", FakeLiger()), ("cce", FakeCce())])
def test_a_fused_head_has_the_loss_and_gradients_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, fake: object
) -> None:
    """It hands hidden states, the head's weight and labels to the library's function."""
    monkeypatch.setitem(sys.modules, MODULES[loss], fake)
    stock, fused = llama(), llama()
    fuse_head(fused, loss)
    expected = stock(input_ids=TOKENS, labels=LABELS).loss
    actual = fused(input_ids=TOKENS, labels=LABELS, fused_lm_head=True).loss
    torch.testing.assert_close(actual, expected)
    expected.backward()
    actual.backward()
    for own, other in zip(fused.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    plain = fused(input_ids=TOKENS, labels=LABELS)
    assert plain.logits.shape == (2, 6, 32)


def test_cut_cross_entropy_gets_hidden_states_in_the_dtype_of_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backward pass takes no fp32."""
    fake = FakeCce()
    monkeypatch.setitem(sys.modules, MODULES["cce"], fake)
    model = llama()
    fuse_head(model, "cce")
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=TOKENS, labels=LABELS, fused_lm_head=True)
    assert fake.dtype == torch.bfloat16


@pytest.mark.parametrize("loss", ["liger", "cce"])
@pytest.mark.parametrize(
    "fields", [{"model_type": "granite", "logits_scaling": 8.0}, {"model_type": "phi"}]
)
def test_a_head_that_does_more_than_a_product_is_refused(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, fields: dict[str, object]
) -> None:
    """A scale or a bias would be lost."""
    monkeypatch.setitem(sys.modules, MODULES[loss], SimpleNamespace())
    with pytest.raises(KernelError, match="chunked"):
        fuse_head(llama(**fields), loss)


def test_the_loss_in_use_is_read_from_its_graph() -> None:
    """TRL's function by its name, the plain one by that of PyTorch's loss."""
    model: nn.Module = llama()
    assert loss_in_use(model(input_ids=TOKENS, labels=LABELS).loss) == "full-logits"
    fuse_head(model, "chunked")
    assert loss_in_use(model(input_ids=TOKENS, labels=LABELS, fused_lm_head=True).loss) == "chunked"
    assert loss_in_use(None) == "unknown"


@pytest.mark.parametrize("loss", ["dft", "eaft"])
def test_weighted_losses_are_their_equations(loss: Loss) -> None:
    """A token counts by its probability, or by the entropy of the likeliest tokens over three."""
    model = llama()
    logits = model(input_ids=TOKENS).logits[:, :-1].detach()
    log_probs = logits.log_softmax(-1)
    has_loss = LABELS[:, 1:] != IGNORED
    of_labels = log_probs.gather(2, LABELS[:, 1:].clamp(min=0)[..., None])[..., 0][has_loss]
    if loss == "dft":
        weights = of_labels.exp()
    else:
        likeliest = logits[has_loss].topk(LIKELIEST).values.log_softmax(-1)
        weights = -(likeliest.exp() * likeliest).sum(-1) / 3
    fuse_head(model, loss)
    value = model(input_ids=TOKENS, labels=LABELS, fused_lm_head=True).loss
    assert value.item() == pytest.approx((-of_labels * weights).mean().item())
    assert loss_in_use(value) == loss
    value.backward()
    assert model.get_output_embeddings().weight.grad.abs().sum() > 0
