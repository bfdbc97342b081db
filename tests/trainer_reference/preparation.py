"""Examples as TRL's trainers prepare them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer


def sequence_lengths(
    task: str,
    rows: Sequence[Mapping[str, Any]],
    tokenizer_folder: Path,
    max_length: int | None = None,
) -> list[list[int]]:
    """Lengths of the sequences of each example, as TRL's own trainer prepares them."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0
    )
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode=None)
    prepared_by = {"dpo": DPOTrainer, "kto": KTOTrainer, "reward": RewardTrainer}[task]
    data = Dataset.from_list([dict(row) for row in rows])
    prepared = prepared_by._prepare_dataset(trainer, data, tokenizer, arguments, "train")
    answers = ("completion",) if task == "kto" else ("chosen", "rejected")
    return [
        [len(row.get("prompt_ids", ())) + len(row[f"{answer}_ids"]) for answer in answers]
        for row in prepared
    ]
