"""BlackMamba (2402.01771): alternating Mamba layers and layers of experts."""

from typing import Any

import torch
from transformers import MambaConfig, MambaForCausalLM, MixtralConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mamba.modeling_mamba import MambaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


class _ExpertLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """A layer of experts in place of a Mamba layer: norm, experts, residual."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.norm = MambaRMSNorm(config.hidden_size)
        self.mlp = MixtralSparseMoeBlock(config)

    def forward(self, hidden_states: torch.Tensor, **_unused: object) -> torch.Tensor:
        """Map hidden states (batch, length, hidden) to the same shape."""
        return hidden_states + self.mlp(self.norm(hidden_states))  # type: ignore[no-any-return]


def blackmamba(
    config: dict[str, Any], *, experts_implementation: str, dtype: torch.dtype
) -> MambaForCausalLM:
    """Build a BlackMamba on the default device, with uninitialised weights.

    transformers has both kinds of layers but not the model. So every second layer of a Mamba model
    is replaced by experts like Mixtral's (a softmax over the best of them, gated SiLU).

    Args:
        config: configuration as in the presets; ``intermediate_size`` is the experts' width.
        experts_implementation: implementation of transformers: eager, grouped_mm, …
        dtype: dtype of the weights.
    """
    mamba = MambaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        state_size=config["state_size"],
        num_hidden_layers=config["num_hidden_layers"],
        expand=config["expand"],
        conv_kernel=config["conv_kernel"],
        residual_in_fp32=False,
        initializer_range=0.02,
        use_cache=False,
    )
    experts = MixtralConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_local_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
    )
    experts._experts_implementation = experts_implementation  # noqa: SLF001 - from_config sets it so
    model = MambaForCausalLM._from_config(mamba, dtype=dtype)  # noqa: SLF001 - the Auto class's way
    for index in range(1, config["num_hidden_layers"], 2):
        model.backbone.layers[index] = _ExpertLayer(experts).to(dtype)
    return model
