"""Resolution of a recipe for a model and a device, and the reasons to refuse one."""

import pytest
from builders.observations import cpu
from builders.recipes import RECIPES
from hypothesis import given, settings

from gpu_catalog.catalog import load_catalog
from trials.recipes.fields import Task
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.optional_packages import EXTRAS
from trials.recipes.recipe import Recipe
from trials.records.compatibility import impossible_on_model, incompatibility, with_defaults
from trials.records.model import Model, find_model, presets

EVERYTHING = frozenset(EXTRAS)
LORA = {"method": "lora", "lora_rank": 8}


def test_gpt_oss_attends_eagerly_unless_a_recipe_says_otherwise() -> None:
    """Transformers has no SDPA for its attention sinks."""
    gpu, model = cpu(), find_model("gpt-oss-20b")
    assert with_defaults(Recipe(method="full"), model, gpu).attention == "eager"
    assert with_defaults(Recipe(method="full"), find_model("qwen3-8b"), gpu).attention == "sdpa"


@settings(max_examples=50)
@given(RECIPES)
def test_resolving_twice_changes_nothing(recipe: Recipe) -> None:
    """Every field that applies is filled in, for every model."""
    for model in presets().values():
        if impossible_on_model(recipe, model) is None:
            once = with_defaults(recipe, model, cpu())
            assert with_defaults(once, model, cpu()) == once
            assert (once.attention is not None) == model.has_attention
            assert (once.experts is not None) == (model.experts is not None)
            assert (once.mamba is not None) == model.has_mamba
            assert (once.lora_targets is not None) == (recipe.method != "full")


@pytest.mark.parametrize(
    ("fields", "model", "targets", "experts"),
    [
        ({"method": "full"}, "mixtral-tiny", None, "grouped"),
        (LORA, "mixtral-tiny", ("experts", "router"), "looped"),
        (LORA | {"lora_targets": ("attention",)}, "mixtral-tiny", ("attention",), "grouped"),
        (LORA | {"method": "qlora"}, "olmoe-tiny", ("experts", "router"), "looped"),
        (LORA, "llama-tiny", ("all-linear",), None),
    ],
)
def test_targets_and_experts_follow_from_the_model(
    fields: dict[str, object], model: str, targets: tuple[str, ...] | None, experts: str | None
) -> None:
    """Adapters follow the paper; fused experts are split for adapters or 4-bit weights."""
    made = with_defaults(Recipe.model_validate(fields), find_model(model), cpu())
    assert (made.lora_targets, made.experts) == (targets, experts)


@pytest.mark.parametrize(
    ("fields", "model", "gpu", "expected"),
    [
        (
            {"method": "full", "attention": "flash_attention_2"},
            "llama-2-7b",
            "V100-16GB-SXM",
            "needs compute capability 8.0 or higher, V100-16GB-SXM has 7.0: use attention: sdpa",
        ),
        ({"method": "full"}, "llama-2-7b", "V100-16GB-SXM", "bf16 needs .* use precision: fp16"),
        ({"method": "full"}, "llama-2-7b", "T4", "bf16 needs .* T4 has 7.5"),
        (
            {"method": "full", "precision": "fp16", "experts": "grouped"},
            "mixtral-8x7b",
            "V100-16GB-SXM",
            "experts grouped needs .* use experts: looped",
        ),
        (
            {"method": "full", "attention": "flash_attention_2"},
            "llama-tiny",
            "cpu",
            "attention flash_attention_2 needs a CUDA GPU, cpu is none",
        ),
        ({"method": "full", "optimizer": "paged_adamw_8bit"}, "llama-tiny", "cpu", "needs a CUDA"),
        ({"method": "full", "mamba": "mamba-ssm"}, "blackmamba-tiny", "cpu", "needs a CUDA GPU"),
        (
            {"method": "full", "liger_kernels": True},
            "llama-tiny",
            "cpu",
            "use liger_kernels: false",
        ),
        ({"method": "full", "liger_kernels": True}, "mixtral-8x7b", "A40", r"\(mixtral\), but for"),
        ({"method": "full", "compile": "model"}, "llama-tiny", "cpu", "leave it out"),
        ({"method": "full", "loss": "liger"}, "llama-tiny", "cpu", "use full-logits or chunked"),
        ({"method": "full", "offload_optimizer": True}, "llama-tiny", "cpu", "on the host anyway"),
        ({"method": "full", "activation_offloading": True}, "llama-tiny", "cpu", "on the host"),
        (LORA | {"method": "qlora"}, "blackmamba-2.8b", "A40", "quantised ones are not: use full"),
        (
            LORA | {"lora_targets": ("all-linear",)},
            "blackmamba-2.8b",
            "A40",
            "adapters on Mamba layers are not possible",
        ),
        (LORA | {"lora_targets": ("experts",)}, "llama-2-7b", "A40", "llama-2-7b has no experts"),
        (LORA | {"router_loss": True}, "llama-2-7b", "A40", "llama-2-7b has no experts"),
        (LORA | {"router_loss": True}, "blackmamba-2.8b", "A40", r"\(blackmamba\)"),
        (LORA | {"lora_targets": ("attention",)}, "blackmamba-2.8b", "A40", "has none"),
    ],
)
def test_an_unsupported_recipe_is_refused_with_the_reason(
    fields: dict[str, object], model: str, gpu: str, expected: str
) -> None:
    """Planning refuses it, before anything is built or rented."""
    facts, device = find_model(model), load_catalog().gpu(gpu)
    recipe = with_defaults(Recipe.model_validate(fields), facts, device)
    reason = incompatibility(recipe, facts, device, EVERYTHING)
    assert reason is not None
    assert "\n" not in reason
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(reason)


@pytest.mark.parametrize(
    ("fields", "model", "gpu"),
    [
        (NAMED_RECIPES["paper-mixtral"].model_dump(), "mixtral-8x7b", "A40"),
        (NAMED_RECIPES["paper-blackmamba"].model_dump(), "blackmamba-2.8b", "H100-SXM"),
        ({"method": "full", "precision": "fp16"}, "llama-2-7b", "V100-16GB-SXM"),
        ({"method": "full", "offload_optimizer": True}, "llama-2-7b", "A100-80GB-SXM"),
        (LORA, "blackmamba-tiny", "cpu"),
        (LORA | {"method": "qlora"}, "qwen3-moe-tiny", "cpu"),
    ],
)
def test_a_supported_recipe_is_not_refused(fields: dict[str, object], model: str, gpu: str) -> None:
    """The paper's recipes on its GPUs are among them, where the extras are installed."""
    facts, device = find_model(model), load_catalog().gpu(gpu)
    recipe = with_defaults(Recipe.model_validate(fields), facts, device)
    assert incompatibility(recipe, facts, device, EVERYTHING) is None


@pytest.mark.parametrize(
    ("task", "model", "coefficient", "is_added"),
    [
        ("sft", "mixtral-tiny", 0.02, True),
        ("dpo", "mixtral-tiny", None, True),
        ("sft", "mixtral-tiny", 0.0, False),
        ("orpo", "mixtral-tiny", 0.02, False),
        ("sft", "blackmamba-tiny", 0.02, False),
        ("sft", "llama-tiny", None, False),
    ],
)
def test_a_router_loss_of_auto_is_on_where_the_trainer_adds_it(
    task: Task, model: str, coefficient: float | None, *, is_added: bool
) -> None:
    """A coefficient of zero turns it off, as in TRL; without one, the family's own counts."""
    facts = find_model(model)
    config = facts.config | {"router_aux_loss_coef": coefficient}
    recipe = Recipe(method="full", task=task, router_loss="auto")
    facts = facts.model_copy(update={"config": config})
    assert with_defaults(recipe, facts, cpu()).router_loss is is_added


def mamba_beside_attention(**config: int) -> Model:
    """A model of Mamba layers, with attention as its configuration says."""
    return Model.model_validate(
        {
            "name": "hybrid",
            "source": "made for this test",
            "config": {"model_type": "bamba", "vocab_size": 128, "mamba_d_state": 16} | config,
        }
    )


@pytest.mark.parametrize(
    ("targets", "config", "expected"),
    [
        (("attention",), {"num_attention_heads": 4}, None),
        (("attention", "router"), {"num_attention_heads": 4}, "use attention"),
        (("all-linear",), {"num_attention_heads": 4}, "adapters on Mamba layers"),
        (None, {"num_attention_heads": 4}, "adapters on Mamba layers"),
        (("in_proj",), {"num_attention_heads": 4}, "adapters on Mamba layers"),
        (None, {}, "adapters on Mamba layers"),
        (("attention",), {}, "attention: hybrid has none: use method full"),
        (("experts",), {}, "hybrid has no experts: use method full"),
    ],
)
def test_adapters_on_mamba_layers_are_refused_and_beside_them_allowed(
    targets: tuple[str, ...] | None, config: dict[str, int], expected: str | None
) -> None:
    """The targets that the error proposes exist in the model."""
    recipe = Recipe.model_validate(LORA | {"lora_targets": targets})
    model = mamba_beside_attention(**config)
    for request in (recipe, with_defaults(recipe, model, cpu())):
        reason = impossible_on_model(request, model)
        assert (reason is None) == (expected is None)
        assert expected is None or expected in str(reason)


@pytest.mark.parametrize(
    ("fields", "model", "missing", "extra"),
    [
        (NAMED_RECIPES["paper-mixtral"].model_dump(), "mixtral-8x7b", "flash_attn", "gpu"),
        ({"method": "full"}, "blackmamba-2.8b", "causal_conv1d, mamba_ssm", "gpu"),
        ({"method": "full", "offload_optimizer": True}, "llama-2-7b", "deepspeed", "deepspeed"),
        ({"method": "full", "loss": "chunked"}, "llama-2-7b", "trl", "trl"),
        ({"method": "full", "loss": "liger"}, "llama-2-7b", "liger_kernel", "liger"),
        ({"method": "full", "loss": "cce"}, "llama-2-7b", "cut_cross_entropy", "cce"),
    ],
)
def test_a_missing_extra_is_named(
    fields: dict[str, object], model: str, missing: str, extra: str
) -> None:
    """The error has the command that installs it; without a list of packages there is no error."""
    facts, device = find_model(model), load_catalog().gpu("A40")
    recipe = with_defaults(Recipe.model_validate(fields), facts, device)
    reason = incompatibility(recipe, facts, device, frozenset())
    assert reason is not None
    assert reason.startswith(missing)
    assert "A40" in reason
    assert f"finetune-cost[{extra}]" in reason
    assert incompatibility(recipe, facts, device, None) is None
