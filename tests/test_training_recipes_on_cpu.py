"""Every recipe axis that a CPU supports: a real step at tiny size shows its effect."""

import pytest
import torch
from builders.observations import cpu, recipe, tiny_cell

from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe
from trials.records.built import Built
from trials.records.cell import Cell
from trials.records.messages import Setup
from trials.records.model import find_model
from trials.training.finetune import FineTuning
from trials.training.recipe_check import departures
from trials.training.worker import Worker

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LLAMA, MIXTRAL, BLACKMAMBA = "llama-tiny", "mixtral-tiny", "blackmamba-tiny"
QWEN, OLMOE = "qwen3-moe-tiny", "olmoe-tiny"
MOE = (MIXTRAL, QWEN, OLMOE)


def built(cell: Cell) -> tuple[Built, list[str]]:
    """The facts of a real step of the cell, and their differences from the recipe."""
    tuning = FineTuning(cell, find_model(cell.model), device=torch.device("cpu"), seed=0)
    facts = tuning.built()
    return facts, departures(cell.recipe, facts, tuning.implied())


def rotations(method: Method, **fields: object) -> Recipe:
    """Recipe of OFT."""
    return recipe(method, lora_rank=None, oft_block_size=8, precision="bf16-mixed", **fields)


AXES = [
    (LLAMA, recipe("full")),
    (LLAMA, recipe("full", precision="bf16")),
    (LLAMA, recipe("full", precision="fp16")),
    (LLAMA, recipe("lora", precision="fp16")),
    (LLAMA, recipe("qlora", precision="fp16", gradient_checkpointing=True)),
    (LLAMA, recipe("qlora", double_quantisation=False)),
    (LLAMA, recipe("lora", lora_alpha=3, lora_dropout=0.1, lora_targets=("attention",))),
    (LLAMA, recipe("lora", lora_targets=("q_proj", "mlp.up_proj"))),
    *((LLAMA, rotations(method)) for method in ("lora", "qlora")),
    (MIXTRAL, rotations("qlora", task="reward", modules_to_save=("embed_tokens",))),
    (LLAMA, recipe("lora", modules_to_save=("embed_tokens", "lm_head"))),
    (LLAMA, recipe("lora", modules_to_save=("norm", "k_proj"), loss="chunked")),
    (LLAMA, recipe("qlora", modules_to_save=("lm_head",), kbit_preparation=True)),
    (LLAMA, recipe("lora", lora_targets=("all-linear", "lm_head", "embed_tokens"))),
    (BLACKMAMBA, recipe("lora", lora_targets=("experts",), dora=True, precision="bf16")),
    (LLAMA, recipe("lora", dora=True, lora_targets=("attention", "embed_tokens", "lm_head"))),
    (LLAMA, recipe("lora", dora=True, lora_dropout=0.1, precision="bf16-mixed")),
    (MIXTRAL, recipe("qlora", dora=True, precision="bf16", gradient_checkpointing=True)),
    *((m, recipe("lora", lora_targets=("experts",), experts="grouped")) for m in MOE),
    (LLAMA, recipe("full", attention="eager")),
    (LLAMA, recipe("full", attention="sdpa", gradient_checkpointing=True)),
    (LLAMA, recipe("full", optimizer="adamw_8bit")),
    (LLAMA, recipe("full", optimizer="adafactor")),
    (LLAMA, recipe("full", trained_layers=1, precision="bf16-mixed", gradient_checkpointing=True)),
    (LLAMA, recipe("full", trained_layers=-1, gradient_checkpointing=True)),
    (MIXTRAL, recipe("full", trained_layers=2, spread_layers=True, precision="bf16")),
    (LLAMA, recipe("full", optimizer="sgd")),
    (LLAMA, recipe("full", optimizer="muon", max_grad_norm=1.0)),
    (LLAMA, recipe("lora", optimizer="muon")),
    (LLAMA, recipe("full", loss="chunked")),
    (LLAMA, recipe("full", loss="dft", gradient_accumulation=2)),
    (LLAMA, recipe("qlora", loss="eaft", precision="bf16-mixed")),
    (MIXTRAL, recipe("lora", loss="chunked", gradient_accumulation=2)),
    *((model, recipe("full", experts="looped")) for model in (*MOE, BLACKMAMBA)),
    *((model, recipe("full", experts="grouped")) for model in (*MOE, BLACKMAMBA)),
    *((model, recipe("qlora", gradient_checkpointing=True)) for model in MOE),
    *((model, recipe("qlora", quantised_experts=True, precision="bf16-mixed")) for model in MOE),
    (MIXTRAL, recipe("qlora", quantised_experts=True, quantisation="int8")),
    (QWEN, recipe("qlora", experts="grouped", lora_targets=("all-linear",))),
    *((model, recipe("lora", lora_targets=("all-linear",))) for model in MOE),
    (MIXTRAL, recipe("lora", precision="bf16", lora_targets=("attention",))),
    (BLACKMAMBA, recipe("full", precision="bf16", gradient_checkpointing=True, mamba="reference")),
    (LLAMA, recipe("full", task="reward", precision="bf16-mixed", gradient_accumulation=2)),
    (LLAMA, recipe("full", task="reward", loss="full-logits", precision="bf16-mixed")),
    (LLAMA, recipe("qlora", task="reward", loss="full-logits", gradient_checkpointing=True)),
    (LLAMA, recipe("lora", task="reward", modules_to_save=("embed_tokens",))),
    (LLAMA, recipe("qlora", task="reward", quantisation="int8", gradient_checkpointing=True)),
    (MIXTRAL, recipe("qlora", task="reward", precision="bf16-mixed", adapter_dtype="bf16")),
]

# The updates of these are compiled, which takes up to a minute.
COMPILED = [
    pytest.param(
        LLAMA,
        recipe("full", optimizer=f"torchao_adamw_{bits}bit"),
        marks=[pytest.mark.long, pytest.mark.filterwarnings("ignore")],
    )
    for bits in (8, 4)
]


@pytest.mark.parametrize(
    ("model", "settings"), [*AXES, *COMPILED], ids=lambda value: getattr(value, "key", value)
)
def test_a_real_step_confirms_the_recipe(model: str, settings: Recipe) -> None:
    """Counts, dtypes, kernels, recomputed layers and optimizer match it."""
    facts, wrong = built(tiny_cell(model, settings, seq_len=8))
    assert wrong == []
    assert facts.parameters.trainable > 0


@pytest.mark.parametrize("model", MOE)
def test_qlora_experts_are_4_bit_and_carry_adapters(model: str) -> None:
    """The three matrices of every expert, and the router, are counted one by one."""
    facts = find_model(model)
    cell = tiny_cell(model, recipe("qlora"), seq_len=8)
    tuning = FineTuning(cell, facts, device=torch.device("cpu"), seed=0)
    names = {name for name, _ in tuning.model.named_parameters()}
    four_bit = {
        name
        for name, p in tuning.model.named_parameters()
        if getattr(p, "quant_state", None) is not None and ".experts." in name
    }
    layers = int(facts.config["num_hidden_layers"])  # type: ignore[arg-type]
    assert facts.experts is not None
    assert len(four_bit) == layers * facts.experts * 3
    adapters = {name for name in names if "lora_A" in name}
    assert len(adapters) == layers * (facts.experts * 3 + 1)
    assert sum("router_linear" in name for name in adapters) == layers


def test_the_record_says_which_kernels_ran() -> None:
    """The observed operators show attention, the grouped product and 4-bit multiplication."""
    sdpa, _ = built(tiny_cell(LLAMA, recipe("full"), seq_len=8))
    eager, _ = built(tiny_cell(LLAMA, recipe("full", attention="eager"), seq_len=8))
    grouped, _ = built(tiny_cell(MIXTRAL, recipe("full", experts="grouped"), seq_len=8))
    quantised, _ = built(tiny_cell(LLAMA, recipe("qlora"), seq_len=8))
    assert any("scaled_dot_product" in kernel for kernel in sdpa.kernels)
    assert eager.kernels == ()
    assert any("grouped_mm" in kernel for kernel in grouped.kernels)
    assert any(kernel.startswith("bitsandbytes::") for kernel in quantised.kernels)


def test_pretrained_weights_are_those_of_the_folder(tmp_path: object) -> None:
    """A model saved by transformers trains from its own weights, with its experts split."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - only here

    facts = find_model(MIXTRAL)
    fields = {k: v for k, v in facts.config.items() if k != "model_type"}
    torch.manual_seed(1)
    pretrained = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields))
    pretrained.save_pretrained(tmp_path)
    saved = facts.model_copy(update={"weights": str(tmp_path), "name": "mine"})
    tokens = torch.arange(8)[None]
    expected = pretrained.train()(input_ids=tokens, labels=tokens).loss.item()
    losses = {}
    for experts in ("looped", "grouped"):
        cell = tiny_cell(MIXTRAL, recipe("full", experts=experts), seq_len=8)
        cell = cell.model_copy(update={"weights": "pretrained"})
        tuning = FineTuning(cell, saved, device=torch.device("cpu"), seed=0)
        losses[experts] = tuning.step(tokens)
    assert losses["looped"] == pytest.approx(expected, rel=1e-5)
    assert losses["grouped"] == pytest.approx(expected, rel=1e-5)


def test_a_missing_kernel_refuses_to_build() -> None:
    """Planning refuses FlashAttention-2 on a CPU; a child that gets it anyway fails."""
    cell = tiny_cell(LLAMA, recipe("full", precision="bf16", attention="flash_attention_2"))
    setup = Setup(cell=cell, model=find_model(LLAMA), gpu=cpu(), seed=0, threads=1)
    with pytest.raises(ImportError, match=r"[Ff]lash"):
        Worker(setup)
