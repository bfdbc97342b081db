"""Further published runs as recipes, each by the code of its framework at the version it names."""

from collections.abc import Callable

import numpy as np
from old_stacks.stacks import OldStack
from published_recipes import ALPACA_LONGEST, Row, Run, alpaca, drawn_lengths, model_of, stated
from scipy import stats

from fitting.points.batch_lengths import Lengths
from trials.recipes.recipe import Recipe

SHORTEST_NEWS, NEWS_MEAN, NEWS_DEVIATION = 91, 3234.4, 2547.5
"""Tokens of the news in ms-swift's benchmark, as it publishes them."""
NEWS_EXAMPLES = 1000
STACKS: dict[str, OldStack] = {
    "Qwen": "qwen-loss",
    "transformers 4.45": "transformers-4.45",
    "transformers 4.48": "transformers-4.48",
}
"""Old stack of a loss."""


def _lit_gpt(row: Row) -> Run:
    """LoRA run of Lit-GPT 8641822: its longest example of Alpaca is in the first micro-batch.

    Later micro-batches are random, padded to their longest example. Lengths by tokenizers other
    than Llama 2's are scaled by the longest example, which the source states.
    """
    fields = stated(row) | {"lora_dropout": 0.05, "optimizer": "adamw_foreach"}
    stack: OldStack = "litgpt"
    if row["precision"] == "bf16-mixed":
        fields["precision"] = "fp32-mixed-load"
    if row["method"] == "qlora":
        fields["optimizer"] = "paged_adamw_32bit"
        fields["double_quantisation"] = row["quantisation"] == "nf4-dq"
        stack = "litgpt-4bit"
    model, longest = model_of(row, tie_word_embeddings=False), int(row["seq_len"])
    padded = alpaca(ALPACA_LONGEST).padded(int(row["batch_size"]), multiple=1)
    tokens = padded * longest / ALPACA_LONGEST
    return Run(Recipe(**fields), model, longest, row["framework"], stack=stack, mean_tokens=tokens)


def _fms(row: Row) -> Run:
    """LoRA run of fms-hf-tuning on packed rows, which one causal mask covers.

    Adapters are fp32, as PEFT makes them. TRL's own preparation, in the baseline, also makes norms
    fp32, which no recipe has.
    """
    fields = stated(row) | {
        "lora_dropout": 0.1,
        "adapter_dtype": "fp32",
        "optimizer": "adamw_foreach",
        "max_grad_norm": 1.0,
        "precision": row["precision"],
    }
    if row["model"] == "mixtral-8x7b":
        fields["experts"] = "looped"
    seq_len, stack = int(row["seq_len"]), STACKS[row["loss"]]
    return Run(Recipe(**fields), model_of(row), seq_len, row["framework"], stack=stack)


def _swift(row: Row) -> Run:
    """Run of ms-swift 1.5: all in bf16, one epoch of examples no longer than the limit.

    The lengths are not published, but their mean and standard deviation are: a gamma distribution
    has both.
    """
    fields = stated(row) | {"optimizer": "adamw_foreach", "max_grad_norm": 0.5}
    if row["method"] != "full":
        fields["lora_dropout"] = 0.05
    longest = int(row["seq_len"])
    tokens = np.arange(SHORTEST_NEWS, longest + 1)
    shape = (NEWS_MEAN / NEWS_DEVIATION) ** 2
    density = stats.gamma.pdf(tokens, shape, scale=NEWS_MEAN / shape)
    lengths = Lengths(tokens.astype(np.float64), density / density.sum())
    drawn = drawn_lengths(lengths, NEWS_EXAMPLES, grouped=False).batches
    stack, tokens = STACKS[row["loss"]], lengths.padded(int(row["batch_size"]), multiple=1)
    return Run(Recipe(**fields), model_of(row), longest, row["framework"], drawn, stack, tokens)


def _axolotl(row: Row) -> Run:
    """Example of axolotl, as ``estimate --config`` reads it: packed rows, autocast."""
    fields = stated(row) | {
        "precision": "bf16-mixed",
        "lora_alpha": 16,
        "lora_dropout": 0.0 if row["optimizer"] == "adamw_torch" else 0.05,
        "loss": row["loss"],
        "optimizer": "adamw_foreach" if row["optimizer"] == "adamw_torch" else "adamw_8bit",
        "max_grad_norm": 1.0,
        "packing": True,
    }
    return Run(Recipe(**fields), model_of(row), int(row["seq_len"]), row["framework"])


def _trl(row: Row) -> Run:
    """Notebook of TRL in November 2025: adapters in fp32, the rest of the model in 16 bits."""
    fields = stated(row) | {
        "precision": "bf16-mixed",
        "lora_alpha": 32,
        "loss": "liger",
        "liger_kernels": True,
        "activation_offloading": True,
        "optimizer": row["optimizer"],
        "max_grad_norm": 1.0,
    }
    return Run(Recipe(**fields), model_of(row), int(row["seq_len"]), row["framework"])


def _torchtune(row: Row) -> Run:
    """LoRA run of torchtune 0.3 on packed rows, all in bf16, by its configuration, not compiled.

    torchtune's loss holds the logits of all tokens, in chunks; ``chunked`` never holds all.
    """
    fields = stated(row) | {"optimizer": row["optimizer"], "loss": row["loss"]}
    return Run(Recipe(**fields), model_of(row), int(row["seq_len"]), row["framework"])


FRAMEWORKS: dict[str, Callable[[Row], Run]] = {
    "Lit-GPT": _lit_gpt,
    "fms-hf-tuning, packed": _fms,
    "ms-swift": _swift,
    "axolotl": _axolotl,
    "TRL's notebook": _trl,
    "torchtune, packed and compiled": _torchtune,
}


def further_run_of(row: Row) -> Run:
    """Recipe and model of a row."""
    return FRAMEWORKS[row["framework"]](row)
