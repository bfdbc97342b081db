"""Reasons why a cell is excluded from the ranking."""

import shlex
from collections.abc import Sequence

from fitting.families.cell_step_time import Batch
from orchestrator.pricing.host_memory import none_has_enough
from orchestrator.pricing.offer_constraints import MissedConstraints
from orchestrator.ranking.priced_cells import PricedCell, RankingInputs
from orchestrator.ranking.ranked_offer import Excluded
from trials.records.cell import Cell
from trials.records.observation import Observation, trainable_batch


def excluded(priced: PricedCell, inputs: RankingInputs) -> Excluded:
    """Record of a cell none of whose offers is ranked."""
    missed = MissedConstraints.best_of((p.rented.hours, p.usd) for p in priced.offers)
    reason = excluded_reason(priced, inputs) if missed is None else missed.text(inputs.constraints)
    return Excluded(cell=priced.cell, reason=reason, missed=missed)


def excluded_reason(priced: PricedCell, inputs: RankingInputs) -> str:
    """Reason why a cell has no price."""
    if priced.has_step_time and priced.too_little_host_memory:
        return none_has_enough(priced.too_little_host_memory)
    if priced.has_step_time and priced.offers_of_gpu:
        options = inputs.constraints.options
        drop = "leave it out" if len(options) == 1 else "relax one of them"
        return f"no offer of its {priced.offers_of_gpu} meets {' and '.join(options)}: {drop}"
    if priced.reason is not None:
        return priced.reason
    cell = priced.cell
    if not priced.offers_of_gpu and cell.capped_on is None:
        several = f" with {cell.ranks_per_node} GPUs" if cell.ranks_per_node > 1 else ""
        if cell.parallel is None or cell.nodes == 1:
            return (
                f"the catalog has no offer for {cell.gpu}{several}: give its price by --prices FILE"
            )
        network = cell.parallel.network
        between = "an unknown network" if network is None else network.text
        return (
            f"the catalog has no offer for {cell.gpu}{several} on {between} between nodes: name "
            "the network of yours in the layout (node_network_gbps, rdma)"
        )
    observations = inputs.step_times.observations(cell)
    return _reason_by_largest(inputs.batch, cell, observations) or _progress(
        observations, inputs.run
    )


def _reason_by_largest(batch: Batch, cell: Cell, observations: Sequence[Observation]) -> str | None:
    """Reason that follows from the largest batch; None where it is unknown or not the reason."""
    known_largest = trainable_batch(observations)
    if known_largest is None:
        return None
    largest, miss = known_largest
    if largest == 0 and miss is not None:
        fits = "survives drawn lengths" if miss.is_drawn else "fits"
        why = f"{miss.outcome} at batch size 1 ({miss.detail})"
        return f"not even one {cell.recipe.row} {fits}: {why}"
    if cell.capped_on is not None:
        return (
            f"its largest batch, {largest}, was measured on {cell.capped_on} under a memory cap: "
            "its speed is unknown"
        )
    if isinstance(batch, str):
        return None
    if batch > largest:
        return f"batch size {batch} does not fit: the largest is {largest}; give --batch-size max"
    return f"batch size {batch} was not measured, and no law predicts it: give --batch-size fastest"


def _progress(observations: Sequence[Observation], run: str) -> str:
    """Last failure of a cell, or how far its measurement is and how to go on with its run."""
    failures = [o for o in observations if not o.outcome.is_verdict]
    if failures:
        last = failures[-1]
        times = sum((o.purpose, o.batch_size) == (last.purpose, last.batch_size) for o in failures)
        return f"batch size {last.batch_size} {last.outcome} {times} times: {last.detail}"
    state = "not fully measured" if observations else "not measured"
    return f"{state}: sweep --resume --out {shlex.quote(run)} measures it"
