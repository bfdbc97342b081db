"""Experts as separate linear layers: what 4-bit weights and LoRA need.

transformers keeps the experts of a layer as fused three-dimensional parameters. bitsandbytes does
not quantise those and LoRA on linear modules does not see them, so they are taken apart here. The
names end in ``_linear`` because PEFT rewrites the usual ones (``gate``, ``w1``, ``gate_proj``, …)
of mixture-of-experts models to the fused parameters that are no longer there.
"""

import torch
from torch import nn


class GatedExpert(nn.Module):
    """One expert: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_linear = nn.Linear(hidden_size, width, bias=False)
        self.up_linear = nn.Linear(hidden_size, width, bias=False)
        self.down_linear = nn.Linear(width, hidden_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (n, hidden) to tokens (n, hidden)."""
        gated = nn.functional.silu(self.gate_linear(tokens)) * self.up_linear(tokens)
        return self.down_linear(gated)  # type: ignore[no-any-return]


class LoopedExperts(nn.Module):
    """A router and a loop over its experts, as the paper ran it.

    Equal to transformers' ``MixtralSparseMoeBlock`` on the same weights: softmax over all experts
    in fp32, the best ``active_experts`` taken, their weights scaled to sum to one.
    """

    def __init__(self, hidden_size: int, width: int, experts: int, active_experts: int) -> None:
        super().__init__()
        self.active_experts = active_experts
        self.router_linear = nn.Linear(hidden_size, experts, bias=False)
        self.experts = nn.ModuleList(GatedExpert(hidden_size, width) for _ in range(experts))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states (batch, length, hidden) to the same shape."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = self.router_linear(tokens).float().softmax(dim=-1)
        weights, chosen = scores.topk(self.active_experts, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            share = expert(tokens[token]) * weights[token, slot, None]
            mixed.index_add_(0, token, share.to(mixed.dtype))
        return mixed.view_as(hidden_states)
