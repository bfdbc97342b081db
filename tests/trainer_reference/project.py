"""The project's own step under the settings of a cell: measured on the CPU, and simulated."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from builders.observations import cpu

from trainer_reference.cells import ADAPTERS, ReferenceCell
from trainer_reference.counting import PeakCounter
from trainer_reference.training import BATCH, RANK, SEED, TrainerRun, tokens_per_row
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.trace_cache import StepTrace
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps
from trials.training.finetune import FineTuning


def project_cell(cell: ReferenceCell, folder: Path) -> Cell:
    """The project's cell for a cell of the reference."""
    name = str(folder / cell.model)
    has_adapters = cell.method != "full"
    adapters = {"lora_rank": RANK, "lora_targets": ("all-linear",)} | ADAPTERS[cell.adapters]
    fields = {
        "method": cell.method,
        **(adapters if has_adapters else {}),
        "quantisation": cell.quantisation if cell.method == "qlora" else None,
        "kbit_preparation": cell.kbit_preparation,
        "optimizer": cell.optimizer,
        "precision": cell.precision,
        "gradient_checkpointing": cell.checkpointing,
        "gradient_accumulation": cell.accumulation,
        "max_grad_norm": cell.max_grad_norm,
        "activation_offloading": cell.activation_offloading,
        "loss": cell.loss,
        "router_loss": "auto",
        "task": cell.task,
        "reference": cell.reference,
        "attention": cell.attention,
        "packing": cell.packing is not None,
        "generation_share": cell.generation_share,
    }
    recipe = with_defaults(Recipe.model_validate(fields), find_model(name), cpu())
    return Cell(
        gpu="cpu", model=name, weights="pretrained", recipe=recipe, seq_len=tokens_per_row(cell)
    )


def measure(
    cell: ReferenceCell, folder: Path, run: TrainerRun, *, with_origins: bool = False
) -> tuple[PeakCounter, list[float]]:
    """Train on the batches of the trainer from its weights; return the counter and losses."""
    ours = project_cell(cell, folder)
    tuning = FineTuning(ours, find_model(ours.model), device=torch.device("cpu"), seed=SEED)
    with torch.no_grad():
        for name, parameter in tuning.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(run.initial[name])
    losses = []
    given = {
        name: column
        for name in ("reference_log_probs", "advantages", "sampled_log_probs")
        if (column := getattr(run, name)) is not None
    }
    with PeakCounter(tuning.tensors(), with_origins=with_origins) as counter:
        for step, micro_batches in enumerate(run.batches):
            tokens = torch.cat(micro_batches)
            if cell.packing is not None:
                tokens = tokens.reshape(-1, ours.seq_len)
            columns = {name: torch.cat(column[step]) for name, column in given.items()}
            batch = replace(tuning.batch(tokens), **columns)
            del columns
            losses.append(tuning.step(batch, micro_batches=cell.accumulation))
            del batch
    return counter, losses


def simulated_peak(cell: ReferenceCell, folder: Path) -> int:
    """Peak bytes of the simulated step."""
    ours = project_cell(cell, folder)
    traced = TraceableCell(ours, find_model(ours.model), target="cpu", whole=True).trace(
        BATCH, _no_experts
    )
    trace = StepTrace((BATCH,), (traced.recording,), traced.held, traced.copies)
    steps = Steps(trace, cell.accumulation)
    _, sizes = steps.storages(BATCH)
    return int(steps.held.sizes.sum() + np.cumsum(sizes).max())


def _no_experts(_: torch.Tensor) -> int:
    raise AssertionError
