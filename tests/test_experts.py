"""Experts taken apart or grouped compute what transformers' own blocks compute."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
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

HIDDEN, WIDTH, EXPERTS = 16, 24, 8
BLOCKS = {
    "mixtral": (MixtralSparseMoeBlock, {"num_local_experts": EXPERTS}),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "olmoe": (OlmoeSparseMoeBlock, {"num_experts": EXPERTS, "norm_topk_prob": False}),
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        {"num_experts": EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 8},
    ),
}


def block(family: str, active: int, implementation: str = "eager") -> nn.Module:
    """A transformers block of experts with random weights, alike for every implementation."""
    kind, particulars = BLOCKS[family]
    config = AutoConfig.for_model(
        family,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_experts_per_tok=active,
        **particulars,
    )
    config._experts_implementation = implementation
    made: nn.Module = kind(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def passed(through: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out of a block, and the gradient that comes back to its input."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 5, HIDDEN, generator=generator).requires_grad_()
    output = through(inputs)
    # The gradient that comes in, different everywhere.
    output.backward(torch.randn(output.shape, generator=generator))
    assert inputs.grad is not None
    return output, inputs.grad


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Of the router's matrix and of every expert's three."""
    router = ours.gate.router_linear if hasattr(ours.gate, "router_linear") else ours.gate  # type: ignore[union-attr]
    torch.testing.assert_close(router.weight.grad, theirs.gate.weight.grad)  # type: ignore[union-attr]
    for index, expert in enumerate(ours.experts):  # type: ignore[arg-type]
        gate, up = theirs.experts.gate_up_proj.grad[index].chunk(2)  # type: ignore[union-attr, index]
        down = theirs.experts.down_proj.grad[index]  # type: ignore[union-attr, index]
        for linear, fused in (
            (expert.gate_linear, gate),
            (expert.up_linear, up),
            (expert.down_linear, down),
        ):
            mine = linear.weight.grad
            # Fused, an expert no token reaches has a gradient of zero; by itself it has none.
            torch.testing.assert_close(torch.zeros_like(fused) if mine is None else mine, fused)


@pytest.mark.parametrize("linear_router", [False, True])
@pytest.mark.parametrize("active", [1, 2, EXPERTS])
@pytest.mark.parametrize("family", BLOCKS)
def test_looped_experts_equal_those_of_transformers(
    family: str,
    active: int,
    linear_router: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Outputs, and the gradients of the input, the router and every expert's three matrices."""
    theirs, ours = block(family, active), nn.ModuleDict({"block": block(family, active)})
    loop_experts(ours)
    if linear_router:
        linear_routers(ours)
    for mine, other in zip(passed(ours["block"]), passed(theirs), strict=True):
        torch.testing.assert_close(mine, other)
    assert_same_gradients(ours["block"], theirs)


@pytest.mark.parametrize("active", [1, 2, EXPERTS])
@pytest.mark.parametrize("family", BLOCKS)
def test_grouped_experts_equal_those_of_transformers(family: str, active: int) -> None:
    """The grouped matrix product is another way to the same numbers."""
    theirs, ours = block(family, active), block(family, active, experts_implementation("grouped"))
    for mine, other in zip(passed(ours), passed(theirs), strict=True):
        torch.testing.assert_close(mine, other)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_an_expert_no_token_is_routed_to_takes_no_part() -> None:
    """One token to two of eight experts leaves six without a gradient."""
    ours = nn.ModuleDict({"block": block("mixtral", active=2)})
    loop_experts(ours)
    ours["block"](torch.randn(1, 1, HIDDEN)).sum().backward()
    routed = [e.down_linear.weight.grad is not None for e in ours["block"].experts]  # type: ignore[union-attr]
    assert routed.count(True) == 2


def test_the_implementation_in_use_is_told_from_the_modules() -> None:
    """What the record says, whatever was asked for."""
    looped = nn.ModuleDict({"block": block("olmoe", 2)})
    loop_experts(looped)
    assert experts_in_use(looped) == "looped"
    assert experts_in_use(block("olmoe", 2, "grouped_mm")) == "grouped"
    assert experts_in_use(block("olmoe", 2)) == "eager"
    assert experts_in_use(nn.Linear(2, 2)) is None


def test_experts_are_taken_apart_where_they_have_no_weights_yet() -> None:
    """On the meta device a model of any size costs nothing."""
    with torch.device("meta"):
        laid_out = nn.ModuleDict({"block": block("mixtral", 2)})
    loop_experts(laid_out)
    linear_routers(laid_out)
    assert all(parameter.is_meta for parameter in laid_out.parameters())
    assert sum(p.numel() for p in laid_out.parameters()) == EXPERTS * HIDDEN * (1 + 3 * WIDTH)


def test_a_taken_apart_expert_holds_its_own_weights_alone() -> None:
    """A view of the fused parameter would keep the whole of it alive."""
    apart = nn.ModuleDict({"block": block("mixtral", 2)})
    loop_experts(apart)
    experts = apart["block"].experts
    assert isinstance(experts, LoopedExperts)
    weight = experts[0].down_linear.weight
    assert weight.untyped_storage().nbytes() == weight.numel() * 4


def test_experts_that_compute_something_else_are_refused() -> None:
    """GPT-OSS has biases, a clamped gate and matrices the other way round."""
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS
    )
    with pytest.raises(ExpertsError, match=r"GptOssExperts is not without biases.*use experts: gr"):
        loop_experts(nn.ModuleDict({"block": GptOssMLP(config)}))


def test_routers_that_decide_otherwise_are_refused() -> None:
    """DeepSeek's scores are sigmoids with a bias, and chosen by groups."""
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS
    )
    with pytest.raises(ExpertsError, match="DeepseekV3TopkRouter cannot carry an adapter here"):
        linear_routers(nn.ModuleDict({"block": DeepseekV3MoE(config)}))
