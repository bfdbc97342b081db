"""Keys of a trainer's configuration that make the changes of an estimate."""

import json
import shlex
from collections.abc import Mapping

MICRO_BATCH = {"axolotl": "micro_batch_size"}
MICRO_BATCH_OF_TRANSFORMERS = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
LENGTH = {"axolotl": "sequence_len", "LLaMA-Factory": "cutoff_len", "TRL": "max_length"}
OF_BATCHES = ("--batch-size", "--gradient-accumulation", "--effective-batch")
OF_LENGTH = ("--seq-len", "--cutoff")
EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"

CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"

Keys = Mapping[str, object]

SHARED: Mapping[tuple[str, str], Keys] = {
    ("--gradient-checkpointing", "on"): {"gradient_checkpointing": True},
    ("--gradient-checkpointing", "off"): {"gradient_checkpointing": False},
    ("--optimizer", "adamw_8bit"): {"optim": "adamw_8bit"},
    ("--precision", "bf16-mixed"): {"bf16": True},
}
KEYS: Mapping[str, Mapping[tuple[str, str], Keys]] = {
    "axolotl": {
        **SHARED,
        ("--method", "lora"): {"adapter": "lora"},
        ("--method", "qlora"): {"adapter": "qlora", "load_in_4bit": True},
        ("--optimizer", "adamw_8bit"): {"optimizer": "adamw_8bit"},
        ("--attention", "sdpa"): {"attn_implementation": "sdpa"},
        ("--attention", "flash_attention_2"): {"attn_implementation": "flash_attention_2"},
        ("--activation-offloading", "on"): {"activation_offloading": True},
        ("--loss", "cce"): {"plugins": [CUT_CROSS_ENTROPY]},
    },
    "LLaMA-Factory": {
        **SHARED,
        ("--gradient-checkpointing", "on"): {"disable_gradient_checkpointing": False},
        ("--gradient-checkpointing", "off"): {"disable_gradient_checkpointing": True},
        ("--loss", "liger"): {"enable_liger_kernel": True},
        ("--liger-kernels", "on"): {"enable_liger_kernel": True},
        ("--method", "lora"): {"finetuning_type": "lora"},
        ("--method", "qlora"): {"finetuning_type": "lora", "quantization_bit": 4},
        ("--attention", "sdpa"): {"flash_attn": "sdpa"},
        ("--attention", "flash_attention_2"): {"flash_attn": "fa2"},
    },
    "TRL": {
        **SHARED,
        ("--precision", "bf16-mixed"): {"dtype": "bfloat16"},
        ("--method", "lora"): {"use_peft": True},
        ("--method", "qlora"): {"use_peft": True, "load_in_4bit": True},
        ("--attention", "sdpa"): {"attn_implementation": "sdpa"},
        ("--attention", "flash_attention_2"): {"attn_implementation": "flash_attention_2"},
        ("--activation-offloading", "on"): {"activation_offloading": True},
    },
}
"""Keys by trainer for an option and its value."""


def micro_batch_key(trainer: str) -> str:
    """Key of the micro-batch."""
    return MICRO_BATCH.get(trainer, MICRO_BATCH_OF_TRANSFORMERS)


def keys_text(
    file: str, trainer: str, options: str, batches: tuple[int, int], lead: str = "In"
) -> str:
    """The keys that make a change in a configuration, in a line.

    Args:
        file: name of the configuration.
        trainer: name of the trainer.
        options: options of an estimate that state the change.
        batches: examples of a micro-batch, and micro-batches of a step.
        lead: words before the name of the file.
    """
    keys: dict[str, object] = {}
    beside, lacking = [], []
    for option, value in _stated(options).items():
        if option in OF_BATCHES:
            continue
        if option in OF_LENGTH:
            keys[LENGTH[trainer]] = int(value)
        elif option == "--expandable-segments":
            beside.append(EXPANDABLE_SEGMENTS)
        elif (option, value) in KEYS[trainer]:
            keys.update(KEYS[trainer][option, value])
        else:
            lacking.append(f"{option} {value}")
    keys[micro_batch_key(trainer)], keys[ACCUMULATION] = batches
    shown = [f"{name}: {json.dumps(value).strip(chr(34))}" for name, value in keys.items()]
    text = f"{lead} {file}: {', '.join([*shown, *beside])}."
    return f"{text} {trainer} has no key for {', '.join(lacking)}." if lacking else text


def _stated(options: str) -> dict[str, str]:
    """Values by option; empty for one that takes none."""
    stated: dict[str, str] = {}
    option = ""
    for word in shlex.split(options):
        is_option = word.startswith("--")
        option = word if is_option else option
        stated[option] = "" if is_option else word
    return stated
