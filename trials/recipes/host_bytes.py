"""Memory that a training takes on the hosts of its nodes, at least."""

from trials.recipes.parallel import Parallel

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


def built_host_bytes(layout: Parallel, weight_bytes: int) -> int:
    """Bytes on the host of a node while its ranks are built: each builds all weights there.

    It is 0 where ranks are built on their GPUs, which hold all weights.

    Args:
        layout: GPUs that train together.
        weight_bytes: bytes of all weights of the model.
    """
    return weight_bytes * (layout.gpus // layout.nodes) if layout.shards > 1 else 0
