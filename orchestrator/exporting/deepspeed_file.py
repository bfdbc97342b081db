"""Files of DeepSpeed in a task: written for TRL's command, or carried in a configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_catalog.user_file import text_of
from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.layouts.deepspeed import BATCHES, find_file
from orchestrator.exporting.training import ExportError, TrainingJob
from trials.recipes.parallel import WEIGHTS_DIVIDED, ZERO_STAGES

PACKAGE = "deepspeed>=0.19.8"
"""Package for TRL and LLaMA-Factory; older ones need CUDA's compiler when they are imported."""
OF_TRAINER = {
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
}
"""What transformers' Trainer fills in by its own options."""
SAVING = {"stage3_gather_16bit_weights_on_model_save": True}


def file_text(training: TrainingJob) -> str:
    """File of DeepSpeed, in JSON, by which transformers' Trainer trains as the estimate did."""
    assert training.strategy is not None
    assert training.zero is not None
    stage = ZERO_STAGES[training.strategy]
    saving = SAVING if stage == WEIGHTS_DIVIDED else {}
    zero = {"stage": stage, **training.zero.given(), **saving}
    return json.dumps({**OF_TRAINER, "zero_optimization": zero}, indent=2)


def carried_content(configuration: Configuration) -> Mapping[str, Any] | None:
    """Content of the file of DeepSpeed of a configuration; None where it has the same, or no file.

    It travels in the configuration, which all trainers take: a file of a job's own would need a
    place that is no file of the user's. Its batches are those of the export, which may be others.

    Raises:
        ConfigurationError: there is no such file.
        ExportError: it cannot be read.
    """
    value = configuration.options.get("deepspeed")
    if isinstance(value, str):
        # It was read as JSON when it was estimated.
        stated = json.loads(text_of(find_file(value, Path(configuration.file)), ExportError))
    else:
        stated = value or {}
    content = {name: "auto" if name in BATCHES else part for name, part in stated.items()}
    return None if content == (value or {}) else content
