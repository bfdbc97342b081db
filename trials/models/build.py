"""Construction of a model under a recipe on its device, layer by layer.

The model is laid out on the meta device, without weights. Then each layer gets its weights on the
device, random or pretrained, and its linear layers are quantised before the next layer follows. So
a 4-bit model never needs the memory of a 16-bit one.
"""

from collections.abc import Callable
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from gpu_catalog.suggestions import did_you_mean
from trials.models.adapter_targets import adapts_router
from trials.models.adapters import adapt, add_value_head
from trials.models.experts import experts_implementation, linear_routers, loop_experts
from trials.models.mamba import choose_mamba_kernels
from trials.models.weight_placement import (
    DTYPES,
    Destination,
    decoder_layers,
    freeze_layers,
    freeze_vision,
    place,
    trained_layers,
)
from trials.recipes.fields import REENTRANT, SCORE
from trials.recipes.recipe import Recipe
from trials.records.cell import Weights
from trials.records.model import Model

BLACKMAMBA = "blackmamba"
NO_PADDING = -1  # no token id: the score of a sequence is then that of its last token


class KernelError(ValueError):
    """The model does not support a kernel of the recipe."""


class FamilyError(ValueError):
    """transformers has no model of this family and configuration for the task."""


def stock_model(model: Model, recipe: Recipe, active_experts: int | None) -> nn.Module:
    """Build the stock model of transformers on the meta device: shapes and dtypes, no weights.

    Of a vision-language model all is frozen but the language part.

    Raises:
        FamilyError: transformers has no such model.
        ImportError: the attention kernel is not installed.
        KernelError: the model does not support a kernel of the recipe.
    """
    experts = experts_implementation(recipe.experts)
    dtype = DTYPES[recipe.base_dtype]
    with torch.device("meta"):
        if model.family == BLACKMAMBA and not recipe.is_scored:
            # Imported late: the Mamba kernels must be chosen before.
            from trials.models.blackmamba import blackmamba  # noqa: PLC0415

            config = model.config_with(active_experts)
            return blackmamba(config, experts_implementation=experts, dtype=dtype)  # type: ignore[no-any-return]
        stock = _made(
            model,
            recipe,
            lambda: _auto_class(model, recipe).from_config(
                _task_config(model, recipe, active_experts),
                dtype=dtype,
                **_implementations(model, recipe, experts),
            ),
        )
    if model.has_vision:
        freeze_vision(stock)
    return stock


def _made(model: Model, recipe: Recipe, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model; raise ``KernelError`` where transformers refuses a kernel."""
    try:
        return _with_score(model, make()) if recipe.is_scored else make()
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        if "experts implementation" in str(error):
            raise KernelError(
                f"experts {recipe.experts}: {model.name} cannot have it in transformers "
                f"({str(error).removesuffix('.')}): use another model"
            ) from None
        others = _other_kernels(model, recipe)
        raise KernelError(
            f"attention {recipe.attention}: {model.name} cannot have it in transformers "
            f"({str(error).partition('. ')[0].removesuffix(' yet')}): use {others}"
        ) from None


def _auto_class(model: Model, recipe: Recipe) -> Any:
    if recipe.is_scored:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if model.has_vision else AutoModelForCausalLM


def _task_config(model: Model, recipe: Recipe, active_experts: int | None) -> Any:
    """Configuration of the class that a task trains, as an object of transformers."""
    if not recipe.is_scored:
        return auto_config(model, active_experts)
    if model.family not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise _no_score(model, "no sequence classification model")
    config = auto_config(model, active_experts)
    config.num_labels = 1
    return config


def _with_score(model: Model, made: Any) -> nn.Module:
    """Check that the head of a reward model is the layer ``score``, which PEFT copies."""
    if not isinstance(getattr(made, SCORE, None), nn.Linear):
        raise _no_score(model, f"no sequence classification model with a layer {SCORE}")
    # As RewardTrainer does, after the model is made; here no token of a batch is padding.
    made.config.get_text_config().pad_token_id = NO_PADDING
    return made  # type: ignore[no-any-return]


def _no_score(model: Model, lacking: str) -> FamilyError:
    return FamilyError(
        f"task reward: {model.name}: transformers {transformers_version} has {lacking} of "
        f"{model.family!r}: use another model"
    )


def _other_kernels(model: Model, recipe: Recipe) -> str:
    """Attention kernels that a model supports by transformers' declarations, but a recipe's own.

    A vision tower may lack what the whole model declares.
    """
    images, text = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = (images if model.has_vision else text)[type(auto_config(model, None))]
    flags = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
    only = getattr(kind, "_compatible_flash_implementations", None)
    others = [
        name
        for name, flag in flags.items()
        if getattr(kind, flag, False)
        and (name == "sdpa" or only is None or name in only)
        and name != recipe.attention
    ]
    return " or ".join(["eager", *others])


def _check_family(model: Model) -> None:
    """Check that transformers itself has the model; code shipped with a model is never run."""
    family, kind = model.family, "causal language model"
    families: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model.has_vision:
        families, kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "vision-language model"
    if family in families:
        return
    here = f"transformers {transformers_version}"
    if family in CONFIG_MAPPING_NAMES:
        raise FamilyError(f"{model.name}: {here} has no {kind} of {family!r}")
    if model.config.get("auto_map"):
        raise FamilyError(
            f"{model.name}: model_type {family!r} is custom code (auto_map), which is not run, and "
            f"{here} has none of that type: use a model whose code is in transformers"
        )
    near = did_you_mean(family, families) or ": another version may"
    raise FamilyError(f"{model.name}: {here} has no model_type {family!r}{near}")


def build_model(  # noqa: PLR0913 - inputs of a build
    model: Model,
    recipe: Recipe,
    *,
    active_experts: int | None,
    weights: Weights,
    destination: Destination,
    seed: int,
) -> nn.Module:
    """Build a causal language model, or a reward model, under a recipe at its destination.

    It is in training mode.

    Args:
        model: configuration of the model.
        recipe: with every field that applies filled in
            (``trials.records.compatibility.with_defaults``).
        active_experts: experts each token is routed to; absent for a dense model.
        weights: random or pretrained. Pretrained ones pass through the host's memory whole.
        destination: where its weights are placed.
        seed: seed of random weights, which are equal on all devices of one kind.

    Raises:
        ImportError: a kernel of the recipe is not installed.
        ValueError: the model does not support the recipe; one line says why.
    """
    if recipe.mamba is not None:
        choose_mamba_kernels(recipe.mamba)
    torch.manual_seed(seed)
    built = (
        _pretrained(model, recipe, active_experts)
        if weights == "pretrained"
        else stock_model(model, recipe, active_experts)
    )
    return under_recipe(built, recipe, lambda model: place(model, recipe, destination))


def under_recipe(model: nn.Module, recipe: Recipe, place: Callable[[nn.Module], None]) -> nn.Module:
    """Apply a recipe to a stock model of transformers; the result is in training mode.

    Args:
        model: stock model, on the meta device or with weights.
        recipe: with every field that applies filled in.
        place: gives the model its weights, 4-bit ones where the recipe requires it; called once
            experts and routers have their final form.
    """
    if recipe.experts == "looped":
        loop_experts(model)
    if adapts_router(recipe):
        linear_routers(model)
    place(model)
    if recipe.kbit_preparation:
        _cast_up(model)
    if recipe.has_adapters:
        model = adapt(model, recipe)
    if recipe.trained_layers is not None:
        freeze_layers(model, recipe)
    if recipe.gradient_checkpointing:
        _checkpoint(model, recipe)  # last, as trainers do: it hooks the embedding, adapted or not
    if recipe.has_value_head:
        add_value_head(model)
    model.train()
    return model


def auto_config(model: Model, active_experts: int | None) -> Any:
    """Configuration of a model as an object of transformers.

    Raises:
        FamilyError: transformers has no such model, or refuses its configuration.
    """
    _check_family(model)
    config = model.config_with(active_experts)
    # A step asks for router logits where its recipe has their loss.
    fields = {k: v for k, v in config.items() if k not in {"model_type", "output_router_logits"}}
    try:
        made = AutoConfig.for_model(config["model_type"], **fields | {"use_cache": False})
        made.get_text_config().use_cache = False
    except (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError) as error:
        why = shorten(str(error), 300, placeholder=" …")
        raise FamilyError(
            f"{model.name}: transformers {transformers_version} refuses its configuration ({why}): "
            "compare its config.json with the published one"
        ) from None
    return made


def _implementations(model: Model, recipe: Recipe, experts: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    if model.has_attention and recipe.attention is not None:
        chosen["attn_implementation"] = recipe.attention
    if model.experts is not None:
        chosen["experts_implementation"] = experts
    return chosen


def _pretrained(model: Model, recipe: Recipe, active_experts: int | None) -> nn.Module:
    if model.weights is None:
        raise ValueError(f"no pretrained weights of {model.name} are known: use weights: random")
    if model.family == BLACKMAMBA:
        raise ValueError(f"transformers cannot load {model.name}: use weights: random")
    experts = experts_implementation(recipe.experts)
    return _made(
        model,
        recipe,
        lambda: _auto_class(model, recipe).from_pretrained(
            model.weights,
            config=_task_config(model, recipe, active_experts),
            dtype=DTYPES[recipe.base_dtype],
            **_implementations(model, recipe, experts),
        ),
    )


def _checkpoint(model: nn.Module, recipe: Recipe) -> None:
    # transformers 5.20 renamed the method; the old name warns there.
    enable = getattr(model, "activation_checkpointing_enable", None)
    kwargs = {"use_reentrant": recipe.gradient_checkpointing == REENTRANT}
    (enable or model.gradient_checkpointing_enable)(kwargs)  # type: ignore[operator]
    if recipe.trained_layers is not None:
        # LLaMA-Factory's own checkpointing (model/model_utils/checkpointing.py:80).
        for layer in {*decoder_layers(model)} - {*trained_layers(model, recipe)}:
            layer.gradient_checkpointing = False  # type: ignore[assignment]


def disable_checkpointing(model: Any) -> None:
    """Let a model that its recipe has checkpointed keep its activations, in place."""
    disable = getattr(model, "activation_checkpointing_disable", None)  # as above
    (disable or model.gradient_checkpointing_disable)()
    model.disable_input_require_grads()  # transformers may leave the hook of the embedding


def _cast_up(model: nn.Module) -> None:
    """Cast norms, embeddings and head of a 4-bit model to fp32."""
    from peft import prepare_model_for_kbit_training  # noqa: PLC0415 - seconds to import

    # Checkpointing has its own place below.
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
