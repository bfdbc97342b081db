"""TRL's trainers of preference tasks under the settings of a cell, counted from outside."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from trainer_reference.cells import ReferenceCell
from trainer_reference.models import VOCABULARY, tokenizer
from trainer_reference.trainer import (
    Observed,
    arguments,
    base_model,
    cast_adapters,
    lora_config,
    trained,
)
from trainer_reference.training import BATCH, LENGTH, SEED, TrainerRun
from trials.training.finetune import model_tensors


class _Dpo(Observed, DPOTrainer):
    """DPOTrainer, observed, on pairs that are token ids already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


class _Kto(Observed, KTOTrainer):
    """KTOTrainer, observed, on examples that are token ids already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


class _Orpo(Observed, ORPOTrainer):
    """ORPOTrainer, observed, on pairs that are token ids already."""

    @staticmethod
    def tokenize_row(feature: dict[str, Any]) -> dict[str, Any]:
        return feature


class _Reward(Observed, RewardTrainer):
    """RewardTrainer, observed."""


TRAINERS: dict[str, tuple[Any, Any]] = {"dpo": (_Dpo, DPOConfig), "kto": (_Kto, KTOConfig)}


def train_on_preferences(
    cell: ReferenceCell, folder: Path, *, with_origins: bool = False
) -> TrainerRun:
    """Train for the steps of a cell on preferences, and count."""
    torch.manual_seed(SEED)
    if cell.reference is None:
        return _train_without_reference(cell, folder, with_origins=with_origins)
    reference = base_model(cell, folder) if cell.reference == "separate" else None
    kind, config = TRAINERS[cell.task]
    trainer = kind(
        model=base_model(cell, folder),
        ref_model=reference,
        args=config(
            **arguments(cell, folder),
            max_length=None,
            precompute_ref_log_probs=cell.reference == "precomputed",
        ),
        train_dataset=_pairs(cell) if cell.task == "dpo" else _examples(cell),
        processing_class=tokenizer(),
        peft_config=None if cell.method == "full" else lora_config(cell),
    )
    held = [] if reference is None else model_tensors(reference)
    cast_adapters(trainer.model, cell, {})
    run = trained(trainer, held, with_origins=with_origins)
    if cell.reference != "precomputed":
        return run
    log_probs = [[_log_probs(sample) for sample in step] for step in trainer.batches]
    return replace(run, reference_log_probs=log_probs)


def _train_without_reference(
    cell: ReferenceCell, folder: Path, *, with_origins: bool
) -> TrainerRun:
    model = base_model(cell, folder)
    # Given adapters to make, ORPOTrainer would also change dtypes of a quantised model.
    model = model if cell.method == "full" else get_peft_model(model, lora_config(cell))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    chosen = arguments(cell, folder)
    trainer: Any
    if cell.task == "orpo":
        del chosen["activation_offloading"]  # the trainer has none
        trainer = _Orpo(
            model=model,
            args=ORPOConfig(**chosen, max_length=LENGTH, remove_unused_columns=False),
            train_dataset=_whole_pairs(cell),
            processing_class=tokenizer(),
        )
    else:
        trainer = _Reward(
            model=model,
            args=RewardConfig(**chosen, max_length=None),
            train_dataset=_whole_pairs(cell).rename_columns(
                {f"{answer}_input_ids": f"{answer}_ids" for answer in ("chosen", "rejected")}
            ),
            processing_class=tokenizer(),
        )
    cast_adapters(trainer.model, cell, dtypes)
    return trained(trainer, with_origins=with_origins)


def _log_probs(sample: dict[str, Any]) -> torch.Tensor:
    if "ref_KL_logps" in sample:
        return torch.stack([sample["ref_KL_logps"], sample["ref_logps"]], 1)
    return torch.cat([sample["ref_chosen_logps"], sample["ref_rejected_logps"]])[:, None]


def _examples(cell: ReferenceCell) -> Dataset:
    """Examples of KTO, each beside the completion before it in its batch; half are desirable."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (cell.steps * cell.accumulation, BATCH, LENGTH)
    tokens = torch.randint(4, VOCABULARY, shape, generator=generator)
    tokens[..., 0] = 4
    return Dataset.from_dict(
        {
            "prompt_ids": tokens[..., :1].flatten(0, 1).tolist(),
            "completion_ids": tokens[..., 1:].flatten(0, 1).tolist(),
            "KL_completion_ids": tokens[..., 1:].roll(1, 1).flatten(0, 1).tolist(),
            "label": [True, False] * (cell.steps * cell.accumulation),
        }
    )


def _pairs(cell: ReferenceCell) -> Dataset:
    """Pairs of one length whose prompt is one token, which has no loss in any task."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (cell.steps * BATCH * cell.accumulation, LENGTH)
    chosen, rejected = (torch.randint(4, VOCABULARY, shape, generator=generator) for _ in range(2))
    return Dataset.from_dict(
        {
            "prompt_ids": chosen[:, :1].tolist(),
            "chosen_ids": chosen[:, 1:].tolist(),
            "rejected_ids": rejected[:, 1:].tolist(),
        }
    )


def _whole_pairs(cell: ReferenceCell) -> Dataset:
    """The pairs as ORPOTrainer makes them of texts, each sequence with its prompt."""
    columns: dict[str, list[list[int]]] = {}
    pairs = _pairs(cell)
    columns["prompt_input_ids"] = pairs["prompt_ids"]
    for answer in ("chosen", "rejected"):
        whole = [p + a for p, a in zip(pairs["prompt_ids"], pairs[f"{answer}_ids"], strict=True)]
        columns[f"{answer}_input_ids"] = whole
        columns[f"{answer}_labels"] = [[-100, *ids[1:]] for ids in whole]
    masks = {
        name.replace("input_ids", "attention_mask"): [[1] * len(ids) for ids in rows]
        for name, rows in columns.items()
        if name.endswith("input_ids")
    }
    return Dataset.from_dict(columns | masks)
