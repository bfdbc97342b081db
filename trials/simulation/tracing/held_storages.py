"""Storages that a traced cell holds throughout: its model, and a separate reference."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from trials.devices.storages import local_tensor
from trials.models.weight_placement import decoder_layers, quantisation_constants
from trials.recipes.recipe import Recipe
from trials.simulation.recording import Held, Purpose
from trials.simulation.tracing.layer_repetition import RepeatedLayers
from trials.simulation.tracing.ranks.host_tensors import pinned_bytes
from trials.simulation.tracing.shape_rules import CPU
from trials.training.finetune import model_tensors


def held_storages(
    models: Sequence[nn.Module], repeated: RepeatedLayers, device: torch.device
) -> Held:
    """Storages of models, each once, in the order of allocation: layer by layer.

    Args:
        models: models with the same layers.
        repeated: position of the repeated layers among those of each model.
        device: device of these storages; others are on the host.
    """
    sizes, purposes, turns = [], [], []
    for tensor, turn, is_constant in _storages(models, repeated):
        if local_tensor(tensor).device == device:
            sizes.append(local_tensor(tensor).untyped_storage().nbytes())
            purposes.append(Purpose.QUANTISATION if is_constant else Purpose.WEIGHT)
            turns.append(turn)
    return Held(*(np.array(column, np.int64) for column in (sizes, purposes, turns)))


def shards_on_host(
    model: nn.Module, repeated: RepeatedLayers, recipe: Recipe, device: torch.device
) -> tuple[int, ...]:
    """Bytes of the shards that a rank's host holds: weights, and of trained ones what they need.

    Weights and gradients are in pinned memory, the moments of AdamW are not. None where the host is
    the device.
    """
    if device == CPU:
        return ()
    moments = 2 if recipe.optimizer.startswith("adamw") else 0
    total = 0
    for tensor, turn, _ in _storages([model], repeated):
        local = local_tensor(tensor)
        if local.device != CPU:
            continue
        size = local.untyped_storage().nbytes()
        own = pinned_bytes(size)
        if tensor.requires_grad:
            own += pinned_bytes(size) + moments * size
        total += own * (1 + repeated.copies if turn == 2 else 1)
    return (total,)


def _storages(
    models: Sequence[nn.Module], repeated: RepeatedLayers
) -> Iterator[tuple[torch.Tensor, int, bool]]:
    """A tensor of each storage, the turn of its layer, and whether it is a constant."""
    starts = repeated.starts if repeated.copies else []
    counted: set[int] = set()
    for model in models:
        layers = decoder_layers(model)
        for index, part in enumerate((*layers, model)):
            turn = sum(start <= index for start in starts) if index < len(layers) else 0
            turn = 0 if turn > repeated.traced else turn  # layers after the last turn
            constants = {id(t) for t in quantisation_constants(part)}
            for tensor in model_tensors(part):
                storage = local_tensor(tensor).untyped_storage()
                if storage._cdata not in counted:  # noqa: SLF001 - the one name of a storage
                    counted.add(storage._cdata)  # noqa: SLF001 - as above
                    yield tensor, turn, id(tensor) in constants
