"""Numbers of GPUs and strategies that an estimate compares."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.links.between_nodes import distinct_links
from gpu_catalog.offer import Offer
from orchestrator.estimating.choosing.recipe_choice import fits
from orchestrator.estimating.estimate import by_objective
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.question import EstimateError, Question
from orchestrator.estimating.requested_gpus import counted
from trials.recipes.parallel import (
    MOST_GPUS,
    SHARDED_BY_TORCH,
    ZERO_STRATEGIES,
    Parallel,
    Strategy,
    default_zero,
    on_instances,
)
from trials.recipes.parallel import STRATEGIES as ALL_STRATEGIES
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import OffloadOption, ZeroSettings

StrategyOption = Literal["auto", Strategy]
STRATEGIES: Mapping[StrategyOption, tuple[Strategy, ...]] = {
    "auto": ("fsdp2", "hsdp", "ddp"),
    **{strategy: (strategy,) for strategy in ALL_STRATEGIES},
}


def names_by_count(names: Sequence[str], counts: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Names of GPUs, without their counts, by the number of GPUs that train together.

    Args:
        names: names as in ``--gpu``; ``8xH100-SXM`` has a number of its own.
        counts: numbers for the names without one.

    Raises:
        EstimateError: a number is too large.
    """
    groups: dict[int, list[str]] = defaultdict(list)
    for name in names:
        own, alone = counted(name)
        for count in counts if own is None else (own,):
            if not 1 <= count <= MOST_GPUS:
                raise EstimateError(f"{count} GPUs: 1 to {MOST_GPUS} are simulated")
            groups[count].append(alone)
    if not groups:
        return {1: ()}  # whose names are reported as missing
    return {count: tuple(group) for count, group in groups.items()}


def layouts(  # noqa: PLR0913 - options of one layout
    count: int,
    strategy: StrategyOption,
    nodes: int,
    degree: int | None = None,
    zero: ZeroSettings | None = None,
    *,
    offload: OffloadOption | None = None,
) -> tuple[Parallel | None, ...]:
    """Layouts of so many GPUs of all nodes; None for one GPU.

    ``hsdp`` has a copy of the model on each node, in shards among the GPUs there.

    Args:
        count: number of GPUs.
        strategy: how they share a training.
        nodes: number of nodes.
        degree: GPUs of a group of ``tp``.
        zero: settings of a file of DeepSpeed.
        offload: part of the training that the host holds, where no file says so; ``none`` for
            nothing, whatever the file says.

    Raises:
        EstimateError: the nodes cannot share the GPUs, or have too few for the strategy; or the
            degree is none of the strategy, or it offloads nothing of the kind.
    """
    zero = _zero_settings(strategy, zero, offload)
    offload = None if offload == "none" else offload
    if degree is not None and strategy != "tp":
        raise EstimateError(
            f"--degree {degree} is a choice of tp: add --strategy tp, or leave it out"
        )
    if count % nodes:
        raise EstimateError(
            f"--nodes {nodes}: {count} GPUs cannot be divided among them: give a multiple"
        )
    if count == 1 and (zero is None or zero.offload is None):
        return (None,)
    if strategy == "hsdp" and nodes in {1, count}:
        raise EstimateError(
            f"--strategy hsdp: {count} GPUs on {nodes} {'node' if nodes == 1 else 'nodes'}: it "
            "copies the model to each of several nodes, in shards among its GPUs: give --nodes and "
            "more --gpus, or fsdp2"
        )
    if strategy == "tp" and nodes == count:
        raise EstimateError(
            f"--strategy tp: {count} GPUs on {nodes} nodes: it divides layers among the GPUs of a "
            "node: give more --gpus, or fsdp2"
        )
    if degree is not None and (degree == 1 or count // nodes % degree):
        raise EstimateError(
            f"--degree {degree}: the {count // nodes} GPUs of a node cannot be divided into groups "
            "of so many: give a divisor of at least 2"
        )
    copies = {"hsdp": nodes} if nodes > 1 and count > nodes else {}
    return tuple(
        Parallel(
            gpus=count,
            strategy=one,
            nodes=nodes,
            replicas=copies.get(one),
            degree=degree,
            zero=zero,
            shards_on_host=True if offload and one in SHARDED_BY_TORCH else None,
        )
        for one in STRATEGIES[strategy]
        if one != "hsdp" or copies
    )


def _zero_settings(
    strategy: StrategyOption, zero: ZeroSettings | None, offload: OffloadOption | None
) -> ZeroSettings | None:
    """Settings of a file of DeepSpeed, or those by default with ``--offload``; None for neither.

    Raises:
        EstimateError: the strategy offloads nothing of the kind, or there is a file, too.
    """
    if offload is None:
        return zero
    if offload == "none":
        return None if zero is None else zero.model_copy(update={"offload": None})
    if zero is not None:
        raise EstimateError(f"--offload {offload}: DeepSpeed's file says what the host holds")
    if strategy in SHARDED_BY_TORCH:
        if offload != "all":
            raise EstimateError(
                f"--offload {offload}: {strategy} offloads weights, gradients and optimizer "
                "together: use all"
            )
        return None
    needed: Sequence[str] = ZERO_STRATEGIES if offload == "optimizer" else ZERO_STRATEGIES[-1:]
    if strategy not in needed:
        more = SHARDED_BY_TORCH if offload == "all" else ()
        names = " or ".join((*needed, *more))
        raise EstimateError(f"--offload {offload} needs --strategy {names}, not {strategy}")
    return default_zero(strategy).model_copy(update={"offload": offload})


def placed_layouts(
    layout: Parallel | None,
    gpus: Sequence[Gpu],
    catalog: Catalog,
    allows: Callable[[Offer], bool],
) -> list[tuple[Parallel | None, list[Gpu]]]:
    """A layout by the links of each allowed instance of the GPUs, with those that have them."""
    if layout is None:
        return [(layout, list(gpus))]
    placed: dict[Parallel | None, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        offers = filter(allows, catalog.offers(gpu.key))
        for one in on_instances(layout, distinct_links(offers, layout.gpus_per_node)):
            placed[one].append(gpu)
    return list(placed.items())


def on_layout(question: Question, parallel: Parallel | None, limit: int) -> Question:
    """The question on a layout, with an effective batch that its GPUs can share.

    Args:
        question: question on one GPU.
        parallel: the layout.
        limit: largest batch size to try.

    Raises:
        EstimateError: the effective batch that was asked for cannot be shared.
    """
    if parallel is None:
        return question
    size = question.batch if isinstance(question.batch, int) else 1
    share, whole = parallel.data_parallel_ranks * size, question.recipe.effective_batch
    recipes = question.recipe, question.fp16_recipe
    if whole is not None and whole % share:
        if not question.assumes_batch:
            # A node is one group of tp, which shares each example.
            by_tp = parallel.degree is None and whole % (parallel.nodes * size) == 0
            raise EstimateError(
                f"--effective-batch {whole} cannot be shared by {parallel.sharers} with "
                f"micro-batches of {size}: give a multiple of {share}{', or --strategy tp' * by_tp}"
            )
        whole = share * math.ceil(whole / share)
        recipes = _with_batch(recipes[0], whole), _with_batch(recipes[1], whole)
    recipe, fp16_recipe = recipes
    return replace(
        question,
        recipe=recipe,
        fp16_recipe=fp16_recipe,
        batch_limit=recipe.of_rank(parallel.data_parallel_ranks).batch_limit(limit),
        parallel=parallel,
        expandable_segments=question.expandable_segments or question.expands_on_several,
    )


def on_changed_layout(
    question: Question, changes: Mapping[str, Any], strategy: StrategyOption, limit: int
) -> Question | None:
    """The question on another layout of its GPUs, with their links; itself where none is named.

    Args:
        question: question on several GPUs.
        changes: options by name, among which may be ``strategy``, and ``offload`` for all shards.
        strategy: the strategy that was asked for.
        limit: largest batch size to try.

    Returns:
        The question; None where the changes contradict the strategy that was asked for, or the
        GPUs cannot share the effective batch.
    """
    other, layout = changes.get("strategy"), question.parallel
    if other is None or layout is None:
        return question
    if strategy not in {"auto", other}:
        return None
    kept = {"gpus", "nodes", "node_network_gbps", "rdma", "interconnect"} | (
        {"replicas"} if other == "hsdp" else set()
    )
    fields = layout.model_dump(include=kept) | {"strategy": other}
    parallel = Parallel.model_validate(fields | {"offload": changes.get("offload")})
    try:
        return on_layout(question, parallel, limit)
    except EstimateError:
        return None


def _with_batch(recipe: Recipe, effective_batch: int) -> Recipe:
    return recipe.model_copy(update={"effective_batch": effective_batch})


def best_layouts(rows: Iterable[Estimated]) -> list[Estimated]:
    """The best strategy of each GPU and number, of the user's own and of rented ones.

    Of those that fit, it is the best by the objective; where none fits, that of the least memory.
    """
    groups: dict[tuple[str, int, bool], list[Estimated]] = defaultdict(list)
    for row in rows:
        groups[row.gpu.key, row.estimate.gpus, row.question.is_own].append(row)
    return [
        min(
            group,
            key=lambda row: (not fits(row), *by_objective(row), row.estimate.reserved_gib),
        )
        for group in groups.values()
    ]
