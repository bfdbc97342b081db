"""Makes the experts of a mixture-of-experts model what a recipe needs, whatever the model.

transformers keeps the experts of a layer as fused three-dimensional parameters, and routers as bare
matrices. That is what its grouped matrix product needs. bitsandbytes does not quantise such
parameters and LoRA on linear modules does not see them, so for those they are taken apart here: one
linear layer for each expert and projection, as the paper ran it (2408.04693), and one for the
router. What is done between the products (activations, limits, norms, the router's choice) stays
the code of transformers, so that it is right for every family. The names end in ``_linear`` because
PEFT rewrites the usual ones (``gate``, ``w1``, ``gate_proj``, …) of such models to the fused
parameters that are no longer there.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from trials.records.recipe import Experts

# transformers' names of its implementations; the loop here starts from its plain one.
IMPLEMENTATIONS: dict[Experts | None, str] = {
    "grouped": "grouped_mm",
    "looped": "eager",
    None: "eager",
}
FUSED_PARAMETERS = frozenset(
    {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}
)


class ExpertsError(ValueError):
    """The experts or the router of a model cannot be taken apart exactly."""


class Expert(nn.Module):
    """The matrices of one expert, each a linear layer; ``gate_linear`` only where it has a gate."""

    def __init__(self, gate: nn.Linear | None, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        if gate is not None:
            self.gate_linear = gate
        self.up_linear = up
        self.down_linear = down


class LoopedExperts(nn.Module):
    """Experts one after another, each on the tokens routed to it.

    Sums in low precision round in another order than those of transformers' implementations do, as
    theirs differ among themselves.

    Args:
        fused: the experts of transformers. Its parameters go over to the linear layers of ``each``
            expert; what it does between the products stays, as ``rule``.
    """

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        rule: Any = fused
        self.each = nn.ModuleList(_apart(rule))
        rule._parameters.clear()  # noqa: SLF001 - there is no other name for all of them
        self.rule = rule
        gate = rule._apply_gate.__name__  # noqa: SLF001 - its decorator puts it there
        self._plain_gate = gate == "_default_apply_gate" and rule.is_concatenated
        # transformers 5.17 has no experts with a norm of their own, nor the attribute.
        self._has_norm = getattr(rule, "has_post_expert_norm", False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the fused experts of transformers compute.

        Args:
            hidden_states: tokens (n, hidden).
            top_k_index: the experts of each token (n, k).
            top_k_weights: and their weights (n, k).

        Returns:
            Tokens (n, hidden).
        """
        mixed = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.each):
            token, slot = torch.where(top_k_index == index)
            if token.numel() == 0:
                continue
            share = self._answer(expert, hidden_states[token]) * top_k_weights[token, slot, None]
            mixed.index_add_(0, token, share.to(mixed.dtype))
        return mixed

    def _answer(self, expert: Any, tokens: torch.Tensor) -> torch.Tensor:
        up = expert.up_linear(tokens)
        if self.rule.has_gate:
            inner = self._gated(expert.gate_linear(tokens), up)
        else:
            inner = self.rule.act_fn(up)
        answer: torch.Tensor = expert.down_linear(inner)
        return self.rule.post_expert_norm(answer) if self._has_norm else answer

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self._plain_gate:
            return self.rule.act_fn(gate) * up  # type: ignore[no-any-return]
        # A family's own gate takes the two as they come out of the fused matrix.
        if self.rule.is_concatenated:
            fused = torch.cat((gate, up), dim=-1)
        else:
            fused = torch.stack((gate, up), dim=-1).flatten(-2)
        return self.rule._apply_gate(fused)  # type: ignore[no-any-return] # noqa: SLF001 - as above


class RouterLinear(nn.Linear):
    """A router's matrix. Some routers cast tokens and matrix, so it follows the tokens' dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
        """Tokens (n, hidden) to logits (n, experts)."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.to(input.dtype), bias)


class _Parameter:
    """What a router's code finds in the place of its matrix: multiplying by it runs the layer.

    So the router's own rule holds, and whatever adapts the layer takes part. What else its code
    might do with a matrix is an error: it would pass the adapter by.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer = layer
        self._name = name

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.drawn.dtype

    @property
    def drawn(self) -> torch.Tensor:
        """The parameter itself."""
        return getattr(self.layer, self._name)  # type: ignore[no-any-return]

    def float(self) -> Self:
        """As it is: the layer casts."""
        return self

    def type(self, _dtype: torch.dtype) -> Self:
        """As it is, too."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """PyTorch asks here when one of these is given to it."""
        if function is functional.linear:
            return args[1].layer(args[0])  # which adds its own bias
        if function.__name__.endswith("_"):  # in place: the model's class draws its weights
            named = {name: _parameter(value) for name, value in (kwargs or {}).items()}
            return function(*map(_parameter, args), **named)
        raise ExpertsError(
            f"lora_targets router: this one takes its matrix to {function.__name__}, past an "
            "adapter: adapt experts and attention instead"
        )


def _parameter(value: Any) -> Any:
    return value.drawn if isinstance(value, _Parameter) else value


def loop_experts(model: nn.Module) -> None:
    """Takes every fused experts module of a model apart, in place, on the meta device or not.

    Raises:
        ExpertsError: they are not what transformers makes experts of.
    """
    for parent, name in list(_places(model, is_fused)):
        fused = parent.get_submodule(name)
        kind = type(fused).__name__
        if not hasattr(fused, "_apply_gate"):  # its decorator of experts puts it there
            raise ExpertsError(
                f"experts looped: {kind} is computed in transformers' one way only: do not ask for "
                "experts, nor adapt or quantise them"
            )
        unknown = {key for key, _ in fused.named_parameters(recurse=False)} - FUSED_PARAMETERS
        if unknown:
            raise ExpertsError(
                f"experts looped: {kind} also holds {', '.join(sorted(unknown))}: use "
                "experts: grouped"
            )
        setattr(parent, name, LoopedExperts(fused))


def linear_routers(model: nn.Module) -> None:
    """Makes a linear layer of every router's matrix, in place, on the meta device or not.

    They keep their classes, by which transformers finds the logits of an auxiliary loss.

    Raises:
        ExpertsError: a router is a linear layer itself, but one that gives more than a product.
    """
    for parent, name in list(_places(model, is_router)):
        router = parent.get_submodule(name)
        if isinstance(router, nn.Linear):
            raise ExpertsError(
                f"lora_targets router: {type(router).__name__} cannot carry an adapter: adapt "
                "experts and attention instead"
            )
        own = router._parameters  # noqa: SLF001 - delattr would not hand them over
        weight, bias = own.pop("weight"), own.pop("bias", None)
        router.router_linear = _linear(weight, bias, RouterLinear)
        router.__class__ = _with_linear(type(router))  # type: ignore[arg-type] # classes can be hashed


def experts_implementation(experts: Experts | None) -> str:
    """What transformers calls the implementation to start from."""
    return IMPLEMENTATIONS[experts]


def experts_in_use(model: nn.Module) -> str | None:
    """How a built model computes its experts; None for one without experts."""
    kinds = set()
    for module in model.modules():
        if isinstance(module, LoopedExperts):
            kinds.add("looped")
        elif is_fused(module):
            # Where transformers has one way only, its class says which.
            config = getattr(module, "config", None)
            found = str(getattr(config, "_experts_implementation", type(module).__name__))
            kinds.add("grouped" if found == IMPLEMENTATIONS["grouped"] else found)
    return " and ".join(sorted(kinds)) or None


def is_router(module: nn.Module) -> bool:
    """Whether this is a router of transformers: a bare matrix (experts, hidden) and a rule."""
    weight = module._parameters.get("weight")  # noqa: SLF001 - a property would build it anew
    return "router" in type(module).__name__.lower() and weight is not None and weight.dim() == 2


def is_fused(module: nn.Module) -> bool:
    """Whether these are experts as transformers keeps them, in three-dimensional parameters."""
    down = module._parameters.get("down_proj")  # noqa: SLF001 - as above
    return down is not None and down.dim() == 3


def _places(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, str]]:
    """Where such modules are; they themselves would hold on to the weights of all layers."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if wanted(child):
                yield parent, name


@cache
def _with_linear(router: type[nn.Module]) -> type[nn.Module]:
    """The class of a router whose matrix is in its ``router_linear``."""

    def stand_in(name: str) -> property:
        return property(lambda self: _Parameter(self.router_linear, name))

    return type(router.__name__, (router,), {n: stand_in(n) for n in ("weight", "bias")})


def _apart(fused: Any) -> Iterator[Expert]:
    """Experts by themselves. Each holds a copy of its part, so the fused whole can be let go."""
    parameters = dict(fused.named_parameters(recurse=False))
    first = "gate_up_proj" if fused.has_gate else "up_proj"

    def part(name: str, index: int) -> torch.Tensor | None:
        if name not in parameters:
            return None
        own: torch.Tensor = parameters[name].detach()[index]
        return own.T if fused.is_transposed and own.dim() == 2 else own

    def split(tensor: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        if tensor is None:
            return None, None
        return tensor.chunk(2) if fused.is_concatenated else (tensor[::2], tensor[1::2])

    for index in range(len(parameters["down_proj"])):
        weight, bias = part(first, index), part(f"{first}_bias", index)
        down = _copied(part("down_proj", index), part("down_proj_bias", index))
        if fused.has_gate:
            gate, up = map(_copied, split(weight), split(bias))
            yield Expert(gate, up, down)
        else:
            yield Expert(None, _copied(weight, bias), down)


def _copied(weight: torch.Tensor | None, bias: torch.Tensor | None) -> nn.Linear:
    assert weight is not None
    layout = torch.contiguous_format
    own = nn.Parameter(weight.clone(memory_format=layout))
    return _linear(own, None if bias is None else nn.Parameter(bias.clone(memory_format=layout)))


def _linear(
    weight: nn.Parameter | None, bias: nn.Parameter | None, kind: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    assert weight is not None
    outputs, inputs = weight.shape
    linear = kind(inputs, outputs, bias=False, device="meta")
    linear.weight = weight
    linear.bias = bias  # type: ignore[assignment] # None is what a layer without one has
    return linear
