"""Memory of fine-tuning runs by other tools, in a virtual environment of theirs.

Reads a list of runs as JSON (``other_tools.py`` describes them) and writes, for each, GiB by the
tool's name, or the reason that it gives none. The tools read a model's config.json in a folder;
where one would ask the hub for it, that look-up alone is replaced.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Run = dict[str, Any]
MIB_A_GIB = 1024.0
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = set(ALL_LINEAR[:4])
MLP = set(ALL_LINEAR[4:])
PACKAGES = {
    "fitcheck": "fitcheck-llm",
    "kitsune": "torch-kitsune",
    "canifinetune": "canifinetune",
    "accelerate": "accelerate",
    "ftune": "ftune",
}


class NoAnswerError(ValueError):
    """The tool has no option that the run needs."""


def by_fitcheck(run: Run, folder: Path) -> float:
    """``fitcheck``: its dtype is that of weights and activations alike."""
    parser = importlib.import_module("fitcheck.config_parser")
    estimator = importlib.import_module("fitcheck.estimator")
    databases = importlib.import_module("fitcheck.gpu_db")
    parser.hf_hub_download = lambda **_: folder / "config.json"
    parser._reported_param_count = lambda *_: None
    if run["optimizer"] not in {"adamw", "adam8bit"}:
        raise NoAnswerError(f"no optimizer {run['optimizer']}")
    full = run["method"] == "full"
    training = estimator.TrainingConfig(
        precision=run["weights"] if run["method"] != "qlora" else "bf16",
        quantization="nf4" if run["method"] == "qlora" else "none",
        double_quant=run["double_quantisation"],
        optimizer=run["optimizer"],
        optimizer_dtype="bf16" if full and run["weights"] == "bf16" else "fp32",
        batch_size=run["batch_size"],
        seq_len=run["seq_len"],
        lora_rank=None if full else run["rank"],
        lora_targets=run["targets"] or list(ALL_LINEAR),
        grad_checkpoint=run["checkpointing"],
        flash_attn=run["attention"] != "eager",
    )
    spec = databases.get_gpu(run["gpu"], vram_mib=run["gpu_mib"])
    model = parser.fetch_model_config(run["model"])
    return float(estimator.estimate(model, training, spec).total_mib) / MIB_A_GIB


def by_canifinetune(run: Run, folder: Path) -> float:
    """``canifinetune estimate``, with its CUDA overhead but without its margin of safety."""
    memory = importlib.import_module("canifinetune.estimator.memory")
    optimizers = {"adamw": "adamw_torch", "adam8bit": "paged_adamw_8bit"}
    if run["optimizer"] not in optimizers:
        raise NoAnswerError(f"no optimizer {run['optimizer']}")
    request = memory.EstimateRequest(
        model_id=str(folder),
        method=run["method"],
        seq_len=run["seq_len"],
        micro_batch_size=run["batch_size"],
        base_dtype=run["weights"],
        quantization="nf4_double_quant" if run["double_quantisation"] else "nf4",
        lora_rank=run["rank"] or 16,
        lora_target_scope=_scope(run["targets"]),
        optimizer=optimizers[run["optimizer"]],
        gradient_checkpointing=run["checkpointing"],
        attention_implementation=run["attention"],
        loss_backend="stock" if run["loss"] == "full-logits" else "liger",
        gpu_vram_gb=run["gpu_mib"] / MIB_A_GIB,
        use_network=False,
    )
    parts = memory.estimate(request).memory
    return float(parts.total_estimated_gb - parts.safety_margin_gb)


def _scope(targets: list[str] | None) -> str:
    """The nearest of its scopes of LoRA."""
    if not targets or MLP & set(targets):
        return "all_linear"
    return "attention" if ATTENTION - set(targets) == set() else "conservative"


def by_kitsune(run: Run, folder: Path) -> float:
    """``kitsune.predict``: no checkpointing, and its model of the hub has no head."""
    loader = importlib.import_module("kitsune.predict.hf_integration")
    model, _ = loader.load_hf_model(str(folder))
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[run["weights"]]
    if run["optimizer"] != "adamw":
        raise NoAnswerError(f"no optimizer {run['optimizer']}")
    shape, batch_size = (run["seq_len"],), run["batch_size"]
    if run["method"] == "full":
        estimator = importlib.import_module("kitsune.predict.estimator")
        predicted = estimator.predict_memory(
            model, shape, batch_size, dtype, optimizer="adamw", training=True
        )
        return float(predicted.total_gb)
    lora = importlib.import_module("kitsune.predict.lora_estimator")
    config = lora.LoRAConfig(
        rank=run["rank"],
        target_modules=tuple(run["targets"] or ALL_LINEAR),
        use_qlora=run["method"] == "qlora",
    )
    return float(lora.estimate_lora_memory(model, shape, batch_size, dtype, config).total_gb)


def by_accelerate(run: Run, folder: Path) -> float:
    """``accelerate estimate-memory``: its column for training with Adam, at no length.

    Its float16 has Adam's state take half as much as its float32, as bf16 weights do.
    """
    if run["method"] != "full":
        raise NoAnswerError("no adapters")
    command = importlib.import_module("accelerate.commands.estimate")
    command.verify_on_hub = lambda *_: SimpleNamespace(config={})
    arguments = SimpleNamespace(
        model_name=str(folder),
        library_name="transformers",
        trust_remote_code=False,
        dtypes=["float16" if run["weights"] == "bf16" else "float32"],
    )
    ((*_, training),) = command.gather_data(arguments)
    return float(max(training.values())) / 2**30


def by_ftune(run: Run, folder: Path) -> float:
    """``ftune``: the package on PyPI has one module, without a line of code."""
    del run, folder
    module = importlib.import_module("ftune")
    raise NoAnswerError(f"{Path(str(module.__file__)).stat().st_size} bytes of code")


TOOLS: dict[str, Callable[[Run, Path], float]] = {
    "fitcheck": by_fitcheck,
    "canifinetune": by_canifinetune,
    "kitsune": by_kitsune,
    "accelerate": by_accelerate,
    "ftune": by_ftune,
}


def answers(run: Run) -> dict[str, float | str]:
    """GiB by each tool, or the reason that it gives none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[run["weights"]]
        config = run["config"] | {"dtype": dtype, "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        given: dict[str, float | str] = {}
        for tool, ask in TOOLS.items():
            try:
                given[tool] = round(ask(run, folder), 3)
            except NoAnswerError as error:
                given[tool] = str(error)
            except Exception as error:  # noqa: BLE001 - another's code may raise anything
                given[tool] = f"{type(error).__name__}: {error}"[:200]
    return given


def main() -> None:
    """Answer all runs of standard input."""
    versions = importlib.import_module("importlib.metadata").version
    output, sys.stdout = sys.stdout, sys.stderr  # the tools print
    record = {
        "versions": {tool: versions(package) for tool, package in PACKAGES.items()},
        "answers": [answers(run) for run in json.load(sys.stdin)],
    }
    json.dump(record, output)


if __name__ == "__main__":
    main()
