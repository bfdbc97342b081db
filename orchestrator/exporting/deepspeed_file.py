"""Files of DeepSpeed in a task: written for TRL's command, or carried for a configuration."""

import json
from collections.abc import Mapping
from pathlib import Path

from gpu_catalog.user_file import text_of
from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.layouts.deepspeed import find_file
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


def carried_files(configuration: Configuration) -> Mapping[str, str]:
    """Texts of the file of DeepSpeed of a configuration, by the name that it has there, if any.

    Raises:
        ExportError: it cannot be read, or a job cannot have a file of that name.
    """
    name = configuration.options.get("deepspeed")
    if not isinstance(name, str):
        return {}
    if name.startswith(("/", "~")) or ".." in Path(name).parts:
        raise ExportError(
            f"{configuration.file}: deepspeed: {name}: a job has no such folder: name the file by "
            "a path below the working directory"
        )
    text = text_of(find_file(name, Path(configuration.file)), ExportError)
    # In ASCII, without what ends a line in YAML; it was read as JSON when it was estimated.
    return {name: json.dumps(json.loads(text), indent=2)}
