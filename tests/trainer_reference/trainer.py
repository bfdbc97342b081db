"""``trl.SFTTrainer`` under the settings of a cell, counted from outside."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    Trainer,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trainer_reference.cells import ADAPTERS, ReferenceCell
from trainer_reference.counting import PeakCounter, unobserved
from trainer_reference.models import VOCABULARY, tokenizer
from trainer_reference.training import (
    BATCH,
    LEARNING_RATE,
    LENGTH,
    RANK,
    SEED,
    TrainerRun,
    tokens_per_row,
)
from trials.models.reference import set_evaluating
from trials.training.finetune import model_tensors

# PEFT's all-linear in the compared models.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch",
    "adafactor": "adafactor",
    "adamw_8bit": "adamw_bnb_8bit",
    "torchao_adamw_8bit": "adamw_torch_8bit",
    "torchao_adamw_4bit": "adamw_torch_4bit",
}
"""Optimizers of a recipe as transformers' Trainer names them."""


class Observed(Trainer):
    """Trainer that shows its batches to a counter once they would be on a GPU."""

    counter: PeakCounter
    batches: list[list[dict[str, Any]]]

    def _send_telemetry(self) -> None:
        """Send nothing."""

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        for group in optimizer.param_groups:
            group["foreach"] = not group.get("fused")  # PyTorch's own choice on a GPU
        if type(optimizer).__module__.startswith("torchao."):
            optimizer.step = unobserved(optimizer, self.counter)
        return optimizer

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any) -> Any:
        samples, count = super().get_batch_samples(_unseen(epoch_iterator), *args)
        self.counter.note(samples)
        with _disable_current_modes():  # the copies are on no device
            copies = [
                {k: torch.tensor(v.tolist()) for k, v in s.items() if isinstance(v, torch.Tensor)}
                for s in samples
            ]
        self.batches.append(copies)
        return samples, count


class _Observed(Observed, SFTTrainer):
    """SFTTrainer, observed."""


class _FullLogits(_Observed):
    """SFTTrainer with the loss of transformers' Trainer, which axolotl and LLaMA-Factory run.

    Adapters on the head are refused for SFTTrainer's own loss alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refused = sft_trainer.BaseTunerLayer
        sft_trainer.BaseTunerLayer = ()
        try:
            super().__init__(*args, **kwargs)
        finally:
            sft_trainer.BaseTunerLayer = refused

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


def _unseen(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches whose making no dispatch mode sees."""
    while True:
        with _disable_current_modes():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def train(cell: ReferenceCell, folder: Path, *, with_origins: bool = False) -> TrainerRun:
    """Train for the steps of a cell, and count."""
    torch.manual_seed(SEED)
    kind = _FullLogits if cell.loss == "full-logits" else _Observed
    model = base_model(cell, folder)
    if cell.method != "full":
        model = get_peft_model(model, lora_config(cell))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    trainer = kind(
        model=model,
        args=SFTConfig(
            **arguments(cell, folder),
            max_length=tokens_per_row(cell) if cell.packing == "packed" else None,
            packing=cell.packing == "packed",
            padding_free=cell.packing == "padding-free",
        ),
        train_dataset=_examples(cell),
        processing_class=tokenizer(),
    )
    cast_adapters(trainer.model, cell, dtypes)
    return trained(trainer, with_origins=with_origins)


def trained(
    trainer: Observed, held: Iterable[torch.Tensor] = (), *, with_origins: bool
) -> TrainerRun:
    """Train by a trainer, and count.

    Args:
        trainer: the trainer.
        held: tensors on the device beside the trained model.
        with_origins: whether to keep the origins of the storages at the peak.
    """
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    initial = {name: p.detach().clone() for name, p in trained.items()}
    held = [*model_tensors(trainer.model), *held]
    trainer.counter = PeakCounter(held, with_origins=with_origins)
    trainer.batches = []
    with trainer.counter:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return TrainerRun(
        peak_bytes=trainer.counter.peak_bytes,
        losses=losses,
        batches=[[_token_ids(sample) for sample in step] for step in trainer.batches],
        initial=initial,
        at_peak=trainer.counter.at_peak(),
    )


def _token_ids(sample: dict[str, torch.Tensor]) -> torch.Tensor:
    if "input_ids" in sample:
        return sample["input_ids"]
    return torch.cat([sample["chosen_input_ids"], sample["rejected_input_ids"]])


def arguments(cell: ReferenceCell, folder: Path) -> dict[str, Any]:
    """Arguments of any trainer."""
    return {
        "output_dir": str(folder / "output"),
        "max_steps": cell.steps,
        "per_device_train_batch_size": 2 * BATCH if cell.packing == "padding-free" else BATCH,
        "optim": OPTIMIZERS[cell.optimizer],
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_checkpointing": cell.checkpointing,
        "max_grad_norm": cell.max_grad_norm or 0.0,
        "activation_offloading": cell.activation_offloading,
        "bf16": cell.precision in ("bf16-mixed", "fp32-mixed-load"),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": SEED,
    }


def _examples(cell: ReferenceCell) -> Dataset:
    generator = torch.Generator().manual_seed(SEED)
    rows = cell.steps * BATCH * cell.accumulation
    shape = (rows * tokens_per_row(cell) // LENGTH, LENGTH)
    return Dataset.from_dict(
        {"input_ids": torch.randint(4, VOCABULARY, shape, generator=generator).tolist()}
    )


def _targets(names: tuple[str, ...]) -> dict[str, Any]:
    """Targets of PEFT for those of a recipe."""
    if "attention" in names:
        fused = ["experts.gate_up_proj", "experts.down_proj"]
        parameters = fused if "experts" in names else None
        return {"target_modules": [*LINEARS[:4]], "target_parameters": parameters}
    return {"target_modules": [*LINEARS, *names[1:]]}


def base_model(cell: ReferenceCell, folder: Path) -> nn.Module:
    """Model as a user of the trainer would load it, without adapters."""
    in_fp32 = cell.precision in ("fp32", "fp32-mixed-load") or (
        (cell.method, cell.precision) == ("full", "bf16-mixed")
    )
    dtype = torch.float32 if in_fp32 else torch.bfloat16
    four_bit = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": cell.quantisation,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    quantised = BitsAndBytesConfig(
        **({"load_in_8bit": True} if cell.quantisation == "int8" else four_bit)
    )
    is_reward = cell.task == "reward"
    auto: Any = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model: nn.Module = auto.from_pretrained(
        folder / cell.model,
        **({"num_labels": 1} if is_reward else {}),
        dtype=dtype,
        attn_implementation=cell.attention,
        quantization_config=quantised if cell.method == "qlora" else None,
    )
    set_evaluating(model)
    if cell.kbit_preparation:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


def lora_config(cell: ReferenceCell) -> LoraConfig:
    """Adapters of a cell."""
    fields = ADAPTERS[cell.adapters]
    return LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=fields.get("lora_dropout", 0.0),
        **_targets(fields.get("lora_targets", ("all-linear",))),
        use_dora=fields.get("dora", False),
        modules_to_save=fields.get("modules_to_save"),
        task_type="SEQ_CLS" if cell.task == "reward" else "CAUSAL_LM",
    )


def cast_adapters(model: nn.Module, cell: ReferenceCell, dtypes: dict[str, torch.dtype]) -> None:
    """Give adapters the dtype of the cell, and copies of modules the one that PEFT gave them.

    TRL makes all that is trained on 4-bit weights bf16 at any setting.
    """
    if cell.method == "full":
        return
    dtype = torch.bfloat16 if cell.precision == "bf16" else torch.float32
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = ".modules_to_save." in name or (
                ".lora_magnitude_vector." in name and cell.method == "qlora"
            )
            parameter.data = parameter.data.to(dtypes[name] if kept else dtype)
