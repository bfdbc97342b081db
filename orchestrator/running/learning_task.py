"""A request to learn from data: model, recipe, held-out set, stopping."""

from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from orchestrator.datasets.training_data import TrainingDataRequest
from trials.records.cell import Cell
from trials.records.learning import Training
from trials.records.model import Model


@dataclass(frozen=True, slots=True)
class LearningRequest:
    """A request to learn.

    Attributes:
        model: model to fine-tune.
        gpu: device.
        cells: one per number of active experts, in ascending order.
        training: training arguments.
        data: data set.
        whole: train all epochs, also after learning has stopped.
        checkpoints: save a checkpoint after each epoch.
        threads: CPU threads of a step.
    """

    model: Model
    gpu: Gpu
    cells: tuple[Cell, ...]
    training: Training
    data: TrainingDataRequest
    whole: bool
    checkpoints: bool
    threads: int
