"""TRL's GRPOTrainer under the settings of a cell: its update on prepared completions, counted.

No vLLM runs: the trainer is given completions of random tokens, and the log-probabilities that a
sampler would report with them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

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

PROMPT = 4


class _Grpo(Observed, GRPOTrainer):
    """GRPOTrainer, observed, with completions instead of a sampler.

    Attributes:
        completions: (steps, sequences, length) sequences of one token of prompt and a completion.
        sampled: (steps, sequences, length - 1) log-probabilities of the sampler.
        updates: inputs of each micro-step's loss.
    """

    completions: torch.Tensor
    sampled: torch.Tensor
    updates: list[dict[str, torch.Tensor]]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any) -> Any:
        return Trainer.get_batch_samples(self, epoch_iterator, *args)  # prompts are texts

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        with _disable_current_modes():
            step = self._step // self.args.gradient_accumulation_steps
            tokens = self.completions[step].tolist()
            log_probs = self.sampled[step].tolist() if self.use_vllm else None
        completions = [row[1:] for row in tokens]
        texts = [""] * len(prompts)
        return [row[:1] for row in tokens], completions, None, texts, log_probs, {}, None, []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        names = ("completion_ids", "advantages", "sampling_per_token_logps")
        with _disable_current_modes():
            self.updates.append({n: torch.tensor(inputs[n].tolist()) for n in names if n in inputs})
        return super()._compute_loss(model, inputs)


def train_on_completions(
    cell: ReferenceCell, folder: Path, *, with_origins: bool = False
) -> TrainerRun:
    """Train for the steps of a cell on completions, and count."""
    torch.manual_seed(SEED)
    sequences = BATCH * cell.accumulation
    chosen = arguments(cell, folder)
    del chosen["activation_offloading"]  # the trainer has none
    trainer = _Grpo(
        model=base_model(cell, folder),
        reward_funcs=lambda prompts, **_: [float(n % 2) for n in range(len(prompts))],
        args=GRPOConfig(
            **chosen,
            num_generations=BATCH,
            max_completion_length=LENGTH - 1,
            beta=0.0 if cell.reference is None else 0.04,
        ),
        train_dataset=Dataset.from_dict({"prompt": [""] * cell.steps * cell.accumulation}),
        processing_class=tokenizer(),
        peft_config=None if cell.method == "full" else lora_config(cell),
    )
    cast_adapters(trainer.model, cell, {})
    generator = torch.Generator().manual_seed(SEED)
    shape = (cell.steps, sequences, LENGTH)
    trainer.completions = torch.randint(4, VOCABULARY, shape, generator=generator)
    trainer.completions[..., 0] = PROMPT
    trainer.sampled = _sampled(trainer)
    trainer.use_vllm = bool(cell.generation_share)
    trainer.updates = []
    held = [] if trainer.ref_model is None else model_tensors(trainer.ref_model)
    run = trained(trainer, held, with_origins=with_origins)
    steps = [
        trainer.updates[first : first + cell.accumulation]
        for first in range(0, len(trainer.updates), cell.accumulation)
    ]
    sampled = [
        [u["sampling_per_token_logps"] for u in step] for step in steps if cell.generation_share
    ]
    return replace(
        run,
        batches=[[_with_prompt(update["completion_ids"]) for update in step] for step in steps],
        advantages=[[update["advantages"] for update in step] for step in steps],
        sampled_log_probs=sampled or None,
    )


def _sampled(trainer: _Grpo) -> torch.Tensor:
    """Log-probabilities of the untrained model, but lower for every other completion."""
    tokens = trainer.completions.flatten(0, 1)
    with torch.no_grad():
        log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, tokens, torch.ones_like(tokens), tokens.shape[1] - 1, batch_size=BATCH
        )
    log_probs[::2] -= 0.5 / log_probs.shape[1]
    return log_probs.view(*trainer.completions.shape[:2], -1)


def _with_prompt(completions: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((len(completions), 1), PROMPT), completions], 1)
