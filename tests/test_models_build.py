"""A model is built layer by layer, from any configuration, identically in every process."""

from typing import Literal

import pytest
import torch
from builders.observations import cpu, recipe, tiny_cell
from torch import nn

from trials.devices.live_tensors import LiveTensorCounter
from trials.models.build import FamilyError, KernelError, build_model
from trials.models.weight_placement import Destination, decoder_layers
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model, find_model
from trials.simulation.tracing.kernels.fused_heads import give_head
from trials.training.finetune import FineTuning
from trials.training.recipe_check import OFFLOADED_OPTIMIZER_CLASS, departures

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CPU = torch.device("cpu")


def built(model: Model, tuning_recipe: Recipe, seed: int = 0) -> nn.Module:
    """A model built under a recipe."""
    made = with_defaults(tuning_recipe, model, cpu())
    return build_model(
        model,
        made,
        active_experts=model.active_experts,
        weights="random",
        destination=Destination(CPU),
        seed=seed,
    )


def deeper(name: str, layers: int) -> Model:
    """A preset with another number of layers."""
    model = find_model(name)
    return model.model_copy(update={"config": model.config | {"num_hidden_layers": layers}})


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, without 4-bit constants."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny"])
def test_building_a_4_bit_model_never_holds_it_unquantised(name: str) -> None:
    """The peak while building exceeds the finished model by about one layer."""
    model = deeper(name, layers=10)
    whole = built(model, recipe("full"))
    layer = bytes_of(decoder_layers(whole)[0])
    with LiveTensorCounter([], 2**40) as counter:
        finished = built(model, recipe("qlora"))
    constants = sum(len(s.state2.absmax) * 4 + 2048 for s in _states(finished))
    scales = sum(s.absmax.numel() for s in _states(finished))
    # Half of a second layer for what a quantising kernel takes in passing.
    assert counter.peak_bytes < bytes_of(finished) + constants + scales + 1.5 * layer
    assert counter.peak_bytes < 0.6 * bytes_of(whole)


def _states(model: nn.Module) -> list[object]:
    return [p.quant_state for p in model.parameters() if getattr(p, "quant_state", None)]


def test_weights_follow_from_the_seed() -> None:
    """Weights depend on the seed alone; norms are ones."""
    model = find_model("mixtral-tiny")
    one, same, other = (built(model, recipe("full"), seed) for seed in (1, 1, 2))
    pairs = zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True)
    for (name, first), again, different in pairs:
        assert torch.equal(first, again)
        assert torch.equal(first, different) is ("norm" in name), name
    assert set(one.model.norm.weight.tolist()) == {1.0}  # type: ignore[union-attr, operator]


def test_tied_weights_stay_one_parameter() -> None:
    """BlackMamba's output head and its embedding are one tensor."""
    made = built(find_model("blackmamba-tiny"), recipe("full"))
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight  # type: ignore[operator]


def config(family: str, **fields: object) -> Model:
    """A tiny model of a family without a preset."""
    sizes: dict[str, object] = {
        "model_type": family,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return Model(name=family, source="made for this test", config=sizes | fields)  # type: ignore[arg-type]


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
OTHERS = [
    config("qwen2"),
    config("qwen3", head_dim=32),
    config("mistral", sliding_window=None),
    config("phi3"),
    config("gpt_neox"),
    config("stablelm"),
    config("qwen2_moe", **MOE),
    config(
        "deepseek_v3",
        **DEEPSEEK,
    ),
]


@pytest.mark.parametrize(
    "tuning_recipe", [recipe("full"), recipe("qlora"), recipe("lora", precision="bf16")]
)
@pytest.mark.parametrize("model", OTHERS, ids=lambda model: model.name)
def test_any_causal_language_model_is_built_by_its_configuration(
    model: Model, tuning_recipe: Recipe
) -> None:
    """Biases, tied heads, fused projections, shared experts: the counts hold and a step runs."""
    cell = Cell(
        gpu="cpu",
        model=model.name,
        recipe=with_defaults(tuning_recipe, model, cpu()),
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=8,
    )
    tuning = FineTuning(cell, model, device=CPU, seed=0)
    assert departures(cell.recipe, tuning.built(), tuning.implied()) == []


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe"])
def test_every_linear_layer_is_adapted_whatever_the_models_type(name: str) -> None:
    """PEFT has defaults for these types and would skip the shared experts."""
    (model,) = [model for model in OTHERS if model.name == name]
    tuning_recipe = with_defaults(recipe("lora", lora_targets=("all-linear",)), model, cpu())
    cell = Cell(
        gpu="cpu",
        model=name,
        recipe=tuning_recipe,
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=8,
    )
    tuning = FineTuning(cell, model, device=CPU, seed=0)
    assert departures(tuning_recipe, tuning.built(), tuning.implied()) == []
    assert tuning.model.config.model_type == name  # type: ignore[union-attr]


def test_an_unsupported_attention_kernel_is_an_error_with_alternatives() -> None:
    """Gemma 2 caps its attention scores, which sdpa does not support."""
    gemma = config("gemma2", head_dim=16, query_pre_attn_scalar=16)
    with pytest.raises(
        KernelError,
        match=r"attention sdpa: gemma2 cannot have it.*: use eager or flash_attention_2$",
    ):
        built(gemma, recipe("full"))
    assert decoder_layers(built(gemma, recipe("full", attention="eager")))


@pytest.mark.parametrize(
    ("method", "saved", "reason"),
    [
        ("lora", "wq", "modules_to_save wq: .* lm_head, "),
        ("qlora", "q_proj", "q_proj is quantised"),
        ("lora", "mlp,up_proj", "up_proj is part of .*mlp"),
    ],
)
def test_a_module_that_cannot_be_trained_in_full_is_an_error(
    method: Method, saved: str, reason: str
) -> None:
    """No such module, 4-bit weights, a module within another."""
    settings = recipe(method, modules_to_save=tuple(saved.split(",")))
    with pytest.raises(ValueError, match=reason):
        built(find_model("llama-tiny"), settings)


def test_a_target_within_all_linear_is_an_error() -> None:
    """The head and embeddings are not in it."""
    model = find_model("llama-tiny")
    built(model, recipe("lora", lora_targets=("all-linear", "lm_head", "embed_tokens")))
    with pytest.raises(ValueError, match="lora_targets q_proj: all-linear includes it"):
        built(model, recipe("lora", lora_targets=("all-linear", "q_proj")))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_fused_loss_refuses_an_adapter_on_the_head(target: Literal["cpu", "cuda"]) -> None:
    """Its kernel takes the head's own weights; TRL refuses it as well."""
    model = built(find_model("llama-tiny"), recipe("lora", lora_targets=("lm_head",)))
    with pytest.raises(KernelError, match="loss chunked"):
        give_head(model, "chunked", target, ())


def test_an_unknown_lora_target_is_an_error_with_the_valid_ones() -> None:
    """The error lists the module names that the model has."""
    cell = tiny_cell(recipe=recipe("lora", lora_targets=("wq",)))
    with pytest.raises(
        ValueError, match=r"lora_targets wq: .* it has down_proj, embed_tokens, gate_proj, k_pr"
    ):
        FineTuning(cell, find_model("llama-tiny"), device=CPU, seed=0)


@pytest.mark.parametrize("name", ["blackmamba-tiny", "olmoe-tiny"])
def test_a_reward_model_needs_a_sequence_classification_model(name: str) -> None:
    """A model of which transformers has none is refused by name."""
    with pytest.raises(FamilyError, match=name):
        built(find_model(name), recipe("full", task="reward"))


def test_an_update_on_the_host_is_by_deepspeeds_optimizer() -> None:
    """PyTorch's, which another layout has, is then another one than the layout implies."""
    cell = tiny_cell(recipe=recipe("full"))
    tuning = FineTuning(cell, find_model(cell.model), device=CPU, seed=0)
    own, implied = tuning.built(), tuning.implied()
    by_deepspeed = own.model_copy(update={"optimizer": OFFLOADED_OPTIMIZER_CLASS})
    for built, is_offloaded in ((own, False), (by_deepspeed, True)):
        assert departures(cell.recipe, built, implied, is_offloaded=is_offloaded) == []
        (wrong,) = departures(cell.recipe, built, implied, is_offloaded=not is_offloaded)
        assert wrong.startswith("optimizer: ")
