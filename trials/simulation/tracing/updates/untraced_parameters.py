"""Parameters of the layers that a trace leaves out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trials.devices.storages import local_tensor
from trials.simulation.tracing.layer_repetition import RepeatedLayers
from trials.simulation.tracing.shape_rules import fake_like
from trials.simulation.tracing.tracer import Tracer


class UntracedParameters:
    """Parameters of layers that are not traced, so that the update has its full size.

    They and their gradients are fake tensors; the tracer registers the gradients as copies of those
    in the second turn.
    """

    def __init__(self, turns: RepeatedLayers, layers: list[nn.Module]) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        if turns.copies == 0 or not layers:
            return
        start, end = turns.starts[1:3]
        second = [p for layer in layers[start:end] for p in layer.parameters() if p.requires_grad]
        of_second = [(parameter, _maker(parameter)) for parameter in second]
        for copy in range(1, turns.copies + 1):
            for parameter, make in of_second:
                # A tensor suffices for an optimizer, and is faster to make than an nn.Parameter.
                untraced: Any = make().requires_grad_()
                untraced.grad = make()
                self._pairs.append((untraced, parameter, copy))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All untraced parameters, in order."""
        return [untraced for untraced, _, _ in self._pairs]

    def among(self, trainable: list[nn.Parameter]) -> list[nn.Parameter]:
        """Trainable parameters of the whole model, given some of the traced one, in its order."""
        members = {id(p) for p in trainable}
        copies = [untraced for untraced, p, _ in self._pairs if id(p) in members]
        second = {id(p) for _, p, _ in self._pairs}
        end = max((i for i, p in enumerate(trainable, 1) if id(p) in second), default=0)
        return [*trainable[:end], *copies, *trainable[end:]]

    def register_gradients(self, tracer: Tracer) -> None:
        """Register the gradients that the backward passes of their layers would have left."""
        registered: set[tuple[int, int]] = set()
        for untraced, parameter, copy in self._pairs:
            if parameter.grad is None:
                untraced.grad = None
                continue
            like = tracer.name_of(parameter.grad)
            assert untraced.grad is not None
            if like is None:  # on the host
                continue
            # Gradients that ranks reduce together are one storage, and so one ghost.
            is_first = (like, copy) not in registered
            tracer.add_ghost(untraced.grad, like if is_first else None, copy)
            registered.add((like, copy))


def _maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Function that makes fake tensors like another, which may be a shard of a distributed one."""
    if not isinstance(tensor, DTensor):
        return lambda: fake_like(tensor)
    local = local_tensor(tensor.detach())
    kind: Any = DTensor
    spec = tensor._spec  # noqa: SLF001 - from_local makes an equal one, but slowly
    return lambda: kind(fake_like(local), spec, requires_grad=False)
