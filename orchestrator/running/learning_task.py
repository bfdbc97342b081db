"""A request to learn from data: model, recipe, held-out set, stopping."""

from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from orchestrator.datasets.training_data import TrainingDataRequest
from trials.records.cell import Cell
from trials.records.learning import Training
from trials.records.model import Model


@dataclass(frozen=True, slots=True)
class LearningRequest:
    """A request to learn."""

    model: Model
    gpu: Gpu
    cells: tuple[Cell, ...]
    training: Training
    data: TrainingDataRequest
    whole: bool
    checkpoints: bool
    threads: int
