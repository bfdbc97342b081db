"""Simulated memory, compared with single-GPU fine-tuning runs that others published.

    .venv/bin/python tests/benchmarks/published_runs.py RUNS.csv

The data are not part of the project. Each row of the file is one run: the columns that ``run_of``
and ``compare`` read. Rows that no recipe expresses are listed with the missing options.
"""

import csv
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_catalog.catalog import load_catalog
from orchestrator.markdown_table import table
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model, find_model
from trials.records.observation import Outcome
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB, SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.trace_cache import TraceError, Traces

Row = dict[str, str]
CATALOG = load_catalog()
ANY_LENGTH = 512  # of runs whose peak is in the update
ALPACA_LONGEST = 1304  # tokens of Llama 2: Lightning-AI/litgpt, tutorials/resource-tables.md

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
}
"""Options in the data's list of missing ones that recipes have, or that memory does not need."""

REASONS = {
    "other adapter method (lora)": "a variant of LoRA (block-diagonal or MiCA)",
    "GPU not in the catalog": "torchao's own script and AdamW, on a GPU not in the catalog",
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
        varies: whether its figure depends on the varying lengths of its batches.
    """

    recipe: Recipe
    model: Model
    seq_len: int
    group: str
    varies: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published run with its simulation.

    Attributes:
        gib: simulated memory in GiB, the kind that was published.
        runs_out: whether the simulated GPU runs out of memory.
        published_gib: absent if the published run was out of memory.
    """

    row: Row
    run: Run
    gib: float
    runs_out: bool
    published_gib: float | None

    @property
    def error(self) -> float | None:
        """Relative error; None if the published run was out of memory."""
        return None if self.published_gib is None else self.gib / self.published_gib - 1


class NotExpressedError(ValueError):
    """No recipe expresses the row; one line on the missing options."""


def _model(row: Row, **changes: Any) -> Model:
    name = row["model"]
    if name in SHAPES:
        return Model(name=name, source="as published", config=SHAPES[name] | changes)
    model = find_model(SAME_SHAPE.get(name, name))
    return model.model_copy(update={"config": model.config | changes})


def _stated(row: Row) -> dict[str, Any]:
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


def _peft(row: Row) -> Run:
    """Run of PEFT's method comparison: plain AdamW, clipping, adapters in fp32, no autocast."""
    fields = _stated(row) | {"optimizer": "adamw_foreach", "max_grad_norm": 1.0}
    if row["method"] != "full":
        fields |= {"adapter_dtype": "fp32", "dora": "DoRA" in row["missing_options"]}
    return Run(Recipe(**fields), _model(row), int(row["seq_len"]), "PEFT's loop", varies=True)


def _litgpt(row: Row) -> Run:
    """Run of LitGPT's config hub: bf16-true, torch.optim.AdamW, 8 or more examples a step.

    Its 4-bit runs use bitsandbytes 0.42, which keeps the inputs of 4-bit products, and the paged
    AdamW. Head and embeddings are separate in all its models.
    """
    fields = _stated(row)
    effective_batch = 32 if row["method"] == "full" else 8
    fields["gradient_accumulation"] = effective_batch // int(row["batch_size"])
    fields["optimizer"] = "adamw_foreach"
    group = "LitGPT"
    if row["method"] != "full":
        fields["lora_dropout"] = 0.05
    if row["method"] == "qlora":
        fields |= {"optimizer": "paged_adamw_32bit", "double_quantisation": False}
        group = OLD_4BIT
    return Run(Recipe(**fields), _model(row, tie_word_embeddings=False), 512, group)


OLD_4BIT = "LitGPT, 4-bit by bitsandbytes 0.42"


def _fms(row: Row) -> Run:
    """Run of fms-hf-tuning with the Trainer of transformers 4.44, whose AdamW is the foreach one.

    It trains in fp16 without autocast, which takes as many bytes as bf16. A padding-free batch is
    one sequence of all its examples, as a packed one is.
    """
    fields = _stated(row) | {"optimizer": "adamw_foreach", "max_grad_norm": 1.0}
    fields["packing"] = "padding-free" in row["missing_options"]
    return Run(Recipe(**fields), _model(row), ANY_LENGTH, "fms-hf-tuning")


def _torchtune(row: Row) -> Run:
    """Run of torchtune: all in bf16, without clipping.

    At commit 52d1b838 its configurations for Llama 2 do not truncate examples.
    """
    fields = _stated(row)
    if row["optimizer"] == "adamw_8bit":
        fields["optimizer"] = "adamw_8bit"
    elif row["optimizer"] != "AdamW fused":
        fields["optimizer"] = "adamw_foreach"
    varies = row["peak_kind"] == "torch reserved"
    seq_len = ALPACA_LONGEST if row["method"] == "full" else int(row["seq_len"])
    return Run(Recipe(**fields), _model(row), seq_len, "torchtune", varies=varies)


def _qwen(row: Row) -> Run:
    """Run of Qwen's own script: autocast of bf16 weights, adapters in bf16, AdamW of that time.

    The layers are those of Qwen2 but for queries, keys and values, which are one product.
    """
    fields = _stated(row) | {
        "lora_targets": ("all-linear",),
        "lora_dropout": 0.05,
        "modules_to_save": ("embed_tokens", "lm_head"),
        "precision": "bf16-mixed",
        "adapter_dtype": "bf16",
        "optimizer": "adamw_foreach",
        "max_grad_norm": 1.0,
    }
    return Run(Recipe(**fields), _model(row), int(row["seq_len"]), "Qwen's script")


FRAMEWORKS: dict[str, Callable[[Row], Run]] = {
    "plain loop + PEFT": _peft,
    "LitGPT": _litgpt,
    "fms-hf-tuning": _fms,
    "HF Trainer + DeepSpeed": _qwen,
    "torchtune": _torchtune,
    "torchtune 52d1b838": _torchtune,
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


def compare(row: Row, traces: Traces) -> Comparison:
    """Simulate the run of a row.

    Raises:
        NotExpressedError: no recipe expresses it.
        TraceError: its cell cannot be traced.
    """
    run, gpu, batch_size = run_of(row), CATALOG.gpu(row["gpu"]), int(row["batch_size"])
    cell = Cell(
        gpu=gpu.key,
        simulated=True,
        model=run.model.name,
        recipe=with_defaults(run.recipe, run.model, gpu),
        seq_len=run.seq_len,
    )
    simulated = SimulatedCell(cell, run.model, traces)
    peaks = simulated.without_limit(batch_size, gpu)
    simulated_bytes = {
        "torch allocated": peaks.peak_allocated_bytes,
        "torch reserved": peaks.peak_reserved_bytes,
    }.get(row["peak_kind"], peaks.peak_reserved_bytes + CONTEXT_BYTES)
    outcome = simulated.memory(batch_size, gpu, usable_bytes(gpu, simulated.recipe)).outcome
    published = float(row["peak_gib"]) if row["peak_gib"] else None
    return Comparison(row, run, simulated_bytes / GIB, outcome is Outcome.OUT_OF_MEMORY, published)


def summary(comparisons: Iterable[Comparison]) -> Iterator[tuple[object, ...]]:
    """Errors by source and kind of figure, and over all runs of constant length."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    together = []
    for one in comparisons:
        if one.error is None:
            continue
        lengths = "vary" if one.run.varies else "constant"
        method = "full" if one.row["method"] == "full" else "adapters"
        errors[f"{one.run.group}, {method}", one.row["peak_kind"], lengths].append(one.error)
        if not one.run.varies and one.run.group != OLD_4BIT:
            together.append(one.error)
    errors["all of constant length, without bitsandbytes 0.42", "", "constant"] = together
    for key, values in errors.items():
        absolute = np.abs(values)
        figures = (np.median(absolute), np.quantile(absolute, 0.9), np.max(absolute))
        yield *key, len(values), *(f"{f:.1%}" for f in figures), f"{np.mean(values):+.1%}"


def _each(one: Comparison) -> tuple[object, ...]:
    row, is_out = one.row, "out of memory"
    published = is_out if one.published_gib is None else f"{one.published_gib:.2f}"
    simulated = is_out if one.error is None and one.runs_out else f"{one.gib:.2f}"
    error = "" if one.error is None else f"{one.error:+.1%}"
    method = f"{row['method']} {row['lora_rank']}".strip()
    return one.run.group, row["model"], method, row["batch_size"], published, simulated, error


def main() -> None:
    """Print the errors of all rows, a summary by source, and the rows that are not expressed."""
    with Path(sys.argv[1]).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    traces = Traces(workers=1)
    missing: Counter[tuple[str, str]] = Counter()
    comparisons = []
    for row in rows:
        try:
            comparisons.append(compare(row, traces))
        except (NotExpressedError, TraceError) as error:
            missing[row["framework"] or "not stated", str(error)] += 1
    say = sys.stdout.write
    headers = ("source", "figure", "lengths", "runs", "median error", "90 %", "largest", "bias")
    say(f"## By source\n\n{table(headers, summary(comparisons))}\n\n")
    headers = ("source", "model", "method", "batch", "published GiB", "simulated GiB", "error")
    say(f"## Runs\n\n{table(headers, map(_each, comparisons))}\n\n")
    not_expressed = [(source, why, count) for (source, why), count in missing.most_common()]
    total = sum(missing.values())
    say(f"## {total} of {len(rows)} are not expressed\n\n")
    say(table(("framework", "missing", "runs"), not_expressed) + "\n")


if __name__ == "__main__":
    main()
