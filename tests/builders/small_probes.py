"""Set-up and requests of probes of a tiny model, within a small memory."""

from builders.observations import MIB, cpu
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest, Setup
from trials.records.model import find_model
from trials.records.timing_rule import TimingRule

BUDGET_BYTES = 12 * MIB  # llama-tiny with 8 tokens an example: a few examples fit, 256 do not
SMALL = ProbeRequest(batch_size=1, timing=None)
TOO_LARGE = ProbeRequest(batch_size=256, timing=None)
TIMED = ProbeRequest(
    batch_size=1, timing=TimingRule(warmup_seconds=0.0, max_steps=7, relative_half_width=1e-9)
)
ENDLESS = ProbeRequest(
    batch_size=1, timing=TimingRule(min_steps=10**9, max_steps=10**9, max_seconds=1e9)
)


def small_setup(cell: Cell) -> Setup:
    """Set-up of a cell of llama-tiny."""
    return Setup(
        cell=cell, model=find_model("llama-tiny"), gpu=cpu(BUDGET_BYTES), seed=3, threads=1
    )
