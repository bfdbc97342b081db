"""Adapters on experts and routers that were split into linear layers."""

from typing import Any

import pytest
import torch
from builders.observations import recipe

from trials.models.build import build_model
from trials.models.weight_placement import Destination
from trials.records.model import Model

pytestmark = pytest.mark.usefixtures("made_for_small_steps")


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "head_dim": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", MODELS)
def test_adapters_are_on_every_expert_and_router_and_learn(family: str, method: Any) -> None:
    """PEFT adapts every expert and router of any model type, in 4 bits as well.

    All experts are active and layers are checkpointed: every adapter's B has a gradient.
    """
    config = {"model_type": family, **SIZES, **MODELS[family]}
    facts = Model(name="mine", source="this test", config=config)
    tuning_recipe = recipe(
        method,
        lora_targets=("experts", "router"),
        experts="looped",
        attention="eager",
        gradient_checkpointing=True,
    )
    model = build_model(
        facts,
        tuning_recipe,
        active_experts=4,
        weights="random",
        destination=Destination(torch.device("cpu")),
        seed=0,
    )
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    experts = {name for name in adapted if ".experts.each." in name}
    routers = {name for name in adapted if name.endswith(".router_linear")}
    assert adapted == experts | routers
    assert (len(experts), len(routers)) == (2 * 4 * 3, 2)
    four_bit = [p for p in model.parameters() if getattr(p, "quant_state", None) is not None]
    assert bool(four_bit) is (method == "qlora")
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    learning = {
        name.rpartition(".lora_B")[0]
        for name, p in model.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert learning == adapted
