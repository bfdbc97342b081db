"""Looped and grouped experts compute what transformers computes, and carry adapters."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Llama4TextConfig, PhimoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    OpenAIPrivacyFilterMLP,
)
from transformers.models.phimoe.modeling_phimoe import PhimoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trials.models.experts import (
    ExpertsError,
    LoopedExperts,
    experts_implementation,
    experts_in_use,
    linear_routers,
    loop_experts,
)

pytestmark = pytest.mark.usefixtures("made_for_small_steps")

HIDDEN, WIDTH, EXPERTS = 16, 24, 8
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
# Each family has something the others have not: weights scaled or not, a shared expert beside them,
# sigmoids chosen by groups, biases and a clamped gate with its sides interleaved or one after
# the other, matrices the other way round.
BLOCKS: dict[str, tuple[Any, dict[str, object]]] = {
    "mixtral": (MixtralSparseMoeBlock, {"num_local_experts": EXPERTS}),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, {**QWEN, "norm_topk_prob": True}),
    "qwen3_moe unscaled": (Qwen3MoeSparseMoeBlock, {**QWEN, "norm_topk_prob": False}),
    "olmoe": (OlmoeSparseMoeBlock, {"num_experts": EXPERTS, "norm_topk_prob": False}),
    "olmoe scaled": (OlmoeSparseMoeBlock, {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "qwen2_moe": (Qwen2MoeSparseMoeBlock, {**QWEN, "shared_expert_intermediate_size": 8}),
    "deepseek_v3": (
        DeepseekV3MoE,
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": WIDTH,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss": (GptOssMLP, {"num_local_experts": EXPERTS}),
    "openai_privacy_filter": (OpenAIPrivacyFilterMLP, {"num_local_experts": EXPERTS}),
}


def drawn(module: nn.Module) -> nn.Module:
    """Fill a module with random weights, the same for every copy."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def block(family: str, active: int, implementation: str = "eager") -> nn.Module:
    """A transformers block of experts."""
    kind, particulars = BLOCKS[family]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_experts_per_tok": active}
    config = AutoConfig.for_model(family.partition(" ")[0], **sizes | particulars)
    config._experts_implementation = implementation
    return drawn(kind(config))


def looped(made: nn.Module, *, linear_router: bool = True) -> nn.Module:
    """A block whose experts are separate linear layers."""
    whole = nn.ModuleDict({"block": made})
    loop_experts(whole)
    if linear_router:
        linear_routers(whole)
    return whole["block"]


def router_of(made: nn.Module) -> Any:
    """Router of a block; families call it ``gate`` or ``router``."""
    return made.gate if hasattr(made, "gate") else made.router


def forward_backward(
    through: nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Output of a block and the gradient of its input."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 5, HIDDEN, generator=generator).to(dtype).requires_grad_()
    output = through(inputs)
    output = output[0] if isinstance(output, tuple) else output  # some hand on their routing
    # The gradient that comes in, different everywhere.
    output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    assert inputs.grad is not None
    return output, inputs.grad


def fused_gradients(experts: Any, index: int) -> dict[str, torch.Tensor]:
    """Gradients of one expert's part of the fused parameters, by the linear layers' names."""
    down = experts.down_proj.grad[index]
    both = experts.gate_up_proj.grad[index]
    both, down = (both.T, down.T) if experts.is_transposed else (both, down)
    sides = {"weight": both}
    gradients = {"down_linear.weight": down}
    if experts.has_bias:
        sides["bias"] = experts.gate_up_proj_bias.grad[index]
        gradients["down_linear.bias"] = experts.down_proj_bias.grad[index]
    for name, side in sides.items():
        gate, up = side.chunk(2) if experts.is_concatenated else (side[::2], side[1::2])
        gradients |= {f"gate_linear.{name}": gate, f"up_linear.{name}": up}
    return gradients


def assert_same_gradients(ours: Any, theirs: Any) -> None:
    """Compare the gradients of every expert's matrices and biases, and of the router."""
    for index, expert in enumerate(ours.experts.each):
        expected = fused_gradients(theirs.experts, index)
        own = {name: parameter.grad for name, parameter in expert.named_parameters()}
        # Fused, an expert no token reaches has a gradient of zero; by itself it has none.
        full = {n: torch.zeros_like(expected[n]) if g is None else g for n, g in own.items()}
        torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-5)
    router = router_of(ours)
    linear = getattr(router, "router_linear", router)
    for name, parameter in router_of(theirs).named_parameters():
        torch.testing.assert_close(linear.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("linear_router", [False, True])
@pytest.mark.parametrize("active", [1, 2, EXPERTS])
@pytest.mark.parametrize("family", BLOCKS)
def test_looped_experts_equal_those_of_transformers(
    family: str,
    active: int,
    linear_router: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Outputs and the gradients of the input, the router and every expert's matrices are equal."""
    theirs = block(family, active)
    ours = looped(block(family, active), linear_router=linear_router)
    torch.testing.assert_close(
        forward_backward(ours), forward_backward(theirs), rtol=1e-5, atol=1e-5
    )
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3", "gpt_oss"])
def test_looped_experts_equal_those_of_transformers_in_bf16(family: str) -> None:
    """The router's fp32 weights do not turn the rest into fp32; its choices are the same."""
    theirs, ours = block(family, 2).bfloat16(), looped(block(family, 2)).bfloat16()
    tokens = torch.randn(6, HIDDEN).bfloat16()
    for own, other in zip(router_of(ours)(tokens), router_of(theirs)(tokens), strict=True):
        assert torch.equal(own, other)
        assert own.dtype == other.dtype
    ours_passed, theirs_passed = (forward_backward(m, torch.bfloat16) for m in (ours, theirs))
    torch.testing.assert_close(ours_passed, theirs_passed, rtol=5e-2, atol=5e-2)


def test_looped_experts_run_under_autocast() -> None:
    """Under autocast, as in fp16 recipes, weights stay fp32 and products do not."""
    theirs, ours = block("mixtral", 2), looped(block("mixtral", 2))
    with torch.autocast("cpu", torch.bfloat16):
        results = [forward_backward(made) for made in (ours, theirs)]
    torch.testing.assert_close(results[0], results[1], rtol=5e-2, atol=5e-2)
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("active", [1, 2, EXPERTS])
@pytest.mark.parametrize("family", BLOCKS)
def test_grouped_experts_equal_those_of_transformers(family: str, active: int) -> None:
    """The grouped matrix product gives the same outputs and gradients."""
    theirs, ours = block(family, active), block(family, active, experts_implementation("grouped"))
    torch.testing.assert_close(
        forward_backward(ours), forward_backward(theirs), rtol=1e-5, atol=1e-5
    )
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_experts_without_a_gate_equal_those_of_transformers() -> None:
    """Nemotron-H has two matrices per expert."""
    config = AutoConfig.for_model(
        "nemotron_h", hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS
    )
    config._experts_implementation = "eager"
    theirs = drawn(NemotronHExperts(config))
    ours: Any = looped(copy.deepcopy(theirs), linear_router=False)
    tokens, weights = torch.randn(6, HIDDEN), torch.rand(6, 2)
    chosen = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(6)])
    results = [experts(tokens, chosen, weights) for experts in (ours, theirs)]
    torch.testing.assert_close(*results)
    names = {name for name, _ in ours.each[0].named_parameters()}
    assert names == {"up_linear.weight", "down_linear.weight"}


def test_an_expert_without_tokens_has_no_gradient() -> None:
    """One token routed to two of eight experts leaves six without a gradient."""
    ours: Any = looped(block("mixtral", active=2))
    ours(torch.randn(1, 1, HIDDEN)).sum().backward()
    routed = [expert.down_linear.weight.grad is not None for expert in ours.experts.each]
    assert routed.count(True) == 2


def test_the_implementation_in_use_is_read_from_the_modules() -> None:
    """The record names the implementation that runs, whatever was requested."""
    assert experts_in_use(looped(block("olmoe", 2))) == "looped"
    assert experts_in_use(block("olmoe", 2, "grouped_mm")) == "grouped"
    assert experts_in_use(block("olmoe", 2)) == "eager"
    assert experts_in_use(nn.ModuleList([block("olmoe", 2), looped(block("olmoe", 2))])) == (
        "eager and looped"
    )
    assert experts_in_use(nn.Linear(2, 2)) is None


def test_experts_are_looped_on_the_meta_device() -> None:
    """On the meta device a model of any size takes no memory."""
    with torch.device("meta"):
        laid_out = block("mixtral", 2)
    laid_out = looped(laid_out)
    assert all(parameter.is_meta for parameter in laid_out.parameters())
    assert sum(p.numel() for p in laid_out.parameters()) == EXPERTS * HIDDEN * (1 + 3 * WIDTH)


def test_a_looped_expert_owns_its_weights() -> None:
    """A view of the fused parameter would keep all of it alive."""
    for family in ("mixtral", "gpt_oss"):
        experts = looped(block(family, 2)).experts
        assert isinstance(experts, LoopedExperts)
        for weight in experts.parameters():
            assert weight.untyped_storage().nbytes() == weight.numel() * 4
            assert weight.is_contiguous()


def tiny_mixtral(**particulars: object) -> Any:
    """Configuration of a Mixtral with three layers."""
    return AutoConfig.for_model(
        "mixtral",
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=4,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        **particulars,
    )


def test_at_most_one_layer_is_in_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's fused weights are freed before the next layer is converted."""
    model = AutoModelForCausalLM.from_config(tiny_mixtral())
    fused = [weakref.ref(layer.mlp.experts.down_proj) for layer in model.model.layers]
    alive: list[int] = []
    take_apart = LoopedExperts.__init__

    def watched(self: LoopedExperts, whole: nn.Module) -> None:
        alive.append(sum(weights() is not None for weights in fused))
        take_apart(self, whole)

    monkeypatch.setattr(LoopedExperts, "__init__", watched)
    loop_experts(model)
    assert alive == [3, 2, 1]
    assert all(weights() is None for weights in fused)


def test_the_auxiliary_loss_equals_that_of_transformers() -> None:
    """Transformers finds router logits by class; a linear layer inside the router keeps them."""
    config = tiny_mixtral(output_router_logits=True)
    theirs = drawn(AutoModelForCausalLM.from_config(config))
    ours = copy.deepcopy(theirs)
    loop_experts(ours)
    linear_routers(ours)
    tokens = torch.arange(8)[None]
    own, other = (model(input_ids=tokens, labels=tokens) for model in (ours, theirs))
    assert own.aux_loss > 0
    torch.testing.assert_close((own.loss, own.aux_loss), (other.loss, other.aux_loss))


def test_a_linear_router_can_still_be_initialised() -> None:
    """Initialising a router by its class reaches the matrix in its linear layer."""
    model = AutoModelForCausalLM.from_config(tiny_mixtral(initializer_range=0.5))
    linear_routers(model)
    router = model.model.layers[0].mlp.gate
    before = router.router_linear.weight.detach().clone()
    with torch.no_grad():
        model._init_weights(router)
    drawn_again = router.router_linear.weight.detach()
    assert isinstance(router, MixtralTopKRouter)
    assert not torch.equal(drawn_again, before)
    assert 0.3 < float(drawn_again.std()) < 0.7


def test_a_router_that_would_bypass_its_adapter_is_an_error() -> None:
    """Only a linear product goes through the adapted layer."""

    class OddRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.mm(tokens, self.weight)

    odd = nn.ModuleDict({"router": OddRouter()})
    linear_routers(odd)
    with pytest.raises(ExpertsError, match="takes its matrix to mm, past an adapter"):
        odd["router"](torch.ones(3, 2))


def test_unusual_experts_are_refused() -> None:
    """Llama 4 has one implementation only; an unknown parameter would be lost."""
    config = Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=4)
    own_way = nn.ModuleDict({"experts": Llama4TextExperts(config)})
    assert experts_in_use(own_way) == "all-tokens"
    with pytest.raises(ExpertsError, match=r"Llama4TextExperts .* one way only"):
        loop_experts(own_way)
    odd: Any = block("mixtral", 2)
    odd.experts.scale = nn.Parameter(torch.ones(EXPERTS))
    with pytest.raises(ExpertsError, match=r"MixtralExperts also holds scale: use experts: gr"):
        looped(odd)


def test_a_router_that_is_a_linear_layer_itself_is_refused() -> None:
    """PhiMoE's router subclasses Linear and returns more than a product."""
    config = PhimoeConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=4)
    with pytest.raises(ExpertsError, match="PhimoeTopKRouter cannot carry an adapter"):
        linear_routers(nn.ModuleDict({"block": PhimoeSparseMoeBlock(config)}))
