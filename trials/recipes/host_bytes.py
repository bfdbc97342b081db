"""Memory that a training takes on the hosts of its nodes, at least."""

from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe

STATE_BYTES = 18
"""Bytes on the host for each weight that it updates: 4 of the weight in fp32, 8 of AdamW's moments,
4 of the gradient, and 2 of the weight or the gradient in 16 bits (DeepSpeed's stage_1_and_2.py and
stage3.py)."""
SHARD_BYTES = 8
"""Bytes of each trained weight in shards on the host, at least: of the weight, its gradient and
both moments, in bf16."""
WEIGHT_BYTES = 2
"""Bytes of a weight in 16 bits that the host keeps for the GPUs."""


def least_host_bytes(layout: Parallel, weights: int, trained: int) -> int:
    """Bytes that the processes of a node keep on its host by a layout's ``offload``; 0 for none.

    They are less than what is traced: pinned memory takes powers of two, and some copies last for
    a moment.

    Args:
        layout: GPUs that train together, each with a share of what is offloaded.
        weights: weights of the model.
        trained: those of them that are trained.
    """
    if layout.shards_on_host:  # others have half a byte or more
        held = SHARD_BYTES * trained + (weights - trained) // 2
        return held * (layout.replicas or 1) // layout.nodes
    state = STATE_BYTES * trained if layout.updates_on_host else 0
    kept = WEIGHT_BYTES * weights if layout.offload in {"parameters", "all"} else 0
    return (state + kept) // layout.nodes


def is_built_in_slices(layout: Parallel, recipe: Recipe) -> bool:
    """Whether ranks that divide a model's weights never hold all of them, not even as it is built.

    DeepSpeed divides whole weights in its first step, and what copies or casts weights of layers
    before they are divided needs them whole.

    Args:
        layout: GPUs that train together.
        recipe: recipe of the training.
    """
    reads_weights = recipe.modules_to_save is not None or recipe.trained_layers is not None
    return layout.shards > 1 and layout.zero_stage is None and not reads_weights


def built_host_bytes(
    layout: Parallel, recipe: Recipe, weight_bytes: int, *, is_loaded: bool
) -> int:
    """Bytes on the host of a node while its ranks are built.

    Each holds all weights there where it loads them, or where they are not built in slices. They
    are 0 where ranks draw weights on their GPUs.

    Args:
        layout: GPUs that train together.
        recipe: recipe of the training.
        weight_bytes: bytes of all weights of the model.
        is_loaded: whether they are pretrained ones, not drawn.
    """
    if layout.shards == 1:
        return 0
    if is_loaded or not is_built_in_slices(layout, recipe):
        return weight_bytes * layout.gpus_per_node
    return weight_bytes // layout.nodes if layout.shards_on_host else 0
