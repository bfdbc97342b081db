"""Makes the experts of a mixture-of-experts model what a recipe needs, whatever the model.

transformers keeps the experts of a layer as fused three-dimensional parameters, and routers as bare
matrices. That is what its grouped matrix product needs. bitsandbytes does not quantise such
parameters and LoRA on linear modules does not see them, so for those they are taken apart here: one
linear layer for each expert and projection, as the paper ran it (2408.04693), and one for the
router. The blocks around them stay those of transformers. The names end in ``_linear`` because PEFT
rewrites the usual ones (``gate``, ``w1``, ``gate_proj``, …) of such models to the fused parameters
that are no longer there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trials.recipe import Experts

# transformers' names of its implementations; the loop here starts from its plain one.
IMPLEMENTATIONS: dict[Experts | None, str] = {
    "grouped": "grouped_mm",
    "looped": "eager",
    None: "eager",
}
# Routers that take the best of a softmax. The first scales their weights to sum to one always, the
# others where norm_topk_prob says so, and give them back in the dtype of the model.
ALWAYS_SCALED = frozenset({"MixtralTopKRouter"})
SCALED_IF_ASKED = frozenset(
    {"FlexOlmoTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"}
)


class ExpertsError(ValueError):
    """The experts of a model cannot be taken apart exactly."""


class GatedExpert(nn.Module):
    """One expert: ``down(act(gate(x)) * up(x))``."""

    def __init__(
        self,
        activation: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_linear = _linear(gate)
        self.up_linear = _linear(up)
        self.down_linear = _linear(down)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (n, hidden) to tokens (n, hidden)."""
        gated = self.activation(self.gate_linear(tokens)) * self.up_linear(tokens)
        return self.down_linear(gated)  # type: ignore[no-any-return]


class LoopedExperts(nn.ModuleList):
    """Experts one after another, each on the tokens routed to it."""

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
        for index, expert in enumerate(self):
            token, slot = torch.where(top_k_index == index)
            if token.numel() == 0:
                continue
            share = expert(hidden_states[token]) * top_k_weights[token, slot, None]
            mixed.index_add_(0, token, share.to(mixed.dtype))
        return mixed


class LinearRouter(nn.Module):
    """A softmax router whose matrix is a linear layer, which can carry an adapter."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.top_k = router.top_k
        self.router_linear = _linear(router.weight)  # type: ignore[arg-type]
        self._always_scaled = type(router).__name__ in ALWAYS_SCALED
        self._scaled = self._always_scaled or bool(router.norm_topk_prob)

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens (…, hidden) to logits (n, experts), weights (n, k) and experts (n, k)."""
        logits = self.router_linear(hidden_states.reshape(-1, hidden_states.shape[-1]))
        weights, chosen = logits.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self._scaled:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights if self._always_scaled else weights.to(logits.dtype), chosen


def loop_experts(model: nn.Module) -> None:
    """Takes every fused experts module of a model apart, in place, on the meta device or not.

    Raises:
        ExpertsError: they compute something a loop over gated experts does not.
    """
    for parent, name, experts in list(_children(model, _is_fused)):
        unlike = [
            wanted
            for wanted, holds in (
                ("gated", getattr(experts, "has_gate", True)),
                ("without biases", not getattr(experts, "has_bias", False)),
                ("without norms of their own", not getattr(experts, "has_post_expert_norm", False)),
                ("stored as (experts, outputs, inputs)", not getattr(experts, "is_transposed", 0)),
                ("with gate and up side by side", getattr(experts, "is_concatenated", True)),
                ("with the plain gate", _gate_of(experts) == "_default_apply_gate"),
            )
            if not holds
        ]
        if unlike:
            raise ExpertsError(
                f"experts looped: {type(experts).__name__} is not {', not '.join(unlike)}: "
                "use experts: grouped"
            )
        with torch.no_grad():
            setattr(parent, name, LoopedExperts(_apart(experts)))


def linear_routers(model: nn.Module) -> None:
    """Makes a linear layer of every router's matrix, in place, on the meta device or not.

    Raises:
        ExpertsError: a router decides by another rule than the best of a softmax.
    """
    for parent, name, router in list(_children(model, is_router)):
        if type(router).__name__ not in ALWAYS_SCALED | SCALED_IF_ASKED:
            raise ExpertsError(
                f"lora_targets router: {type(router).__name__} cannot carry an adapter here: "
                "adapt experts and attention instead"
            )
        setattr(parent, name, LinearRouter(router))


def experts_implementation(experts: Experts | None) -> str:
    """What transformers calls the implementation to start from."""
    return IMPLEMENTATIONS[experts]


def experts_in_use(model: nn.Module) -> str | None:
    """How a built model computes its experts; None for one without experts."""
    kinds = set()
    for module in model.modules():
        if isinstance(module, LoopedExperts):
            kinds.add("looped")
        elif _is_fused(module):
            found = str(module.config._experts_implementation)  # type: ignore[union-attr] # noqa: SLF001
            kinds.add("grouped" if found == IMPLEMENTATIONS["grouped"] else found)
    return " and ".join(sorted(kinds)) or None


def is_router(module: nn.Module) -> bool:
    """Whether this is a router of transformers: a bare matrix (experts, hidden) and a rule."""
    weight = module._parameters.get("weight")  # noqa: SLF001 - a property would build it anew
    return "router" in type(module).__name__.lower() and weight is not None and weight.dim() == 2


def _is_fused(module: nn.Module) -> bool:
    down = module._parameters.get("down_proj")  # noqa: SLF001 - as above
    return down is not None and down.dim() == 3


def _children(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if wanted(child):
                yield parent, name, child


def _gate_of(experts: nn.Module) -> str:
    kind: Any = type(experts)
    return str(kind._apply_gate.__name__)  # noqa: SLF001 - the decorator of transformers puts it there


def _apart(experts: nn.Module) -> Iterator[GatedExpert]:
    """Experts by themselves. Each holds a copy of its part, so the fused whole can be let go."""
    fused: dict[str, torch.Tensor] = dict(experts.named_parameters(recurse=False))
    for gate_up, down in zip(fused["gate_up_proj"], fused["down_proj"], strict=True):
        gate, up = gate_up.chunk(2)
        yield GatedExpert(experts.act_fn, gate.clone(), up.clone(), down.clone())  # type: ignore[arg-type]


def _linear(weight: torch.Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return linear
