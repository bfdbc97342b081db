"""Lower bound of a recipe's memory by the trace of another: a misfit without a trace."""

from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.question import Question
from trials.simulation.recording import Purpose
from trials.simulation.simulated_cell import GIB

OUTSIDE_LAYERS = ("loss", "gradient_accumulation", "effective_batch")
"""Fields of a recipe that do not change what its layers keep for the backward pass."""
OF_ONE = 0.9
"""Least part of its share of a batch that a batch of one keeps: some copies are views there."""


def cannot_fit(question: Question, row: Estimated) -> bool:
    """Whether a row with the same layers shows, without a trace, that a question does not fit.

    The layers keep the same tensors for the backward pass under any loss, accumulation and setting
    of the allocator, so the model and these tensors are a lower bound of the memory. Those of one
    example are at least their share of a traced batch, but for operators of a batch of one.
    """
    own, other = question.recipe, row.question.recipe
    unlike = own.model_copy(update={name: getattr(other, name) for name in OUTSIDE_LAYERS}) != other
    unlike = unlike or question.parallel != row.question.parallel
    if unlike or question.seq_len != row.question.seq_len or question.has_square_mask:
        return False
    traced = row.cell.request.batch_sizes[0]
    kept_gib = row.cell.at_peak(traced, row.gpu).get(Purpose.CHECKPOINT, 0) / traced / GIB
    if isinstance(question.batch, int):
        kept_gib *= question.batch
    return row.weights_gib + OF_ONE * kept_gib > row.estimate.usable_gib
