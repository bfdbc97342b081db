"""Recipes: valid combinations, defaults, and the keys in records."""

import pytest
from builders.recipes import RECIPES
from hypothesis import given
from pydantic import ValidationError

from trials.recipes.fields import Method, Precision
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.recipe import Recipe


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (Recipe(method="full"), "full-bf16"),
        (Recipe(method="full", precision="fp32"), "full-fp32"),
        (Recipe(method="lora", lora_rank=8), "lora-r8-bf16"),
        (
            Recipe(method="qlora", lora_rank=16, gradient_checkpointing="reentrant"),  # not int8
            "qlora-r16-bf16-checkpointed",
        ),
        (
            Recipe(method="full", gradient_checkpointing="reentrant"),
            "full-bf16-checkpointed-reentrant",
        ),
        (
            Recipe(
                method="qlora",
                lora_rank=64,
                lora_alpha=16,
                lora_dropout=0.1,
                lora_targets=("experts", "router"),
                double_quantisation=False,
                precision="fp16",
                gradient_checkpointing=True,
                attention="flash_attention_2",
                experts="looped",
                optimizer="paged_adamw_8bit",
            ),
            (
                "qlora-r64-alpha16-dropout0.1-experts+router-singly-quantised-fp16-checkpointed-"
                "flash_attention_2-looped-paged_adamw_8bit"
            ),
        ),
        (
            Recipe(method="full", mamba="mamba-ssm", offload_optimizer=True),
            "full-bf16-mamba-ssm-offloaded",
        ),
        (
            Recipe(
                method="qlora",
                lora_rank=8,
                adapter_dtype="bf16",
                kbit_preparation=True,
                precision="bf16-mixed",
                optimizer="adamw_foreach",
                effective_batch=16,
                max_grad_norm=1.0,
            ),
            "qlora-r8-bf16-adapters-kbit-prepared-bf16-mixed-adamw_foreach-effective16-clip1",
        ),
        (
            Recipe(
                method="lora", lora_rank=8, dora=True, modules_to_save=("embed_tokens", "lm_head")
            ),
            "lora-r8-dora-saved-embed_tokens+lm_head-bf16",
        ),
        (
            Recipe(method="full", precision="fp32-mixed-load", gradient_accumulation=4),
            "full-fp32-mixed-load-accumulation4",
        ),
    ],
)
def test_recipe_keys_are_stable(recipe: Recipe, key: str) -> None:
    """Last year's records have the same keys this year."""
    assert recipe.key == key


FIRST_CHOICES = {"attention": "sdpa", "mamba": "reference"}


def spelt_out(recipe: Recipe) -> Recipe:
    """Fill in the first choice of the axes that a key omits."""
    given = recipe.model_dump(exclude_none=True)
    return Recipe.model_validate(FIRST_CHOICES | given)


@given(RECIPES, RECIPES)
def test_recipes_share_a_key_only_when_they_are_equal(one: Recipe, other: Recipe) -> None:
    """The key includes every field of a recipe."""
    assert (one.key == other.key) == (spelt_out(one) == spelt_out(other))


@given(RECIPES)
def test_a_recipe_survives_a_round_trip_through_json(recipe: Recipe) -> None:
    """Defaults that were filled in are not filled in again differently."""
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_defaults_follow_from_the_method() -> None:
    """Alpha is twice the rank, dropout is zero, weights are NF4, doubly quantised."""
    recipe = Recipe(method="qlora", lora_rank=8)
    assert recipe.quantisation == "nf4"
    assert (recipe.lora_alpha, recipe.lora_dropout) == (16, 0.0)
    assert recipe.double_quantisation is True
    assert Recipe(method="lora", lora_rank=8).double_quantisation is None
    in_8_bits = Recipe(method="qlora", lora_rank=8, quantisation="int8")
    assert in_8_bits.double_quantisation is None
    assert in_8_bits.key == "qlora-r8-int8-bf16"
    assert Recipe(method="full").lora_alpha is None


def test_dpo_has_the_reference_and_the_loss_of_its_trainer() -> None:
    """TRL turns adapters off where there are any, and else loads a second model."""
    full = Recipe(method="full", task="dpo")
    assert (full.key, full.loss) == ("full-dpo-separate-reference-bf16", "chunked")
    lora = Recipe(method="lora", lora_rank=8, task="dpo")
    assert (lora.key, lora.sequences) == ("lora-dpo-adapter-off-reference-r8-bf16", 2)
    assert Recipe(method="full", task="kto").sequences == 1


def test_orpo_takes_pairs_and_all_logits_without_a_reference() -> None:
    """TRL's trainer has neither a reference nor a fused head."""
    full = Recipe(method="full", task="orpo")
    assert (full.key, full.loss, full.reference) == ("full-orpo-bf16", "full-logits", None)
    assert (full.sequences, full.extras) == (2, ("trl",))


def test_a_reward_model_takes_pairs_and_has_no_logits() -> None:
    """Its score is trained in full beside adapters, like the modules that a recipe names."""
    full = Recipe(method="full", task="reward")
    assert (full.key, full.loss, full.sequences) == ("full-reward-bf16", None, 2)
    assert (full.extras, full.copied_modules) == ((), ())
    lora = Recipe(method="lora", lora_rank=8, task="reward", modules_to_save=("embed_tokens",))
    assert lora.copied_modules == ("embed_tokens", "score")
    assert Recipe.model_validate_json(full.model_dump_json()) == full


def test_grpo_leaves_vllm_its_share_and_has_no_reference_unless_one_is_given() -> None:
    """TRL's defaults are a share of 0.3 and a beta of 0; its trainer keeps dropout."""
    full = Recipe(method="full", task="grpo")
    assert (full.key, full.loss, full.reference) == ("full-grpo-bf16", "chunked", None)
    assert (full.generation_share, full.sequences, full.extras) == (0.3, 1, ("trl",))
    assert full.left_out is not None
    assert Recipe(method="full").left_out is None
    alone = Recipe(method="lora", lora_rank=8, task="grpo", generation_share=0, lora_dropout=0.1)
    assert alone.key == "lora-grpo-r8-dropout0.1-bf16-no-vllm"
    half = Recipe(method="full", task="grpo", reference="separate", generation_share=0.5)
    assert half.key == "full-grpo-separate-reference-bf16-vllm0.5"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "full", "generation_share": 0.3}, "generation_share 0.3 .* sft"),
        ({"method": "full", "task": "grpo", "generation_share": 1.0}, "less than 1"),
        (
            {"method": "lora", "lora_rank": 8, "task": "grpo", "reference": "separate"},
            "reference separate: .* adapter-off",
        ),
        ({"method": "full", "task": "grpo", "reference": "adapter-off"}, "needs adapters"),
        ({"method": "full", "task": "grpo", "reference": "precomputed"}, "separate"),
        ({"method": "full", "lora_rank": 16}, "lora_rank 16 .* method full"),
        (
            {"method": "full", "lora_targets": ("experts",)},
            "lora_targets experts .* method full",
        ),
        ({"method": "lora"}, "method lora needs lora_rank, for example"),
        ({"method": "full", "dora": True}, "dora .* method full"),
        (
            {"method": "qlora", "lora_rank": 8, "dora": True, "offload_optimizer": True},
            "offload_optimizer .* dora",
        ),
        ({"method": "full", "modules_to_save": ("lm_head",)}, "modules_to_save lm_head .* full"),
        (
            {"method": "lora", "lora_rank": 8, "modules_to_save": ("norm", "norm")},
            "modules_to_save .* duplicate",
        ),
        (
            {
                "method": "lora",
                "lora_rank": 8,
                "modules_to_save": ("lm_head",),
                "precision": "fp16",
            },
            "modules_to_save .* fp16",
        ),
        ({"method": "qlora"}, "method qlora needs lora_rank, for example"),
        (
            {"method": "lora", "lora_rank": 8, "double_quantisation": True},
            "double_quantisation .* method lora",
        ),
        (
            {"method": "lora", "lora_rank": 8, "lora_targets": ("q_proj", "q_proj")},
            "duplicate",
        ),
        (
            {"method": "lora", "lora_rank": 8, "lora_targets": ("all-linear", "router")},
            "all-linear includes",
        ),
        (
            {"method": "lora", "lora_rank": 8, "quantisation": "int8"},
            "quantisation .* method lora",
        ),
        (
            {
                "method": "qlora",
                "lora_rank": 8,
                "quantisation": "int8",
                "double_quantisation": True,
            },
            "double_quantisation .* int8",
        ),
        (
            {
                "method": "qlora",
                "lora_rank": 8,
                "quantisation": "int8",
                "kbit_preparation": True,
            },
            "int8 .* bf16-mixed",
        ),
        (
            {"method": "qlora", "lora_rank": 8, "experts": "looped", "quantised_experts": True},
            "quantised_experts .* experts: grouped",
        ),
        (
            {
                "method": "qlora",
                "lora_rank": 8,
                "lora_targets": ("experts",),
                "quantised_experts": True,
            },
            "quantised_experts .* adapters on the experts",
        ),
        (
            {
                "method": "lora",
                "lora_rank": 8,
                "lora_targets": ("experts",),
                "experts": "grouped",
                "lora_dropout": 0.1,
            },
            "lora_dropout .* adapters on grouped experts",
        ),
        ({"method": "full", "reference": "separate"}, "reference separate .* sft"),
        ({"method": "full", "task": "dpo", "reference": "adapter-off"}, "needs adapters"),
        ({"method": "full", "task": "dpo", "loss": "liger"}, "use loss: chunked"),
        ({"method": "full", "task": "dpo", "loss": "eaft"}, "use loss: chunked"),
        ({"method": "full", "loss": "dft", "router_loss": True}, "loss dft has none"),
        ({"method": "full", "task": "reward", "loss": "chunked"}, "loss .* task reward"),
        ({"method": "full", "task": "reward", "reference": "separate"}, "reference .* reward"),
        ({"method": "full", "task": "reward", "packing": True}, "packing .* task reward"),
        (
            {"method": "lora", "lora_rank": 8, "task": "reward", "precision": "fp16"},
            "task reward .* fp16",
        ),
        (
            {
                "method": "lora",
                "lora_rank": 8,
                "task": "reward",
                "precision": "fp32",
                "adapter_dtype": "bf16",
            },
            "adapter_dtype bf16 .* task reward",
        ),
        (
            {"method": "lora", "lora_rank": 8, "task": "dpo", "lora_dropout": 0.1},
            "lora_dropout .* remove it",
        ),
        (
            {"method": "full", "precision": "fp32", "attention": "flash_attention_2"},
            "flash_attention_2 .* bf16 or fp16",
        ),
        (
            {"method": "full", "offload_optimizer": True, "optimizer": "adamw_8bit"},
            "offload_optimizer .* adamw_8bit",
        ),
        (
            {"method": "full", "compile": "model", "activation_offloading": True},
            "compile model with activation_offloading",
        ),
        (
            {"method": "full", "offload_optimizer": True, "activation_offloading": True},
            "activation_offloading .* leave one of them out",
        ),
        ({"method": "full", "adapter_dtype": "fp32"}, "adapter_dtype fp32 .* method full"),
        ({"method": "full", "kbit_preparation": True}, "kbit_preparation .* qlora"),
        (
            {"method": "lora", "lora_rank": 8, "quantised_experts": True},
            "quantised_experts .* qlora",
        ),
        (
            {"method": "full", "effective_batch": 16, "gradient_accumulation": 4},
            "effective_batch 16 .* gradient_accumulation 4",
        ),
        (
            {"method": "full", "offload_optimizer": True, "precision": "bf16-mixed"},
            "offload_optimizer .* bf16-mixed",
        ),
        (
            {"method": "full", "offload_optimizer": True, "precision": "fp16"},
            "offload_optimizer .* fp16",
        ),
    ],
)
def test_conflicting_fields_are_reported(fields: dict[str, object], reason: str) -> None:
    """The message has the wrong value and the remedy."""
    with pytest.raises(ValidationError, match=reason):
        Recipe.model_validate(fields)


def test_all_mistakes_of_a_recipe_are_reported_at_once() -> None:
    """One attempt is enough to see them."""
    with pytest.raises(ValidationError, match=r"lora_rank 4.*\n.*double_quantisation"):
        Recipe(method="full", lora_rank=4, double_quantisation=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "prefix"},
        {"method": "lora", "lora_rank": 0},
        {"method": "lora", "lora_rank": "8"},
        {"method": "lora", "lora_rank": 8, "lora_dropout": 1.0},
        {"method": "lora", "lora_rank": 8, "lora_targets": ()},
        {"method": "lora", "lora_rank": 8, "lora_targets": ("a+b",)},
        {"method": "full", "precision": "fp8"},
        {"method": "full", "gradient_checkpointing": 1},
        {"method": "full", "optimizer": "lion"},
        {"method": "full", "checkpointing": True},
    ],
)
def test_a_recipe_refuses_wrong_types_and_unknown_fields(wrong: dict[str, object]) -> None:
    """They are errors, neither coerced nor dropped."""
    with pytest.raises(ValidationError):
        Recipe.model_validate(wrong)


@pytest.mark.parametrize(
    ("precision", "method", "base", "adapters", "autocast", "products"),
    [
        ("bf16", "lora", "bf16", "bf16", None, "bf16"),
        ("bf16-mixed", "lora", "bf16", "fp32", "bf16", "bf16"),
        ("bf16-mixed", "full", "fp32", None, "bf16", "bf16"),
        ("fp32-mixed-load", "qlora", "fp32", "fp32", "bf16", "bf16"),
        ("fp16", "full", "fp32", None, "fp16", "fp16"),
        ("fp16", "lora", "fp16", "fp32", "fp16", "fp16"),
        ("fp32", "lora", "fp32", "fp32", None, "fp32"),
    ],
)
def test_a_precision_decides_every_dtype(  # noqa: PLR0917 - a column of the table each
    precision: Precision,
    method: Method,
    base: str,
    adapters: str | None,
    autocast: str | None,
    products: str,
) -> None:
    """Trained weights are fp32 wherever autocast runs."""
    recipe = Recipe(method=method, lora_rank=None if method == "full" else 8, precision=precision)
    assert recipe.base_dtype == base
    assert recipe.adapter_dtype == adapters
    assert recipe.autocast == autocast
    assert recipe.compute_dtype == products


def test_micro_batches_reach_the_effective_batch() -> None:
    """A fixed number of micro-batches does not depend on the batch size."""
    assert [Recipe(method="full", gradient_accumulation=4).micro_batches(b) for b in (1, 8)] == [
        4,
        4,
    ]
    sixteen = Recipe(method="full", effective_batch=16)
    assert [sixteen.micro_batches(b) for b in (1, 4, 5, 16)] == [16, 4, 4, 1]
    assert sixteen.batch_limit(1024) == 16
    assert Recipe(method="full").batch_limit(1024) == 1024


def test_the_papers_recipes_are_the_published_ones() -> None:
    """2408.04693, section III: QLoRA of rank 16 on experts and router; full BlackMamba."""
    mixtral = NAMED_RECIPES["paper-mixtral"]
    assert (mixtral.method, mixtral.lora_rank, mixtral.precision) == ("qlora", 16, "bf16")
    assert mixtral.lora_targets == ("experts", "router")
    assert mixtral.gradient_checkpointing
    assert (mixtral.attention, mixtral.experts) == ("flash_attention_2", "looped")
    assert NAMED_RECIPES["paper-blackmamba"].method == "full"


def test_a_recipe_lists_the_extras_it_needs() -> None:
    """Planning checks each node for them."""
    assert Recipe(method="full").extras == ()
    assert NAMED_RECIPES["paper-mixtral"].extras == ("flash_attn",)
    assert Recipe(method="full", mamba="mamba-ssm").extras == ("causal_conv1d", "mamba_ssm")
    assert Recipe(method="full", offload_optimizer=True).extras == ("deepspeed",)
    assert Recipe(method="full", liger_kernels=True).extras == ("liger_kernel",)
    assert Recipe(method="full", activation_offloading=True).extras == ("trl",)
