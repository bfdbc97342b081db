"""Repeated layers of a model, and a cut model with the few of them that represent all."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from trials.models.fused_head import base_of
from trials.models.weight_placement import decoder_layers
from trials.simulation.recording import ROUTER_BACKWARD, ROUTER_LOOPS, TURN, Segment
from trials.simulation.tracing.tracer import Tracer

TRACED = 3
"""Turns that are traced: the first, one for all in between, the last."""
NUMBERS = ("idx", "layer_id")
"""Suffixes of the attributes in which a layer stores its own number."""


@dataclass(frozen=True, slots=True)
class RepeatedLayers:
    """Layers that repeat in turns of ``period`` layers.

    Attributes:
        first: number of layers before them.
        period: number of layers in one turn.
        copies: number of turns that are not traced; 0 where too few repeat.
        traced: number of turns that are traced, 3 or 0.
    """

    first: int
    period: int
    copies: int
    traced: int

    @property
    def starts(self) -> list[int]:
        """First layer of each traced turn in the cut model, then the layer after the last."""
        return [self.first + self.period * turn for turn in range(self.traced + 1)]

    def kept(self, layers: int) -> list[int]:
        """Indices of the whole model's layers that the cut model keeps."""
        end = self.first + self.period * self.traced
        return [*range(end), *range(end + self.period * self.copies, layers)]


def find_repeated_layers(model: nn.Module) -> RepeatedLayers:
    """Find the longest stretch of layers that repeats, with its shortest period.

    Layers are equal when their modules, shapes, dtypes and settings are.
    """
    layers = decoder_layers(model)
    best = RepeatedLayers(first=0, period=1, copies=0, traced=0)
    if not any(_holds(module, layers) for module in model.modules()):
        return best  # nested layers, or several lists of layers: none can be left out
    marks = [_mark(layer) for layer in layers]
    # Features of images are added after the first layers.
    for index in range(_layers_with_features(model)):
        marks[index] = (index, *marks[index])
    for period in range(1, len(marks) // (TRACED + 1) + 1):
        for first, end in _stretches(marks, period):
            copies = (end - first) // period - TRACED
            if copies > 0 and copies * period > best.copies * best.period:
                best = RepeatedLayers(first, period, copies, TRACED)
    return best


def _layers_with_features(model: Any) -> int:
    """First decoder layers whose outputs Qwen3-VL adds features of its tower to (DeepStack)."""
    vision = getattr(model.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _stretches(marks: list[Any], period: int) -> Iterator[tuple[int, int]]:
    """Stretches [first, end) in which every layer equals the one a period before."""
    first = 0
    for index in range(period, len(marks) + 1):
        if index == len(marks) or marks[index] != marks[index - period]:
            yield first, index
            first = index - period + 1


def _holds(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether a module is the list of all layers."""
    return isinstance(module, nn.ModuleList) and list(module) == list(layers)


def _mark(layer: nn.Module) -> tuple[object, ...]:
    """Comparable description of a layer, without its number."""
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
    """Remove the turns that are not traced, in place."""
    layers = decoder_layers(model)
    if repeated.copies == 0:
        return
    kept = repeated.kept(len(layers))
    for parent in model.modules():
        for name, child in parent.named_children():
            if _holds(child, layers):
                setattr(parent, name, nn.ModuleList([layers[index] for index in kept]))
    facts: Any = model.config
    config = facts.get_text_config()
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, name, [value[index] for index in kept])


def mark_passes(
    layers: Sequence[nn.Module],
    repeated: RepeatedLayers,
    on_forward: Callable[[int], None],
    on_backward: Callable[[int], None],
) -> None:
    """Call back when a step passes from turn to turn.

    Args:
        layers: layers of the cut model.
        repeated: position of the repeated layers.
        on_forward: called with the turn that begins, from 1; with ``traced + 1`` after the last.
        on_backward: called with the turn whose backward pass has ended; with ``traced + 1`` when
            the backward passes of the turns begin.
    """
    for turn, (start, end) in enumerate(pairwise(repeated.starts), start=1):
        _report_pass(layers[start], turn, on_forward, on_backward, before=True)
        if turn == repeated.traced:
            _report_pass(layers[end - 1], turn + 1, on_forward, on_backward, before=False)


def _report_pass(
    layer: nn.Module,
    turn: int,
    on_forward: Callable[[int], None],
    on_backward: Callable[[int], None],
    *,
    before: bool,
) -> None:
    """Report a step that passes before or after a layer.

    The layer's class is replaced because its own hooks run within its checkpoint, and so twice.
    """
    kind = type(layer)

    def passed(hidden: torch.Tensor) -> None:
        on_forward(turn)
        if hidden.requires_grad and torch.is_grad_enabled():
            _hook_first(hidden, lambda _: on_backward(turn))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before:
            passed(args[0] if args else kwargs["hidden_states"])
        result = kind.__call__(self, *args, **kwargs)
        if not before:
            passed(result[0] if isinstance(result, tuple) else result)
        return result

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a hook with a tensor's gradient before those it has.

    FSDP2 gathers the weights of the layer below in such a hook, which belongs to its own turn.
    """
    hooks: Any = tensor._backward_hooks or {}  # noqa: SLF001 - no other name
    others = dict(hooks)
    hooks.clear()  # PyTorch calls them in the order of their insertion
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks.update(others)


class RouterLoops:
    """Loops over the router logits of all layers, which a step divides into turns as its passes.

    Args:
        model: causal language model, with or without adapters.
        tracer: tracer of its step, whose segments the loops set.
    """

    def __init__(self, model: nn.Module, tracer: Tracer) -> None:
        self._tracer = tracer
        self._loops = iter(ROUTER_LOOPS)
        self._numbers: list[int] = []
        backbone: Any = base_of(model).base_model
        self._hook = backbone.register_forward_hook(self._on_output)

    def close(self) -> None:
        """Leave the model as it was."""
        self._hook.remove()

    def mark_backward(self, loss: torch.Tensor) -> None:
        """Set segments when the backward pass of a loss runs through the first loop.

        Autograd runs functions from the last made to the first, so the last one that the forward
        pass made in a turn is where its backward pass begins.
        """
        last: dict[int, Any] = {}
        waiting: list[Any] = [loss.grad_fn] if self._numbers else []
        visited = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            turn = bisect_right(self._numbers, node._sequence_nr())  # noqa: SLF001 - no other name
            last[turn] = max(node, last.get(turn, node), key=lambda n: n._sequence_nr())  # noqa: SLF001 - as above
            if turn > 0:
                waiting += [following for following, _ in node.next_functions]
        segments = (Segment.HEAD_BACKWARD_AFTER, *ROUTER_BACKWARD)
        for turn, node in last.items():
            if turn < len(segments):
                node.register_prehook(lambda _, segment=segments[turn]: self._begin(segment))

    def _begin(self, segment: Segment) -> None:
        self._tracer.segment = segment

    def _on_output(self, _model: nn.Module, _inputs: object, output: Any) -> None:
        looped = self._looped

        class RouterLogits(tuple[torch.Tensor, ...]):
            __slots__ = ()

            def __iter__(self) -> Iterator[torch.Tensor]:
                return looped(self)

        if output.get("router_logits"):
            output.router_logits = RouterLogits(output.router_logits)

    def _looped(self, router_logits: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
        """Yield router logits, and begin a turn's segment with the first of its layers."""
        turns, after = next(self._loops)
        numbers: list[int] = []
        begun = 0
        for logits in tuple.__iter__(router_logits):
            turn = TURN.get(
                self._tracer.made_in[self._tracer.name_of(logits)], TRACED + 1 if begun else 0
            )
            if turn > begun:
                begun = turn
                numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined] # noqa: SLF001 - no other name
                self._begin((*turns, after)[turn - 1])
            yield logits
        if 0 < begun <= TRACED:
            numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined] # noqa: SLF001 - as above
            self._begin(after)
        self._numbers = self._numbers or numbers
