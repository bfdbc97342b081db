"""The recipe that ``estimate`` chooses, compared with a grid of recipes that learn the same.

    .venv/bin/python tests/benchmarks/recipe_grid.py

``--recipe auto`` tries checkpointing alone and takes one loss, one attention kernel and one
optimizer for the best. The grid tries every other one of each, with and without checkpointing, and
leaves out what ``auto`` does not recommend either: a recipe whose only batch may not fit, by the
error of the memory. A regret of 0 % means that no recipe of the grid is cheaper; a negative one,
that the grid's best is more expensive.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from orchestrator.cli.main import main as orchestrator
from orchestrator.markdown_table import table

ASKED = (
    ("llama-3.1-8b", "lora", "512,4096", "A40,A100-80GB-SXM,H100-SXM"),
    ("llama-3.1-8b", "qlora", "512,2048", "RTX-4090,A40,H100-SXM"),
    ("qwen3-1.7b", "full", "512,2048", "A40,A100-80GB-SXM,H100-SXM"),
)
OTHERS = {
    "loss": ("full-logits", "liger", "cce"),
    "attention": ("eager", "flash_attention_2"),
    "optimizer": ("adamw_foreach", "adamw_loop"),
}


Priced = dict[tuple[str, int], float]
"""Price in USD by GPU and sequence length, where a batch of the recipe surely fits."""


def prices(words: Sequence[str], options: Mapping[str, str]) -> Priced:
    """Prices of a question with a recipe; none where the recipe is refused."""
    words = ["estimate", "--json", "--gpus", "1", *words]
    for name, value in options.items():
        words += [f"--{name}", value]
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(io.StringIO()):
        code = orchestrator(words)
    rows = [] if code else json.loads(answer.getvalue())
    return {
        (row["gpu"], row["seq_len"]): row["price"]["usd"]
        for row in rows
        if row["outcome"] == "FITS" and row["max_batch_size_interval"]["low"] >= 1
    }


def grid() -> Iterator[dict[str, str]]:
    """Recipes of the grid: one field apart from the chosen ones, with both values of another."""
    for name, values in OTHERS.items():
        for value, checkpointing in product(values, ("on", "off")):
            yield {name: value, "gradient-checkpointing": checkpointing}


def main() -> None:
    """Print the price of the chosen recipe, and of the best of the grid, on each GPU."""
    rows = []
    for model, method, seq_lens, gpus in ASKED:
        words = ["--model", model, "--method", method, "--seq-len", seq_lens, "--gpu", gpus]
        others = [(one, prices(words, one)) for one in grid()]
        for at, usd in prices(words, {}).items():
            fitting = [(costs[at], one) for one, costs in others if at in costs]
            least, best = min(fitting, key=lambda pair: pair[0])
            options = " ".join(f"--{name} {value}" for name, value in best.items())
            regret = f"{usd / least - 1:+.1%}"
            rows.append((model, method, *at, f"{usd:.3g}", f"{least:.3g}", options, regret))
    headers = ("model", "method", "GPU", "tokens", "auto $", "grid's best $", "that is", "regret")
    sys.stdout.write(table(headers, rows) + "\n")


if __name__ == "__main__":
    main()
