"""Saved activations on the host between forward and backward pass, by TRL's context manager."""

import contextlib
import importlib
from typing import Any

from torch import nn

from trials.recipes.recipe import Recipe

MODULE = "trl.models.activation_offloading"


def activation_offloading(
    model: nn.Module, recipe: Recipe
) -> contextlib.AbstractContextManager[object]:
    """Make the context of a micro-batch's forward and backward pass, with SFTTrainer's settings.

    The model gets hooks that exempt its head; make it once for a model.

    Raises:
        ImportError: TRL is not installed.
    """
    if not recipe.activation_offloading:
        return contextlib.nullcontext()
    try:
        library: Any = importlib.import_module(MODULE)
    except ImportError as error:
        raise ImportError(
            f"activation_offloading runs code of TRL, which cannot be imported ({error}): install "
            "the extra 'trl', or leave activation_offloading out"
        ) from None
    context: Any = library.get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    # Skips a warning on a full host, whose logger needs a state of accelerate.
    context.is_first_forward_pass = False
    return context  # type: ignore[no-any-return]
