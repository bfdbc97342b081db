"""Which layers of a model repeat, and a model of the few of them that stand for all."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from trials.models.weight_placement import decoder_layers

TRACED = 3
"""RepeatedLayers that are traced: the first, one for all between, the last."""
NUMBERS = ("idx", "layer_id")
"""How the names end of what a layer calls its own number."""


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers that repeat.

    Attributes:
        first: layers before them.
        period: layers of one turn.
        copies: turns that are not traced; 0 where too few repeat to leave any out.
        traced: turns that are traced, 3 or none.
    """

    first: int
    period: int
    copies: int
    traced: int

    @property
    def starts(self) -> list[int]:
        """The first layer of each traced turn in the cut model, then the layer after the last."""
        return [self.first + self.period * turn for turn in range(self.traced + 1)]

    def kept(self, layers: int) -> list[int]:
        """Which layers of the whole model the cut one has."""
        end = self.first + self.period * self.traced
        return [*range(end), *range(end + self.period * self.copies, layers)]


def turns_of(model: nn.Module) -> RepeatedLayers:
    """The longest stretch of layers that repeat with the shortest period.

    Layers are alike when their modules, shapes, dtypes and settings are.
    """
    layers = decoder_layers(model)
    best = RepeatedLayers(first=0, period=1, copies=0, traced=0)
    if not any(_holds(module, layers) for module in model.modules()):
        return best  # layers within layers, or on lists of their own: none can be left out
    marks = [_mark(layer) for layer in layers]
    for period in range(1, len(marks) // (TRACED + 1) + 1):
        for first, end in _stretches(marks, period):
            copies = (end - first) // period - TRACED
            if copies > 0 and copies * period > best.copies * best.period:
                best = RepeatedLayers(first, period, copies, TRACED)
    return best


def _stretches(marks: list[Any], period: int) -> Iterator[tuple[int, int]]:
    """Stretches [first, end) in which every layer is as the one a period before."""
    first = 0
    for index in range(period, len(marks) + 1):
        if index == len(marks) or marks[index] != marks[index - period]:
            yield first, index
            first = index - period + 1


def _holds(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether a list is that of all layers."""
    return isinstance(module, nn.ModuleList) and list(module) == list(layers)


def _mark(layer: nn.Module) -> tuple[object, ...]:
    """What makes a layer what it is, but for its number."""
    parts: list[object] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if not key.endswith(NUMBERS) and isinstance(value, (bool, int, float, str, type(None)))
        }
        shapes = [
            (key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)
        ]
        parts.append((name, type(module), tuple(sorted(settings.items(), key=str)), tuple(shapes)))
    return tuple(parts)


def cut(model: nn.Module, repeated: RepeatedLayers) -> None:
    """Leaves out the turns that are not traced, in place."""
    layers = decoder_layers(model)
    if repeated.copies == 0:
        return
    kept = repeated.kept(len(layers))
    for parent in model.modules():
        for name, child in parent.named_children():
            if _holds(child, layers):
                setattr(parent, name, nn.ModuleList([layers[index] for index in kept]))
    config: Any = model.config
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, name, [value[index] for index in kept])


def mark_passes(
    layers: Sequence[nn.Module],
    repeated: RepeatedLayers,
    on_forward: Callable[[int], None],
    on_backward: Callable[[int], None],
) -> None:
    """Tells of a step when it passes from turn to turn.

    Args:
        layers: of the cut model.
        repeated: where they repeat.
        on_forward: is told the turn that begins, from 1; ``traced + 1`` when the last is over.
        on_backward: is told the turn whose backward pass is over; ``traced + 1`` when those of the
            turns begin.
    """
    for turn, (start, end) in enumerate(pairwise(repeated.starts), start=1):
        _tell(layers[start], turn, on_forward, on_backward, before=True)
        if turn == repeated.traced:
            _tell(layers[end - 1], turn + 1, on_forward, on_backward, before=False)


def _tell(
    layer: nn.Module,
    turn: int,
    on_forward: Callable[[int], None],
    on_backward: Callable[[int], None],
    *,
    before: bool,
) -> None:
    """Not by the layer's own hooks: these run within its checkpoint, and so twice."""
    kind = type(layer)

    def passed(hidden: torch.Tensor) -> None:
        on_forward(turn)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: on_backward(turn))  # type: ignore[no-untyped-call]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before:
            passed(args[0] if args else kwargs["hidden_states"])
        result = kind.__call__(self, *args, **kwargs)
        if not before:
            passed(result[0] if isinstance(result, tuple) else result)
        return result

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})
