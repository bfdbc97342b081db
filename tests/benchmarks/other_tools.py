"""Memory that other tools predict for measured runs, beside this project's predictions.

    python3 -m venv TOOLS && TOOLS/bin/pip install -r tests/benchmarks/other_tools/requirements.txt
    .venv/bin/python tests/benchmarks/other_tools.py TOOLS/bin/python [RUNS.csv WHEELS]

Asks the tools (``other_tools/ask.py``, in their own virtual environment) for every run that a GPU
of this project measured, and for the published ones of a file that is not part of the project
(``published_runs.py``). It writes other_tools/errors.json: answers for the former, and errors of
groups of the latter. ``scoreboard.py`` shows them.
"""

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from published_runs import CATALOG, Comparison, compared_runs
from scoreboard import measured_gpu_keys, timed_runs

from trials.recipes.recipe import Recipe
from trials.records.model import Model, find_model

FOLDER = Path(__file__).with_name("other_tools")
ERRORS = FOLDER / "errors.json"
OURS = "this project"
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_foreach": "adamw",
    "adamw_loop": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adam8bit",
    "paged_adamw_8bit": "adam8bit",
}
Answers = dict[str, float | str]


def asked_run(
    model: Model, recipe: Recipe, seq_len: int, batch_size: int, gpu_key: str
) -> dict[str, Any]:
    """A run as ``ask.py`` reads it: the configuration, and the options that the tools have."""
    targets = recipe.lora_targets or ()
    usable_bytes = CATALOG.gpu(gpu_key).usable_memory_bytes
    assert usable_bytes is not None
    return {
        "model": model.name,
        "config": model.config,
        "method": recipe.method,
        "rank": recipe.lora_rank,
        "targets": None if "all-linear" in targets else list(targets),
        "weights": "fp32" if recipe.base_dtype == "fp32" else "bf16",
        "double_quantisation": recipe.method == "qlora" and recipe.double_quantisation is not False,
        "optimizer": OPTIMIZERS.get(recipe.optimizer, recipe.optimizer),
        "checkpointing": bool(recipe.gradient_checkpointing),
        "attention": recipe.attention,
        "loss": recipe.loss,
        "batch_size": batch_size * recipe.sequences,
        "seq_len": seq_len,
        "gpu": gpu_key,
        "gpu_mib": usable_bytes // 2**20,
    }


def asked(python: Path, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Versions of the tools, and their answers for each run."""
    child = subprocess.run(
        [str(python), str(FOLDER / "ask.py")],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        sys.exit(child.stderr)
    answers: dict[str, Any] = json.loads(child.stdout)
    return answers


def size_of(errors: Iterable[float]) -> dict[str, float | int]:
    """Number of relative errors, the median and the largest of their sizes, and their mean."""
    errors = list(errors)
    sizes = sorted(map(abs, errors))
    return {
        "runs": len(sizes),
        "median": round(statistics.median(sizes), 4),
        "largest": round(sizes[-1], 4),
        "bias": round(statistics.mean(errors), 4),
    }


def grouped(
    comparisons: Sequence[Comparison], answers: Sequence[Answers]
) -> list[dict[str, object]]:
    """Errors by GPU, method and stack, of every tool for the runs that it answers."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one, given in zip(comparisons, answers, strict=True):
        assert one.published_gib is not None
        gpu, method, stack = one.row["gpu"], one.recipe.method, one.run.group
        kinds = ("GPU", gpu), ("method", method), ("stack", stack)
        for kind in (*kinds, ("all", "all"), ("together", f"{stack}, {gpu}, {method}")):
            for tool, gib in ({OURS: one.gib} | given).items():
                if isinstance(gib, float):
                    groups[kind][tool].append(gib / one.published_gib - 1)
    return [
        {"kind": kind, "name": name} | _sizes(errors) for (kind, name), errors in groups.items()
    ]


def _sizes(errors: Mapping[str, Sequence[float]]) -> dict[str, object]:
    return {"errors": {tool: size_of(values) for tool, values in errors.items()}}


def main() -> None:
    """Ask the tools, and write their answers."""
    python, files = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    own = [(key, o) for key in measured_gpu_keys() for o in timed_runs(key).values()]
    runs = [
        asked_run(find_model(o.cell.model), o.cell.recipe, o.cell.seq_len, o.batch_size, key)
        for key, o in own
    ]
    published: list[Comparison] = []
    if files:
        comparisons, *_ = compared_runs(files[0], files[1])
        published = [one for one in comparisons if one.published_gib is not None]
        runs += [
            asked_run(o.run.model, o.recipe, o.run.seq_len, int(o.row["batch_size"]), o.row["gpu"])
            for o in published
        ]
    record = asked(python, runs)
    answers = record["answers"]
    before = json.loads(ERRORS.read_text(encoding="utf-8")) if ERRORS.exists() else {}
    written = {
        "versions": record["versions"],
        "own": [
            {"run": o.cell.key, "batch": o.batch_size, "answers": given}
            for (_, o), given in zip(own, answers[: len(own)], strict=True)
        ],
        "published": grouped(published, answers[len(own) :])
        if files
        else before.get("published", []),
    }
    ERRORS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
