"""Cells on several ranks, and the processes of ranks."""

import psutil

from builders.observations import recipe, tiny_cell
from trials.recipes.fields import Method
from trials.recipes.parallel import Parallel, Strategy
from trials.records.cell import Cell


def gang_cell(
    strategy: Strategy = "fsdp2", method: Method = "full", *, gpus: int = 2, seq_len: int = 16
) -> Cell:
    """llama-tiny on several CPUs."""
    cell = tiny_cell("llama-tiny", recipe(method), seq_len=seq_len)
    return cell.model_copy(update={"parallel": Parallel(gpus=gpus, strategy=strategy)})


def ranks_of(parent: int) -> list[psutil.Process]:
    """Processes of the ranks of a gang, in their order."""
    return sorted(psutil.Process(parent).children(), key=lambda process: process.pid)
