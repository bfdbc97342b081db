"""Heads fused with the loss, which never hold the logits of all tokens.

A model with such a head returns its loss for ``fused_lm_head=True``, as TRL's does. Without that
argument its forward pass is its own.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput

from trials.models.build import KernelError
from trials.recipes.fields import WEIGHTED, Loss, Task

LIKELIEST = 20  # tokens whose entropy approximates that of all, for eaft
IGNORED = -100  # label of a token without a loss, as in transformers
MODULES: dict[Loss, str] = {
    "chunked": "trl.trainer.utils",
    "liger": "liger_kernel.transformers.model.loss_utils",
    "cce": "cut_cross_entropy",
}
"""Module of each fused loss; some take seconds to import."""
# Autograd functions of the losses: their names in the graph of a loss.
LOSS_NODES: dict[str, Loss] = {
    "NllLossBackward0": "full-logits",
    "ChunkedLogProbFunctionBackward": "chunked",
    "LigerFusedLinearCrossEntropyFunctionBackward": "liger",
    "LinearCrossEntropyFunctionBackward": "cce",
}
LOSS = "loss"  # key of a graph's own note of its loss, where no function of it names the loss
# Fields of configurations whose models scale their logits.
SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
# What TRL's trainers have their fused head compute for each token, the last for a reference.
TRAINED_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
    "orpo": (),
    "reward": (),
    "grpo": ("log_probs", "entropy"),
}
REFERENCE_OUTPUTS = ("log_probs",)


@dataclass
class HeadOutput(ModelOutput):  # type: ignore[misc]
    """Output of a model with a fused head.

    Attributes:
        loss: mean loss in nats per token.
        log_probs: log-probabilities of the labels, (batch, length - 1); absent from heads that
            compute the loss alone.
        aux_loss: load-balancing loss of the routers, if the model was asked for it; ``loss``
            includes it by the coefficient of the configuration.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


Weight = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Weights of chosen tokens, from their losses (n,), all logits (tokens, vocabulary) and indices."""
HeadLoss = Callable[[torch.Tensor, nn.Linear, torch.Tensor, float | None], HeadOutput]
"""Output from hidden states (batch, length, width), the head, labels (batch, length) and the cap on
the logits."""


def fuse_head(
    model: nn.Module, loss: Loss | None, outputs: tuple[str, ...] = TRAINED_OUTPUTS["sft"]
) -> None:
    """Give a model the fused head of a loss, in place; with ``full-logits`` it keeps its own.

    Args:
        model: causal language model, with or without adapters; or a reward model.
        loss: loss of the recipe; None for a reward model.
        outputs: what ``chunked`` computes for each token.

    Raises:
        ImportError: the package of the loss is not installed.
        KernelError: the loss does not support the model's head.
    """
    if loss is None or loss == "full-logits":
        return
    base = base_of(model)
    if loss in WEIGHTED:
        weight_tokens(base, loss)
        return
    check_adapters(base, loss)
    if loss == "chunked":
        importlib.import_module(MODULES[loss]).add_fused_lm_head(base, outputs=outputs)
        return
    check_head(base, loss)
    library = importlib.import_module(MODULES[loss])
    patch_head(base, functools.partial(_liger_loss if loss == "liger" else _cce_loss, library))


def base_of(model: nn.Module) -> nn.Module:
    """Model of transformers below its adapters, if any."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return base


def check_adapters(model: Any, loss: Loss) -> None:
    """Check that no adapter is on the head, whose bare weights every fused loss takes.

    Raises:
        KernelError: one is; TRL refuses it as well.
    """
    head = model.get_output_embeddings()
    if hasattr(head, "lora_A") or hasattr(head, "oft_R"):
        raise KernelError(
            f"loss {loss}: it takes the weights of the head past their adapter: use loss: "
            "full-logits, or modules_to_save in place of the adapter"
        )


def check_head(model: Any, loss: Loss) -> None:
    """Check that a loss that sees hidden states and weight alone is that of the model.

    Raises:
        KernelError: the model does more with its logits.
    """
    config = model.config.get_text_config()
    scale = next((name for name in SCALES if getattr(config, name, None) not in (None, 1.0)), None)
    biased = getattr(model.get_output_embeddings(), "bias", None) is not None
    if biased or scale is not None:
        reason = "its head has a bias" if biased else f"it scales its logits ({scale})"
        raise KernelError(
            f"loss {loss}: {type(model).__name__} cannot have it: {reason}: use chunked"
        )


def patch_head(model: Any, head_loss: HeadLoss) -> None:
    """Let a model without adapters compute its loss from hidden states, by ``head_loss``."""
    own = model.forward
    config = model.config.get_text_config()

    @functools.wraps(own)
    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return own(*args, **kwargs)
        labels = kwargs.pop("labels")
        outputs = model.base_model(*args, **kwargs)
        softcap = getattr(config, "final_logit_softcapping", None)
        head = model.get_output_embeddings()
        result = head_loss(outputs.last_hidden_state, head, labels, softcap)
        if kwargs.get("output_router_logits"):
            # Every family has Mixtral's.
            result.aux_loss = load_balancing_loss_func(
                outputs.router_logits,
                config.num_experts,
                config.num_experts_per_tok,
                kwargs.get("attention_mask"),
            )
            result.loss = result.loss + config.router_aux_loss_coef * result.aux_loss
        return result

    model.forward = forward


def weight_tokens(model: Any, loss: Loss) -> None:
    """Let a model without adapters compute a loss that weights tokens, from its own logits."""
    own, weight = model.forward, WEIGHTS[loss]

    @functools.wraps(own)
    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return own(*args, **kwargs)
        labels = kwargs.pop("labels")
        output = own(*args, **kwargs)
        if torch.is_autocast_enabled(labels.device.type):
            output.logits = output.logits.float()  # as accelerate returns them
        output.loss = _weighted_loss(output.logits.float(), labels, weight)
        output.loss.grad_fn.metadata[LOSS] = loss
        return output

    model.forward = forward


def _weighted_loss(logits: torch.Tensor, labels: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Mean over the tokens with a loss of their weighted losses, in nats.

    After ``_dft_cross_entropy`` and ``_eaft_cross_entropy`` of LLaMA-Factory 0.9
    (llamafactory/train/trainer_utils.py).

    Args:
        logits: (batch, length, vocabulary), in fp32.
        labels: (batch, length) token ids, -100 for tokens without a loss.
        weight: weights of tokens by their losses and logits.
    """
    shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)
    logits = logits.view(-1, logits.size(-1))
    losses = functional.cross_entropy(logits, shifted, ignore_index=IGNORED, reduction="none")
    has_loss = shifted != IGNORED
    # Their number without reading it from the device; where fewer have a loss, the last token,
    # which has none, stands for the others.
    most = labels.shape[0] * (labels.shape[1] - 1)
    chosen = has_loss.nonzero_static(size=most).squeeze(1)
    losses = losses[chosen]
    with torch.no_grad():
        weights = weight(losses, logits, chosen)
    return (losses * weights).sum() / has_loss.sum()


def _probabilities(
    losses: torch.Tensor, _logits: torch.Tensor, _chosen: torch.Tensor
) -> torch.Tensor:
    return torch.exp(-losses)


def _entropies(_losses: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    logits = logits[chosen].detach()
    likeliest, _ = torch.topk(logits, k=min(LIKELIEST, logits.shape[-1]), dim=-1)
    log_probs = likeliest - torch.logsumexp(likeliest, dim=-1, keepdim=True)
    entropies = -(torch.exp(log_probs) * log_probs).sum(dim=-1)
    return torch.pow(entropies / 3.0, 1.0)


WEIGHTS: dict[Loss, Weight] = {"dft": _probabilities, "eaft": _entropies}


def _liger_loss(
    library: Any, hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, softcap: float | None
) -> HeadOutput:
    """Loss as liger-kernel's models compute it for transformers' Trainer, which counts tokens."""
    loss: torch.Tensor = library.LigerForCausalLMLoss(
        hidden_states=hidden,
        lm_head_weight=head.weight,
        labels=labels,
        hidden_size=hidden.shape[-1],
        num_items_in_batch=(labels[:, 1:] != IGNORED).sum(),
        final_logit_softcapping=softcap,
    )
    return HeadOutput(loss=loss)


def _cce_loss(
    library: Any, hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, softcap: float | None
) -> HeadOutput:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # the kernels take no fp32 hidden states
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    loss: torch.Tensor = library.linear_cross_entropy(
        hidden, head.weight, labels, shift=True, softcap=softcap, ignore_index=IGNORED
    )
    return HeadOutput(loss=loss)


def loss_in_use(loss: torch.Tensor | None) -> str:
    """Function that computed a loss, as ``Recipe.loss`` names it, by its graph."""
    waiting = [] if loss is None else [loss.grad_fn]
    visited = set()
    while waiting:
        node: Any = waiting.pop(0)
        if node is None or node in visited:
            continue
        visited.add(node)
        if LOSS in node.metadata:
            return str(node.metadata[LOSS])
        if node.name() in LOSS_NODES:
            return LOSS_NODES[node.name()]
        waiting += [following for following, _ in node.next_functions]
    return "unknown"
