"""Losses of preference tasks from the logits of all tokens, beside their equations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trials.recipes.recipe import Recipe
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.losses import BETA, task_loss

TOKENS = torch.tensor([[1, 2, 3, 4], [4, 3, 1, 0], [2, 2, 0, 1], [0, 4, 4, 2]])


class Bigrams(nn.Module):
    """Language model of pairs of tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed))
        self.table = nn.Parameter(weights)

    def forward(self, input_ids: torch.Tensor) -> Any:
        """Logits of the next token, (sequences, length, 5)."""
        return SimpleNamespace(logits=self.table[input_ids])

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of sequences."""
        steps = self.table.log_softmax(-1)[tokens[:, :-1], tokens[:, 1:]]
        return steps.sum(1)


def loss(task: str, **fields: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Bigrams]:
    """Loss of a batch, and log-ratios of the batch and of the sequences beside it."""
    model, reference = Bigrams(0), Bigrams(1)
    recipe = Recipe.model_validate({"method": "full", "task": task, "loss": "full-logits"} | fields)
    batch = TaskBatch(TOKENS, TOKENS, reference)
    beside = TOKENS.roll(1, 0)
    ratios = [model.of(tokens) - reference.of(tokens) for tokens in (TOKENS, beside)]
    return task_loss(model, batch, recipe), ratios[0], ratios[1], model


def test_the_loss_of_dpo_is_its_equation() -> None:
    """The first half of the sequences are chosen; only the model has gradients."""
    value, ratios, _, model = loss("dpo")
    chosen, rejected = ratios.chunk(2)
    assert value.item() == pytest.approx(
        -torch.sigmoid(BETA * (chosen - rejected)).log().mean().item()
    )
    value.backward()
    assert model.table.grad is not None


def test_the_loss_of_kto_is_its_equation() -> None:
    """The sequences beside the examples estimate the distance from the reference."""
    value, ratios, beside, _ = loss("kto")
    distance = beside.mean().clamp(min=0)
    margins = torch.cat([ratios[:2] - distance, distance - ratios[2:]])
    assert value.item() == pytest.approx((1 - torch.sigmoid(BETA * margins)).mean().item())


def test_router_losses_are_refused_with_all_logits() -> None:
    """LLaMA-Factory's trainers leave them out."""
    with pytest.raises(ValueError, match="router_loss"):
        loss("dpo", router_loss=True)


class Values(Bigrams):
    """The same with a value of each token."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Logits, and the logarithm of a token's number as its value."""
        del attention_mask
        output = SimpleNamespace(logits=self.table[input_ids], values=input_ids.log1p())
        output.get = lambda name: getattr(output, name, None)
        return output


def test_a_reward_by_values_compares_the_last_tokens() -> None:
    """Padding at the end of a sequence is left out; the first half is chosen."""
    recipe = Recipe(method="full", task="reward", loss="full-logits")
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    values = torch.tensor([4.0, 1.0, 2.0, 2.0]).log1p()
    margins = values[:2] - values[2:]
    loss = task_loss(Values(0), TaskBatch(TOKENS, TOKENS, mask=mask), recipe)
    assert loss.item() == pytest.approx(-torch.sigmoid(margins).log().mean().item())
