"""Weights between their draw and their division: every rank keeps a slice of each."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trials.models.weight_placement import Destination


@dataclass(frozen=True, slots=True)
class _Slice:
    """This rank's slice of a weight.

    Attributes:
        own: (bytes,) slice, padded to the length of every other rank's.
        nbytes: bytes of the whole weight.
    """

    own: torch.Tensor
    nbytes: int


class HostCopy(Destination):
    """Whole weights that are drawn on a device, which is fast, and kept on its host."""

    def keep(self, part: nn.Module) -> None:
        """Move a part to the host."""
        part.to("cpu")


class WeightSlices(Destination):
    """Weights of a model that ranks draw layer by layer and then divide among them.

    Each rank draws a layer whole on its own device, as a process alone does, and so has the same
    values. Of each weight it keeps a slice of the bytes, until all ranks gather the layer to divide
    it. No device ever holds the whole model, and no host where weights are drawn: eight ranks that
    built a model of 70 billion parameters on their host would take 1.1 TB of it.

    Args:
        device: device on which this rank draws.
        holder: device of the slices.
    """

    def __init__(self, device: torch.device, holder: torch.device) -> None:
        super().__init__(device)
        self._holder = holder
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._slices: dict[nn.Parameter, _Slice] = {}

    def keep(self, part: nn.Module) -> None:
        """Keep this rank's slices of the weights of a part, and free the rest of their memory."""
        for weight in part.parameters():
            if weight in self._slices:
                continue
            if not weight.untyped_storage().resizable():  # of a file, from which it was loaded
                weight.data = weight.data.clone()
            whole = _bytes_of(weight)
            length = -(-len(whole) // self._ranks)
            own = torch.zeros(length, dtype=torch.uint8, device=self._holder)
            filled = whole[self._rank * length :][:length]
            own[: len(filled)].copy_(filled)
            self._slices[weight] = _Slice(own, len(whole))
            weight.untyped_storage().resize_(0)

    def restore(self, part: nn.Module) -> None:
        """Gather the weights of a part again. All ranks call it for the same part."""
        for weight in part.parameters():
            kept = self._slices.pop(weight, None)
            if kept is None:
                continue
            own = kept.own.to(self.device)
            gathered = own.new_empty(len(own) * self._ranks)
            dist.all_gather_into_tensor(gathered, own)
            weight.untyped_storage().resize_(kept.nbytes)
            _bytes_of(weight).copy_(gathered[: kept.nbytes])


def _bytes_of(weight: torch.Tensor) -> torch.Tensor:
    """(bytes,) memory of a weight, as a view."""
    storage = weight.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=weight.device).set_(storage)
