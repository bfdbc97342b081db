"""Inputs that `make fuzz` draws: valid ones, of which values and bytes are damaged."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import yaml
from hypothesis import strategies as st

from builders.fuzz_inputs import Case, Draw, altered, damaged, json_of, text_of
from builders.fuzz_written import cluster_file, task
from builders.runs import ONE_CELL, spec_of, whole_trial
from orchestrator.run_folder.file_names import SPEC
from orchestrator.storage.local_storage import OBSERVATIONS
from trials.records.model import find_model

MODEL = "meta-llama/Llama-3.1-8B"
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "axolotl": {
        "base_model": MODEL,
        "adapter": "qlora",
        "load_in_4bit": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "sequence_len": 512,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_epochs": 3,
        "optimizer": "adamw_torch",
        "bf16": True,
        "sample_packing": True,
        "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}],
    },
    "llama-factory": {
        "model_name_or_path": MODEL,
        "stage": "sft",
        "finetuning_type": "lora",
        "cutoff_len": 512,
        "per_device_train_batch_size": 1,
        "template": "llama3",
        "dataset": "identity",
        "lora_rank": 8,
        "do_train": True,
        "output_dir": "out",
    },
    "trl": {
        "model_name_or_path": MODEL,
        "use_peft": True,
        "lora_r": 16,
        "max_length": 512,
        "per_device_train_batch_size": 2,
        "dataset_name": "trl-lib/Capybara",
        "bf16": True,
    },
}
GPU = {
    "key": "mine",
    "kind": "cuda",
    "device_names": ["Mine"],
    "usable_memory_bytes": 10**10,
    "source": "me",
    "recorded": "2026-01-31",
}
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
SHAPE = find_model("llama-tiny").config
PRICES = "gpu,usd_per_hour\nA40,0.4\nH100-SXM,2.5\n"
TABLE = "gpu,model,seq_len,batch_size,step_seconds\n" + "".join(
    f"A40,llama-2-7b,{length},{size},{0.1 * size * length / 128}\n"
    for length in (128, 256)
    for size in (1, 2, 4)
)
WORDS = (
    *("plan", "catalog", "gpus", "prices", "fit", "rank", "what-if", "status", "report", "export"),
    *("deploy", "estimate", "--explain-config", "completion", "--prices", "--prices=--", "--csv"),
    *("--gpu", "--model", "--json", "--epochs", "--examples", "--batch-size", "--budget-usd", "-1"),
    *("auto", "run", "spec.yaml", "nan", "1e999", "--to", "slurm", "--provider", "aws", "=", "--"),
)


SIZES = (0, 1, 3, 24, 4096, 10**5, 10**6, 10**7, 10**9, 10**15, 2**63)
"""Sizes of a model and of a batch, real ones and those whose products overflow."""


@cache
def observations() -> list[dict[str, Any]]:
    """Log of a trial, as dictionaries."""
    spec = spec_of(ONE_CELL)
    (cell,) = spec.all_cells()
    return [json.loads(o.model_dump_json()) for o in whole_trial(cell, spec)]


@st.composite
def cases(draw: Draw) -> Case:
    """An input of any kind. Few are estimates, which take as long as hundreds of others."""
    kind = draw(st.sampled_from([*sorted(KINDS) * 20, None]))
    return KINDS[kind](draw, observations()) if kind else _estimate(draw)


def _spec(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, text_of(altered(draw, yaml.safe_load(ONE_CELL))))
    return Case("specification", ("plan", "spec.yaml"), {"spec.yaml": content})


def _model(draw: Draw, _log: Any) -> Case:
    spec = ONE_CELL.replace("llama-tiny", "./model").encode()
    files = {"spec.yaml": spec, "model/config.json": damaged(draw, json_of(altered(draw, SHAPE)))}
    return Case("model", ("plan", "spec.yaml"), files)


def _catalog(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, text_of(altered(draw, {"gpus": [GPU], "offers": []})))
    return Case("catalog", ("catalog", "gpus", "--catalog", "c.yaml"), {"c.yaml": content})


def _prices(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, damaged(draw, PRICES.encode()))
    return Case("prices", ("catalog", "prices", "--prices", "p.csv"), {"p.csv": content})


def _table(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, damaged(draw, TABLE.encode()))
    return Case("table", ("fit", "t.csv"), {"t.csv": content})


def _data(draw: Draw, _log: Any) -> Case:
    lines = [json_of(altered(draw, CHAT) if draw(st.booleans()) else CHAT) for _ in range(4)]
    name = draw(st.sampled_from(("d.jsonl", "d.json", "d.csv", "d.parquet")))
    arguments = ("dataset", name, "--model", "llama-3.1-8b")
    return Case("data set", arguments, {name: damaged(draw, b"".join(lines))})


def _configuration(draw: Draw, _log: Any) -> Case:
    tree = altered(draw, CONFIGURATIONS[draw(st.sampled_from(sorted(CONFIGURATIONS)))])
    arguments = ("estimate", "--config", "c.yml", "--explain-config")
    return Case("configuration", arguments, {"c.yml": damaged(draw, text_of(tree))})


def _run(draw: Draw, log: list[dict[str, Any]]) -> Case:
    chosen = draw(st.integers(0, len(log) - 1))
    lines = [json_of(altered(draw, o) if n == chosen else o) for n, o in enumerate(log)]
    command = draw(st.sampled_from(("status", "plan", "rank", "fit", "report", "what-if")))
    files = {
        f"run/{SPEC}": ONE_CELL.encode(),
        f"run/{OBSERVATIONS}": damaged(draw, b"".join(lines)),
    }
    return Case("log", (command, "run"), files)


def _estimate(draw: Draw) -> Case:
    sizes = [name for name, value in SHAPE.items() if isinstance(value, int)]
    size = st.sampled_from(SIZES)
    shape = SHAPE | draw(st.dictionaries(st.sampled_from(sizes), size, max_size=2))
    arguments = ["estimate", "--model", "./model", "--gpu", "A40", "--seq-len"]
    arguments.append(str(draw(st.one_of(st.just(24), size))))
    for option in ("--batch-size", "--effective-batch", "--examples"):
        if draw(st.integers(0, 3)) == 0:
            arguments += [option, str(draw(size))]
    return Case("estimate", tuple(arguments), {"model/config.json": json_of(shape)}, traces=True)


def _words(draw: Draw, log: list[dict[str, Any]]) -> Case:
    words = draw(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=6))
    files = {"spec.yaml": ONE_CELL.encode(), f"run/{SPEC}": ONE_CELL.encode()}
    files[f"run/{OBSERVATIONS}"] = b"".join(map(json_of, log))
    # An estimate without --explain-config traces a model, which takes longer than any input.
    explains = words[:1] != ["estimate"] or "--explain-config" in words
    return Case("command line", tuple(words if explains else [*words, "--explain-config"]), files)


KINDS: Mapping[str, Callable[[Draw, list[dict[str, Any]]], Case]] = {
    "specification": _spec,
    "model": _model,
    "catalog": _catalog,
    "prices": _prices,
    "table": _table,
    "data set": _data,
    "configuration": _configuration,
    "log": _run,
    "cluster file": cluster_file,
    "task": task,
    "command line": _words,
}
