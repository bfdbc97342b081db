"""Storages that a traced cell holds throughout: its model, and a separate reference."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from trials.devices.storages import local_tensor
from trials.models.weight_placement import decoder_layers, quantisation_constants
from trials.simulation.recording import Held, Purpose
from trials.simulation.tracing.layer_repetition import RepeatedLayers
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
    starts = repeated.starts if repeated.copies else []
    sizes, purposes, turns = [], [], []
    counted: set[int] = set()
    for model in models:
        layers = decoder_layers(model)
        for index, part in enumerate((*layers, model)):
            turn = sum(start <= index for start in starts) if index < len(layers) else 0
            turn = 0 if turn > repeated.traced else turn  # layers after the last turn
            constants = {id(t) for t in quantisation_constants(part)}
            for tensor in model_tensors(part):
                local = local_tensor(tensor)
                storage = local.untyped_storage()
                is_new = storage._cdata not in counted  # noqa: SLF001 - the one name of a storage
                if is_new and local.device == device:
                    counted.add(storage._cdata)  # noqa: SLF001 - as above
                    sizes.append(storage.nbytes())
                    constant = id(tensor) in constants
                    purposes.append(Purpose.QUANTISATION if constant else Purpose.WEIGHT)
                    turns.append(turn)
    return Held(*(np.array(column, np.int64) for column in (sizes, purposes, turns)))
