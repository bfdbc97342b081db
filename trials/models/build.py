"""Builds a model from its preset with transformers, random weights, no download."""

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mamba.modeling_mamba import MambaRMSNorm

from trials.models.experts import LoopedExperts
from trials.models.preset import (
    Architecture,
    BlackMambaArchitecture,
    LlamaArchitecture,
    MixtralArchitecture,
)


def build_model(
    architecture: Architecture, *, active_experts: int | None, seed: int, seq_len: int
) -> nn.Module:
    """A causal language model of this architecture, in fp32, on the CPU, ready to train.

    Args:
        architecture: the facts.
        active_experts: experts each token is routed to; absent for a dense model.
        seed: random weights are drawn from it, alike on every machine.
        seq_len: the longest sequence it will be given.
    """
    torch.manual_seed(seed)
    match architecture:
        case MixtralArchitecture():
            assert active_experts is not None
            return _mixtral(architecture, active_experts, seq_len)
        case BlackMambaArchitecture():
            assert active_experts is not None
            return _blackmamba(architecture, active_experts)
        case LlamaArchitecture():
            return _llama(architecture, seq_len)


def _mixtral(facts: MixtralArchitecture, active_experts: int, seq_len: int) -> nn.Module:
    config = MixtralConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.expert_width,
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.attention_heads,
        num_key_value_heads=facts.key_value_heads,
        max_position_embeddings=seq_len,
        num_local_experts=facts.experts,
        num_experts_per_tok=active_experts,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = LoopedExperts(
            facts.hidden_size, facts.expert_width, facts.experts, active_experts
        )
    return model  # type: ignore[no-any-return]


class _ExpertBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """A layer of experts in the place of a Mamba block: norm, experts, residual."""

    def __init__(self, facts: BlackMambaArchitecture, active_experts: int) -> None:
        super().__init__()
        self.norm = MambaRMSNorm(facts.hidden_size)
        self.experts = LoopedExperts(
            facts.hidden_size, facts.expert_width, facts.experts, active_experts
        )

    def forward(self, hidden_states: torch.Tensor, **_unused: object) -> torch.Tensor:
        """Hidden states (batch, length, hidden) to the same shape."""
        return hidden_states + self.experts(self.norm(hidden_states))  # type: ignore[no-any-return]


def _blackmamba(facts: BlackMambaArchitecture, active_experts: int) -> nn.Module:
    config = MambaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        state_size=facts.state_size,
        num_hidden_layers=facts.layers,
        expand=facts.expand,
        conv_kernel=facts.conv_kernel,
        residual_in_fp32=False,
        initializer_range=0.02,
        use_cache=False,
    )
    model = MambaForCausalLM(config)
    # transformers has the Mamba mixer but not BlackMamba: every second block becomes experts.
    for index in range(1, facts.layers, 2):
        model.backbone.layers[index] = _ExpertBlock(facts, active_experts)
    return model  # type: ignore[no-any-return]


def _llama(facts: LlamaArchitecture, seq_len: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.mlp_width,
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.attention_heads,
        num_key_value_heads=facts.key_value_heads,
        max_position_embeddings=seq_len,
        use_cache=False,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]
