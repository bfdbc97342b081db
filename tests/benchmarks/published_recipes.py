"""Published fine-tuning runs as recipes: each framework's step, as its public code takes it."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from old_stacks.stacks import OldStack

from fitting.paper.published import dataset_lengths
from fitting.points.batch_lengths import Lengths
from trials.drawn_lengths import DrawnBatch, DrawnLengths
from trials.recipes.recipe import Recipe
from trials.records.model import Model, find_model
from trials.simulation.varying_lengths import Drawn

Row = dict[str, str]
ANY_LENGTH = 512  # of runs whose peak is in the update
ALPACA = (
    (42, 5), (50, 30), (60, 200), (70, 420), (80, 560), (90, 500), (100, 420), (110, 340),
    (120, 300), (140, 270), (160, 230), (180, 160), (200, 100), (220, 70), (240, 45), (260, 25),
    (300, 15), (350, 7), (400, 3), (500, 1), (600, 0.5), (650, 0.01), (1304, 0.01),
)  # fmt: skip
"""Examples of Alpaca by tokens of Llama 2, read off a picture of Lightning-AI/litgpt.

It is tutorials/images/prepare_dataset/alpaca.jpg; values between these are interpolated.
"""
ALPACA_LONGEST = 1304
GB, GIB = 1e9, 2**30

SHAPES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("published_models.toml").read_text(encoding="utf-8")
)
SAME_SHAPE = {"llama-3-8b": "llama-3.1-8b", "mistral-7b-v0.2": "mistral-7b"}
HEAD = "adapters on lm_head"
EXPRESSED = {
    "AdamW foreach (not fused)",
    "fp32 adapters beside bf16 weights",
    "time: lengths not stated",
    "DoRA",
    HEAD,
    "modules_to_save (embeddings and head trained beside LoRA)",
    "activation offloading",
    "torchao low-bit optimizers",
}
"""Options in the data's list of missing ones that recipes have, or that memory does not need."""

REASONS = {
    "other adapter method (lora)": "a variant of LoRA (block-diagonal or MiCA)",
    "GPU not in the catalog": "the shape of torchao's own model of 1B is not stated",
    "GPTQ base": "weights in GPTQ's format",
    "lengths not stated": "the longest examples are not stated, and the peak depends on them",
    "padding-free": "lengths of the examples in padding-free batches are not stated",
    "torch.compile": "torch.compile, which is measured but not simulated",
    "chunked CE": "torchtune's loss on chunks of logits",
    "DeepSpeed ZeRO on one GPU / fp32 master weights": "ZeRO-3 on one GPU: fp32 master weights",
    "torchao NF4Tensor": "4-bit weights of torchao",
    "published number contradicts its recipe": "less memory than weights and AdamW's state take",
}
"""Reasons that say more than the data's name of a missing option."""


@dataclass(frozen=True, slots=True)
class Run:
    """A published run as a recipe on a model.

    Attributes:
        seq_len: length of its longest examples in tokens.
        group: name of its row in the table.
        drawn: draws lengths of batches; None where the figure does not depend on them.
        stack: old libraries under which it is traced; absent for the installed ones.
        mean_tokens: mean padded length of its batches; absent where the row states it.
    """

    recipe: Recipe
    model: Model
    seq_len: int
    group: str
    drawn: Drawn | None = None
    stack: OldStack | None = None
    mean_tokens: float | None = None


class NotExpressedError(ValueError):
    """No recipe expresses the row; one line on the missing options."""


def model_of(row: Row, **changes: Any) -> Model:
    """Model of a row, with changes of its configuration."""
    name = row["model"]
    if name in SHAPES:
        return Model(name=name, source="as published", config=SHAPES[name] | changes)
    model = find_model(SAME_SHAPE.get(name, name))
    return model.model_copy(update={"config": model.config | changes})


def stated(row: Row) -> dict[str, Any]:
    """Fields of a recipe that the row states."""
    fields: dict[str, Any] = {
        "method": row["method"],
        "gradient_checkpointing": row["gradient_checkpointing"] == "yes",
        "attention": row["attention"],
        "gradient_accumulation": int(row["grad_accum"]),
    }
    if row["method"] != "full":
        fields["lora_rank"] = int(row["lora_rank"])
        fields["lora_targets"] = tuple(row["lora_targets"].split("|"))
    if HEAD in row["missing_options"]:
        fields["lora_targets"] = ("all-linear", "lm_head")
    return fields


def alpaca(longest: int) -> Lengths:
    """Lengths of Alpaca, cut."""
    tokens = np.arange(ALPACA[0][0], ALPACA_LONGEST + 1, dtype=np.float64)
    return Lengths(tokens, np.interp(tokens, *np.array(ALPACA).T)).cut(longest)


def drawn_lengths(lengths: Lengths, examples: int, *, grouped: bool) -> DrawnLengths:
    """Lengths of an epoch of this many examples in batches padded to their longest one."""
    tokens = lengths.tokens.astype(int).tolist()
    of_each = np.rint(1e6 * lengths.examples).astype(int).tolist()  # whole numbers, one scale
    return DrawnLengths(
        histogram=tuple((t, n) for t, n in zip(tokens, of_each, strict=True) if n),
        examples=examples,
        grouped=grouped,
        multiple=1,
        most_tokens=tokens[-1],
    )


def random_batches(lengths: Lengths) -> Drawn:
    """Random batches padded to their longest example, the longest of all in the last one."""
    return drawn_lengths(lengths, round(lengths.examples.sum()), grouped=False).batches


def _sorted_batches(row: Row) -> Drawn:
    """Batches of PEFT's comparison between two releases of the allocator's cache.

    It sorts 20 batches at a time, the longest first, and releases the cache after 10. A run has the
    longest example in its first batch. That batch comes twice: the optimizer makes its state in the
    first step, and the blocks of equal steps serve again, so nothing needs to be released.
    The lengths of MetaMathQA are not published; those of another data set of mathematics
    are scaled to its mean.
    """
    shape, mean, longest = dataset_lengths()["math_14k"], 210, int(row["seq_len"])
    lengths = Lengths(np.rint(shape.tokens * mean / shape.mean), shape.examples).cut(longest)

    def drawn(batch_size: int, seed: int) -> list[DrawnBatch]:
        examples = 20 * 4 * batch_size  # as many as are sorted 20 batches at a time
        _, _, *batches = drawn_lengths(lengths, examples, grouped=True).batches(batch_size, seed)
        return [DrawnBatch(longest, is_padded=True)] * 2 + batches[:9]

    return drawn


def _peft(row: Row) -> Run:
    """Run of PEFT's method comparison: plain AdamW, clipping, adapters in fp32, no autocast."""
    fields = stated(row) | {"optimizer": "adamw_foreach", "max_grad_norm": 1.0}
    if row["method"] != "full":
        fields |= {"adapter_dtype": "fp32", "dora": "DoRA" in row["missing_options"]}
    drawn = _sorted_batches(row)
    return Run(Recipe(**fields), model_of(row), int(row["seq_len"]), "PEFT's loop", drawn)


def _litgpt(row: Row) -> Run:
    """Run of LitGPT's config hub: bf16-true, torch.optim.AdamW, 8 or more examples a step.

    Its 4-bit runs use the paged AdamW. Head and embeddings are separate in all its models. Its own
    code computes attention with soft-capping (Gemma 2), and GELU in one kernel.
    """
    fields = stated(row)
    changes: dict[str, Any] = {"tie_word_embeddings": False}
    if row["model"].startswith("gemma2"):
        fields["attention"] = "eager"
    if row["model"] == "phi-2":
        changes["hidden_act"] = "gelu_pytorch_tanh"
    effective_batch = 32 if row["method"] == "full" else 8
    fields["gradient_accumulation"] = effective_batch // int(row["batch_size"])
    fields["optimizer"] = "adamw_foreach"
    if row["method"] != "full":
        fields["lora_dropout"] = 0.05
    group = "LitGPT"
    stack: OldStack = "litgpt"
    if row["method"] == "qlora":
        fields |= {"optimizer": "paged_adamw_32bit", "double_quantisation": False}
        group, stack = "LitGPT, 4-bit by bitsandbytes 0.42", "litgpt-4bit"
    return Run(Recipe(**fields), model_of(row, **changes), 512, group, stack=stack)


def _fms(row: Row) -> Run:
    """Run of fms-hf-tuning with the Trainer of transformers 4.44, whose AdamW is the foreach one.

    It trains in fp16 without autocast, which takes as many bytes as bf16. A padding-free batch is
    one sequence of all its examples, as a packed one is.
    """
    fields = stated(row) | {"optimizer": "adamw_foreach", "max_grad_norm": 1.0}
    fields["packing"] = "padding-free" in row["missing_options"]
    return Run(Recipe(**fields), model_of(row), ANY_LENGTH, "fms-hf-tuning")


def _torchao(row: Row) -> Run:
    """Full fine-tuning by torchtune 52d1b838 under several optimizers: all in bf16, not clipped.

    Its configurations for Llama 2 do not truncate examples.
    """
    optimizers = {
        "AdamW fused": "adamw",
        "adamw_8bit": "adamw_8bit",
        "ao 8-bit": "torchao_adamw_8bit",
        "ao 4-bit": "torchao_adamw_4bit",
    }
    fields = stated(row) | {"optimizer": optimizers[row["optimizer"]]}
    return Run(Recipe(**fields), model_of(row), ALPACA_LONGEST, "torchtune")


def _torchtune(row: Row) -> Run:
    """LoRA run of torchtune's tutorial: all in bf16, AdamW, random batches of at most 512 tokens.

    The tutorial is of April 2024 (torchtune ff594c23), whose ``alpaca_cleaned_dataset`` truncates.
    """
    fields = stated(row) | {"optimizer": "adamw_foreach"}
    longest = int(row["seq_len"])
    drawn = random_batches(alpaca(longest))
    return Run(Recipe(**fields), model_of(row), longest, "torchtune", drawn)


def _qwen(row: Row) -> Run:
    """Run of Qwen's own script: autocast of bf16 weights, adapters in fp32, AdamW of that time.

    Its script for one GPU has no DeepSpeed. For PyTorch 2.0, which it ran, its README names PEFT
    0.5, whose adapters are fp32 and whose copies of modules have the dtype of the original. The
    layers are those of Qwen2 but for queries, keys and values, which are one product.
    """
    fields = stated(row) | {
        "lora_targets": ("all-linear",),
        "lora_dropout": 0.05,
        "modules_to_save": ("embed_tokens", "lm_head"),
        "precision": "bf16-mixed",
        "adapter_dtype": "fp32",
        "optimizer": "adamw_foreach",
        "max_grad_norm": 1.0,
    }
    return Run(Recipe(**fields), model_of(row), int(row["seq_len"]), "Qwen's script", stack="qwen")


FRAMEWORKS: dict[str, Callable[[Row], Run]] = {
    "plain loop + PEFT": _peft,
    "LitGPT": _litgpt,
    "fms-hf-tuning": _fms,
    "HF Trainer + DeepSpeed": _qwen,
    "torchtune": lambda row: _torchao(row) if row["method"] == "full" else _torchtune(row),
    "torchtune 52d1b838": _torchao,
}


def run_of(row: Row) -> Run:
    """Recipe and model of a row.

    Raises:
        NotExpressedError: no recipe expresses it.
    """
    missing = {option.strip() for option in row["missing_options"].split(",")} - EXPRESSED - {""}
    in_update = row["method"] == "full" and row["peak_kind"] == "torch allocated"
    if in_update and row["framework"] == "fms-hf-tuning":
        missing -= {"lengths not stated", "padding-free"}
    if row["peak_kind"] == "OOM":
        missing.discard("published number contradicts its recipe")
    if not missing and row["framework"] not in FRAMEWORKS:
        missing = {f"the framework ({row['framework'] or 'not stated'})"}
    if missing:
        raise NotExpressedError(", ".join(REASONS.get(name, name) for name in sorted(missing)))
    return FRAMEWORKS[row["framework"]](row)


def published_gib(row: Row) -> float | None:
    """Published memory in GiB; None where the run was out of memory, or is not measured yet.

    Until August 2024 torchtune logged memory in units of 1e9 bytes, which its tutorial copied.
    """
    if not row.get("peak_gib"):
        return None
    figure = float(row["peak_gib"])
    is_tutorial = row["framework"] == "torchtune" and row["peak_kind"] == "torch reserved"
    return figure * GB / GIB if is_tutorial else figure
