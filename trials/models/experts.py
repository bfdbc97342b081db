"""Conversion of the experts of any mixture-of-experts model to the form that a recipe needs.

transformers stores the experts of a layer as fused three-dimensional parameters, which its grouped
matrix product needs, and routers as bare matrices. bitsandbytes does not quantise such parameters,
and LoRA on linear modules does not reach them. For those recipes this module splits them: one
linear layer for each expert and projection, as in the paper (2408.04693), and one for the router.
The code between the products (activations, limits, norms, the router's choice) stays that of
transformers, so that it is right for every family. The names end in ``_linear`` because PEFT
rewrites the usual ones (``gate``, ``w1``, ``gate_proj``, …) of such models to the fused parameters
that no longer exist.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from trials.recipes.fields import Experts

# transformers' names of its implementations; the loop starts from its plain one.
IMPLEMENTATIONS: dict[Experts | None, str] = {
    "grouped": "grouped_mm",
    "looped": "eager",
    "all-tokens": "eager",
    None: "eager",
}
ALL_TOKENS = "Llama4TextExperts"
"""Class of experts that multiplies all tokens by every expert, and has no other implementation."""
FUSED_PARAMETERS = frozenset(
    {"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"}
)


class ExpertsError(ValueError):
    """The experts or the router of a model cannot be split exactly."""


class Expert(nn.Module):
    """Matrices of one expert as linear layers; ``gate_linear`` only where it has a gate."""

    def __init__(self, gate: nn.Linear | None, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        if gate is not None:
            self.gate_linear = gate
        self.up_linear = up
        self.down_linear = down


class LoopedExperts(nn.Module):
    """Experts that run one after another, each on the tokens routed to it.

    Sums in low precision round in another order than in transformers' implementations, which differ
    among themselves too.

    Args:
        fused: experts of transformers. Their parameters move to the linear layers of ``each``
            expert; their code between the products stays, as ``rule``.
    """

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        rule: Any = fused
        self.each = nn.ModuleList(_split_experts(rule))
        rule._parameters.clear()  # noqa: SLF001 - there is no other name for all of them
        self.rule = rule
        gate = rule._apply_gate.__name__  # noqa: SLF001 - its decorator puts it there
        self._plain_gate = gate == "_default_apply_gate" and rule.is_concatenated
        # transformers 5.17 has no experts with a norm of their own, nor the attribute.
        self._has_norm = getattr(rule, "has_post_expert_norm", False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the same as the fused experts of transformers.

        Args:
            hidden_states: (n, hidden) tokens.
            top_k_index: (n, k) experts of each token.
            top_k_weights: (n, k) weights of these experts.

        Returns:
            Tokens (n, hidden).
        """
        mixed = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self.each):
            token, slot = torch.where(top_k_index == index)
            if token.numel() == 0:
                continue
            share = self._output(expert, hidden_states[token]) * top_k_weights[token, slot, None]
            mixed.index_add_(0, token, share.to(mixed.dtype))
        return mixed

    def _output(self, expert: Any, tokens: torch.Tensor) -> torch.Tensor:
        up = expert.up_linear(tokens)
        if self.rule.has_gate:
            inner = self._gated(expert.gate_linear(tokens), up)
        else:
            inner = self.rule.act_fn(up)
        output: torch.Tensor = expert.down_linear(inner)
        return self.rule.post_expert_norm(output) if self._has_norm else output

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self._plain_gate:
            return self.rule.act_fn(gate) * up  # type: ignore[no-any-return]
        # A family's own gate takes both in the layout of the fused matrix.
        if self.rule.is_concatenated:
            fused = torch.cat((gate, up), dim=-1)
        else:
            fused = torch.stack((gate, up), dim=-1).flatten(-2)
        return self.rule._apply_gate(fused)  # type: ignore[no-any-return] # noqa: SLF001 - as above


class RouterLinear(nn.Linear):
    """Matrix of a router in the dtype of the tokens, since some routers cast both."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
        """Map tokens (n, hidden) to logits (n, experts)."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.to(input.dtype), bias)


class _Parameter:
    """Proxy for a router's matrix: a product with it runs the router's linear layer.

    So the router's own code stays, and adapters of the layer take part. Any other use of the matrix
    is an error, since it would bypass the adapter.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer = layer
        self._name = name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.drawn.dtype

    @property
    def drawn(self) -> torch.Tensor:
        """The parameter behind the proxy."""
        return getattr(self.layer, self._name)  # type: ignore[no-any-return]

    def float(self) -> Self:
        """Return the proxy: the layer casts."""
        return self

    def type(self, _dtype: torch.dtype) -> Self:
        """Return the proxy: the layer casts."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle functions of PyTorch that get the proxy as an argument."""
        if function is functional.linear:
            return args[1].layer(args[0])  # the layer adds its own bias
        if function.__name__.endswith("_"):  # in place: initialisation by the model's class
            named = {name: _parameter(value) for name, value in (kwargs or {}).items()}
            return function(*map(_parameter, args), **named)
        raise ExpertsError(
            f"lora_targets router: this one takes its matrix to {function.__name__}, past an "
            "adapter: adapt experts and attention instead"
        )


def _parameter(value: Any) -> Any:
    return value.drawn if isinstance(value, _Parameter) else value


def loop_experts(model: nn.Module) -> None:
    """Split every fused experts module of a model, in place, on the meta device or not.

    Raises:
        ExpertsError: the experts are not of transformers' common form.
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
    """Turn the matrix of every router into a linear layer, in place, on the meta device or not.

    Routers keep their class names, by which transformers finds the logits of an auxiliary loss.

    Raises:
        ExpertsError: a router is itself a linear layer with further outputs.
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
        assert weight is not None
        router.router_linear = linear_with(weight, bias, RouterLinear)
        router.__class__ = _with_linear(type(router))  # type: ignore[arg-type] # classes can be hashed


def experts_implementation(experts: Experts | None) -> str:
    """Transformers' name of the implementation to build with."""
    return IMPLEMENTATIONS[experts]


def experts_in_use(model: nn.Module) -> str | None:
    """Implementation of the experts in a built model; None for one without experts."""
    kinds = set()
    for module in model.modules():
        if isinstance(module, LoopedExperts):
            kinds.add("looped")
        elif any(kind.__name__ == ALL_TOKENS for kind in type(module).__mro__):
            kinds.add("all-tokens")  # quantised ones are of a subclass
        elif is_fused(module):
            # Another module with a single implementation is named by its class.
            config = getattr(module, "config", None)
            name = str(getattr(config, "_experts_implementation", type(module).__name__))
            kinds.add("grouped" if name == IMPLEMENTATIONS["grouped"] else name)
    return " and ".join(sorted(kinds)) or None


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of transformers: a bare matrix (experts, hidden) and a rule."""
    weight = module._parameters.get("weight")  # noqa: SLF001 - a property would build it anew
    return "router" in type(module).__name__.lower() and weight is not None and weight.dim() == 2


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds experts as fused three-dimensional parameters."""
    down = module._parameters.get("down_proj")  # noqa: SLF001 - as above
    has_quantised = "down_proj" in getattr(module, "parametrizations", ())
    # Stage 3 of ZeRO leaves an empty parameter, beside which DeepSpeed keeps the shape.
    return has_quantised or (down is not None and len(getattr(down, "ds_shape", down.shape)) == 3)


def linear_with(
    weight: nn.Parameter, bias: nn.Parameter | None, kind: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """Make a linear layer of a matrix (outputs, inputs) and a bias, without a copy."""
    outputs, inputs = weight.shape
    linear = kind(inputs, outputs, bias=False, device="meta")
    linear.weight = weight
    linear.bias = bias  # type: ignore[assignment] # None for a layer without a bias
    return linear


def _places(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, str]]:
    """Parents and names of matching modules; the modules themselves would keep weights alive."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if wanted(child):
                yield parent, name


@cache
def _with_linear(router: type[nn.Module]) -> type[nn.Module]:
    """Subclass of a router with its matrix in ``router_linear``."""

    def stand_in(name: str) -> property:
        return property(lambda self: _Parameter(self.router_linear, name))

    return type(router.__name__, (router,), {n: stand_in(n) for n in ("weight", "bias")})


def _split_experts(fused: Any) -> Iterator[Expert]:
    """Separate experts, each with a copy of its part, so that the fused parameters can be freed."""
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
    return linear_with(
        own, None if bias is None else nn.Parameter(bias.clone(memory_format=layout))
    )
