"""Profiler ranges around the parts of a model, which attribute operators to layers."""

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn
from torch.profiler import record_function

from trials.models.adapter_targets import ATTENTION_MODULES
from trials.models.experts import LoopedExperts, is_fused
from trials.models.weight_placement import output_layer
from trials.records.profile import Layer, Stage
from trials.training.profiling.operator_attribution import Part

Step = Callable[[], object]
Handle = Any  # torch's handle of a hook

# Roles of linear layers in experts and MLPs, by their names without suffixes.
PRODUCTS = {
    "gate": "gate", "gate_up": "gate+up", "w1": "gate", "up": "up", "w3": "up", "fc1": "up",
    "down": "down", "w2": "down", "fc2": "down",
}  # fmt: skip
# Position of a product's left factor among the operands, by operator; the right one follows.
LEFT_FACTOR = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1,
}  # fmt: skip
ATTENTION = "aten::_scaled_dot_product_"  # prefix of PyTorch's attention kernels


class Ranges:
    """Profiler ranges around a model's layers and the parts of its experts.

    A context manager that removes its hooks on exit.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stage: Stage = "forward"
        self._open: list[tuple[Part, Any]] = []
        self._hooks: list[Handle] = []
        self._stage_range: Any = None
        self._loss_range: Any = None

    def __enter__(self) -> Self:
        for module, layer, product in parts_of(self._model):
            self._hooks += [
                module.register_forward_pre_hook(self._opener(layer, product)),
                # always_call: recomputation may end early, in the middle of a module.
                module.register_forward_hook(self._closer, always_call=True),
            ]
        head = output_layer(self._model)
        assert head is not None
        self._hooks.append(head.register_forward_hook(lambda *_: self._open_loss()))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def stage(self, stage: Stage) -> None:
        """Begin a stage."""
        self.close()
        self._stage = stage
        self._stage_range = _entered(whole_stage(stage).range_name)

    def close(self) -> None:
        """End the stage, and the loss with the forward pass."""
        for opened in (self._loss_range, self._stage_range):
            if opened is not None:
                opened.__exit__(None, None, None)
        self._loss_range = self._stage_range = None

    def _open_loss(self) -> None:
        if self._stage == "forward":
            self._loss_range = _entered(Part("forward", "loss").range_name)

    def _opener(self, layer: Layer | None, product: str) -> Callable[..., None]:
        def open_range(*_: object) -> None:
            above = self._open[-1][0] if self._open else None
            part = Part(
                "recompute" if self._stage == "backward" else self._stage,
                layer or "other" if above is None else above.layer,
                product or ("" if above is None else above.product),
            )
            self._open.append((part, _entered(part.range_name)))

        return open_range

    def _closer(self, *_: object) -> None:
        self._open.pop()[1].__exit__(None, None, None)


def whole_stage(stage: Stage) -> Part:
    """Part for operators of a stage outside all layers."""
    return Part(stage, "optimizer" if stage == "optimizer" else "other")


def _entered(name: str) -> Any:
    opened: Any = record_function(name)
    opened.__enter__()
    return opened


def parts_of(model: nn.Module) -> Iterator[tuple[nn.Module, Layer | None, str]]:
    """Modules that a profile distinguishes: kind of layer, and role of their products.

    A module inside a distinguished layer has no layer of its own (None).
    """
    head = output_layer(model)
    blocks = {id(parent) for parent, _ in expert_modules(model)}
    layers: dict[str, Layer] = {}
    for path, module in model.named_modules():
        inside = next((layers[p] for p in _prefixes(path) if p in layers), None)
        name = path.rpartition(".")[2]
        if inside is None:
            layer = (
                "head" if module is head else _layer(module, name, is_block=id(module) in blocks)
            )
            if layer is None:
                continue
            layers[path] = layer
            yield module, layer, ""
        elif product := _product(path, module, inside):
            yield module, None, product


def _layer(module: nn.Module, name: str, *, is_block: bool) -> Layer | None:
    kind = type(module).__name__.lower()
    if is_block:
        return "experts"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if "norm" in kind:
        return "norms"
    if "mamba" in kind and "mixer" in kind:
        return "mamba"
    if name in ATTENTION_MODULES:
        return "attention"
    return "mlp" if name in {"mlp", "feed_forward", "ffn"} else None


def _product(path: str, module: nn.Module, inside: Layer) -> str:
    name = path.rpartition(".")[2]
    if name in {"lora_A", "lora_B", "oft_R"} or ".lora_" in path or ".oft_" in path:
        # Their containers are never called, only the modules in them.
        return "" if isinstance(module, nn.ModuleDict) else "adapter"
    if inside not in ("experts", "mlp"):
        return ""
    if inside == "experts" and ("router" in type(module).__name__.lower() or name == "router"):
        return "router"
    if is_fused(module):
        return "gate+up" if getattr(module, "has_gate", True) else "up"
    short = name.removesuffix("_linear").removesuffix("_proj")
    if inside == "experts" and name == "gate":
        return "router"
    return PRODUCTS.get(short, "")


def _prefixes(path: str) -> Iterator[str]:
    """Paths of the modules that contain the module at a path, innermost first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def expert_modules(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Modules of experts, each preceded by the block that holds it and its router."""
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, LoopedExperts) or is_fused(child):
                yield parent, child
