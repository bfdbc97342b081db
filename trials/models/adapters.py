"""Adapters of PEFT on a model, and what is trained in full beside them or the model's own head."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

from trials.models.adapter_targets import check_saved_modules, expert_parameters, lora_targets
from trials.models.weight_placement import DTYPES
from trials.recipes.recipe import Recipe

DROPOUT = 0.1  # trl/models/modeling_value_head.py:29
COPY, MAGNITUDE = ".modules_to_save.", ".lora_magnitude_vector."  # in PEFT's names


def adapt(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Wrap a model by PEFT with the adapters of a recipe.

    Args:
        model: model of transformers, with or without weights; its linear layers are final.
        recipe: recipe with adapters.

    Raises:
        TargetError: the model lacks a module of the recipe.
    """
    from peft import get_peft_model  # noqa: PLC0415 - seconds, and only adapters need it

    check_saved_modules(model, recipe)
    config = _configuration(model, recipe)
    # By the model's type PEFT would take some of these names for parameters of fused experts, and
    # drop them. Here they are final: looped experts are linear layers, and the parameters of fused
    # ones are named.
    facts: Any = model.config
    facts.model_type = "apart"
    try:
        with warnings.catch_warnings():
            # The copies of tied weights are not tied, by default of PEFT.
            warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")
            adapted: nn.Module = get_peft_model(model, config)
    finally:
        del facts.model_type  # uncovers the attribute of the class
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_dtype(name, parameter, recipe))
    return adapted


def _configuration(model: nn.Module, recipe: Recipe) -> Any:
    """Configuration of PEFT for the adapters of a recipe."""
    from peft import LoraConfig, OFTConfig  # noqa: PLC0415 - as above

    common: dict[str, Any] = {
        "target_modules": lora_targets(model, recipe),
        "modules_to_save": recipe.modules_to_save and list(recipe.modules_to_save),
        # PEFT warns where this does not agree with the class of the layers.
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),
        # For SEQ_CLS, PEFT trains a copy of the score.
        "task_type": "SEQ_CLS" if recipe.is_scored else "CAUSAL_LM",
    }
    if recipe.oft_block_size is not None:
        return OFTConfig(r=0, oft_block_size=recipe.oft_block_size, **common)
    assert recipe.lora_rank is not None
    return LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_parameters=expert_parameters(model, recipe) or None,
        use_dora=recipe.dora,
        **common,
    )


def _dtype(name: str, parameter: nn.Parameter, recipe: Recipe) -> torch.dtype:
    """Dtype of a trained parameter, as trainers leave it.

    PEFT casts adapters up to fp32, but not those on the meta device, and not copies of modules. TRL
    casts all that is trained on 4-bit weights to bf16, but for magnitudes.
    """
    assert recipe.adapter_dtype is not None
    if MAGNITUDE in name and recipe.method == "qlora":
        return torch.float32
    if COPY in name and recipe.adapter_dtype != "bf16":
        return parameter.dtype
    return DTYPES[recipe.adapter_dtype]


@dataclass
class ValueOutput(ModelOutput):  # type: ignore[misc]
    """Output of a model with a head of values beside the language head (TRL 0.24).

    Attributes:
        loss: absent.
        logits: (batch, length, vocabulary), in fp32.
        values: (batch, length) value of each token.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    values: torch.Tensor | None = None


class ValueHead(nn.Module):
    """Values of hidden states, in fp32 but for autocast."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.summary = nn.Linear(width, 1, device=device, dtype=torch.float32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (batch, length, width) to values (batch, length, 1)."""
        hidden = functional.dropout(hidden, DROPOUT, self.training)
        values: torch.Tensor = self.summary(hidden.to(self.summary.weight.dtype))
        return values


def add_value_head(model: Any) -> None:
    """Add a head of values to a causal language model, with or without adapters, in place."""
    head = ValueHead(_width(model), next(model.parameters()).device)
    own = model.forward
    model.value_head = head

    def forward(*args: Any, **kwargs: Any) -> ValueOutput:
        output = own(*args, **kwargs, output_hidden_states=True)
        values = head(output.hidden_states[-1]).squeeze(-1)
        return ValueOutput(logits=output.logits.float(), values=values)

    model.forward = forward


def value_parameters(model: nn.Module) -> int:
    """Parameters of a model's head of values: its matrix and its bias."""
    return _width(model) + 1


def _width(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)
