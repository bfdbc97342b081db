"""Evaluation of held-out examples: negative log-likelihood of the answers, and accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from trials.models.fused_head import IGNORED
from trials.models.reference import set_evaluating
from trials.models.weight_placement import autocast_to
from trials.recipes.fields import Dtype
from trials.records.learning import Heartbeat, HeldOutScores
from trials.training.learning_batches import Encoded, HeldOut, padded


@dataclass(frozen=True, slots=True)
class _Score:
    """Score of one answer.

    Attributes:
        nats: negative log-likelihood.
        tokens: number of tokens.
        exact: whether each token is the likeliest.
    """

    nats: float
    tokens: int
    exact: bool


def held_out_scores(
    model: nn.Module,
    examples: Sequence[HeldOut],
    batch_size: int,
    *,
    autocast: Dtype | None,
    listen: Callable[[Heartbeat], None],
) -> HeldOutScores:
    """Score every held-out example.

    Args:
        model: model to evaluate; it is in training mode before and after.
        examples: held-out examples with their answers.
        batch_size: answers per forward pass.
        autocast: dtype that autocast runs products in; None without autocast.
        listen: called with progress after each batch.
    """
    answers = [answer for example in examples for answer in example.answers]
    set_evaluating(model)
    try:
        scores = iter(_scores(model, answers, batch_size, autocast=autocast, listen=listen))
    finally:
        model.train()
    nats, tokens, correct = [], [], []
    for example in examples:
        choices = [next(scores) for _ in example.answers]
        nats.append(choices[example.right].nats)
        tokens.append(choices[example.right].tokens)
        correct.append(_is_correct(example, choices))
    return HeldOutScores(nats=tuple(nats), tokens=tuple(tokens), correct=tuple(correct))


def _scores(
    model: nn.Module,
    answers: Sequence[Encoded],
    batch_size: int,
    *,
    autocast: Dtype | None,
    listen: Callable[[Heartbeat], None],
) -> list[_Score]:
    """Scores of all answers, in their order; sequences of similar lengths share a batch."""
    order = sorted(range(len(answers)), key=lambda index: len(answers[index].ids))
    scores: dict[int, _Score] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        batch_scores = _batch_scores(model, [answers[at] for at in batch], autocast=autocast)
        scores |= zip(batch, batch_scores, strict=True)
        listen(Heartbeat(doing="testing", done=len(scores), total=len(answers)))
    return [scores[index] for index in range(len(answers))]


@torch.no_grad()
def _batch_scores(
    model: nn.Module, batch: Sequence[Encoded], *, autocast: Dtype | None
) -> list[_Score]:
    device = next(model.parameters()).device
    ids, labels = padded(batch)
    with autocast_to(autocast, device.type):
        logits = model(input_ids=ids.to(device)).logits[:, :-1]
    labels = labels[:, 1:].to(device)
    is_answer = labels != IGNORED
    # Logits of answers alone: those of whole prompts in fp32 would be the largest tensor by far.
    predicted, target = logits[is_answer].float(), labels[is_answer]
    nats = functional.cross_entropy(predicted, target, reduction="none").double()
    wrong = predicted.argmax(-1) != target
    counts = is_answer.sum(1).tolist()
    parts = zip(torch.split(nats, counts), torch.split(wrong, counts), strict=True)
    return [_Score(float(n.sum()), len(n), not bool(w.any())) for n, w in parts]


def _is_correct(example: HeldOut, scores: Sequence[_Score]) -> bool:
    """Whether the right choice is the likeliest; without choices, whether every token is.

    Greedy decoding generates an answer if and only if each of its tokens is the likeliest.
    """
    if len(scores) == 1:
        return scores[0].exact
    return min(range(len(scores)), key=lambda at: scores[at].nats) == example.right
