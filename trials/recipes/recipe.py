"""A recipe of fine-tuning: its name and its micro-batches."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

from pydantic import ValidationError, model_validator

from trials.recipes.fields import GENERATION_SHARE, REENTRANT, TASK_LOSSES, RecipeFields
from trials.recipes.mistakes import incompatible, misplaced


class Recipe(RecipeFields):
    """Recipe of fine-tuning, free of mistakes; ``RecipeFields`` describes the fields."""

    @model_validator(mode="after")
    def _fields_belong_together(self) -> Self:
        wrong = [*misplaced(self), *incompatible(self)]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def micro_batches(self, batch_size: int) -> int:
        """Micro-batches per optimizer step, for a micro-batch of so many examples."""
        if self.effective_batch is None:
            return self.gradient_accumulation
        return -(-self.effective_batch // batch_size)

    def of_rank(self, ranks: int) -> Self:
        """Recipe of each of so many GPUs, which share the effective batch."""
        if self.effective_batch is None or ranks == 1:
            return self
        return self.model_copy(update={"effective_batch": self.effective_batch // ranks})

    def batch_limit(self, limit: int) -> int:
        """Largest batch size to try below a limit: none is larger than the effective batch."""
        return limit if self.effective_batch is None else min(limit, self.effective_batch)

    def whole_batch(self, limit: int) -> int | None:
        """Micro-batch that is the effective batch itself; None without one up to the limit.

        It accumulates nothing, so its gradients do not exist while activations do. It may fit where
        a smaller micro-batch does not.
        """
        whole = self.effective_batch
        return whole if whole is not None and 1 < whole <= limit else None

    @property
    def row(self) -> str:
        """Name of one row of a batch, whose length is the cell's."""
        if self.packing:
            return "packed row"
        if self.task == "grpo":
            return "completion with its prompt"
        return "example" if self.sequences == 1 else "sequence of a pair"

    @property
    def left_out(self) -> str | None:
        """Part of the training that a step leaves out, in words; None for nothing."""
        if self.task != "grpo":
            return None
        vllm = ""
        if self.generation_share:
            vllm = (
                f"; vLLM holds {self.generation_share:.0%} of the GPU's memory, which its own "
                "copy of the weights has to fit"
            )
        return (
            "generating completions and computing their rewards, which take time and dollars on "
            f"top of the update{vllm}"
        )

    @property
    def extras(self) -> tuple[str, ...]:
        """Optional packages that this recipe needs, sorted."""
        needed = {
            "flash_attn": self.attention == "flash_attention_2",
            "mamba_ssm": self.mamba == "mamba-ssm",
            "causal_conv1d": self.mamba == "mamba-ssm",
            "deepspeed": self.offload_optimizer,
            "trl": self.task == "orpo" or self.loss == "chunked" or self.activation_offloading,
            "liger_kernel": self.loss == "liger" or self.liger_kernels,
            "cut_cross_entropy": self.loss == "cce",
            "torchao": self.optimizer.startswith("torchao"),
        }
        return tuple(sorted(name for name, wanted in needed.items() if wanted))

    @property
    def key(self) -> str:
        """A stable short name, for example ``qlora-r16-experts+router-bf16-checkpointed-looped``.

        It lists the axes that differ from their first choice, so no two recipes share a key, once
        ``router_loss`` is not ``auto``.
        """
        return _key(self)


@lru_cache(maxsize=4096)  # asked for each probe and each offer of a cell
def _key(recipe: Recipe) -> str:
    rank = recipe.lora_rank
    accumulates = recipe.gradient_accumulation > 1
    vllm = f"vllm{recipe.generation_share:g}" if recipe.generation_share else "no-vllm"
    parts: list[str | None] = [
        recipe.method,
        recipe.task if recipe.task != "sft" else None,
        f"{recipe.reference}-reference" if recipe.reference is not None else None,
        None if rank is None else f"r{rank}",
        None if recipe.oft_block_size is None else f"oft{recipe.oft_block_size}",
        f"alpha{recipe.lora_alpha}" if rank is not None and recipe.lora_alpha != 2 * rank else None,
        f"dropout{recipe.lora_dropout:g}" if recipe.lora_dropout else None,
        "+".join(recipe.lora_targets) if recipe.lora_targets else None,
        "dora" if recipe.dora else None,
        None if recipe.trained_layers is None else f"layers{recipe.trained_layers}",
        "spread" if recipe.spread_layers else None,
        f"saved-{'+'.join(recipe.modules_to_save)}" if recipe.modules_to_save else None,
        f"{recipe.adapter_dtype}-adapters" if recipe.has_own_adapter_dtype else None,
        recipe.quantisation if recipe.quantisation != "nf4" else None,
        "singly-quantised" if recipe.double_quantisation is False else None,
        "kbit-prepared" if recipe.kbit_preparation else None,
        "quantised-experts" if recipe.quantised_experts else None,
        recipe.precision,
        "checkpointed" if recipe.gradient_checkpointing else None,
        REENTRANT if recipe.gradient_checkpointing == REENTRANT else None,
        "activations-offloaded" if recipe.activation_offloading else None,
        recipe.attention if recipe.attention != "sdpa" else None,
        recipe.experts,
        recipe.mamba if recipe.mamba != "reference" else None,
        recipe.optimizer if recipe.optimizer != "adamw" else None,
        "offloaded" if recipe.offload_optimizer else None,
        f"accumulation{recipe.gradient_accumulation}" if accumulates else None,
        f"effective{recipe.effective_batch}" if recipe.effective_batch is not None else None,
        f"clip{recipe.max_grad_norm:g}" if recipe.max_grad_norm is not None else None,
        "liger-kernels" if recipe.liger_kernels else None,
        f"compiled-{recipe.compile}" if recipe.compile else None,
        recipe.loss if recipe.loss != TASK_LOSSES.get(recipe.task, "full-logits") else None,
        "router-loss" if recipe.router_loss is True else None,
        f"packed{recipe.examples_per_row}" if recipe.packing else None,
        None if recipe.generation_share in (None, GENERATION_SHARE) else vllm,
    ]
    return "-".join(part for part in parts if part is not None)


def hidden_contradictions(fields: Mapping[str, Any]) -> list[str]:
    """Contradictions among the valid fields of a recipe, which its invalid ones hide.

    Empty where every field is valid, since ``Recipe`` then reports them.
    """
    invalid = {str(error["loc"][0]) for error in _errors(fields) if error["loc"]}
    if not invalid or "method" in invalid:
        return []
    valid = {name: value for name, value in fields.items() if name not in invalid}
    raised = [error["ctx"]["error"] for error in _errors(valid) if not error["loc"]]
    lines = [line for error in raised for line in str(error).split("\n")]
    return [line for line in lines if not any(name in line for name in invalid)]


def _errors(fields: Mapping[str, Any]) -> list[Any]:
    try:
        Recipe.model_validate(fields)
    except ValidationError as error:
        return list(error.errors())
    return []
