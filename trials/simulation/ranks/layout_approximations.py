"""Differences between several GPUs as they are simulated and as they would run. No torch."""

from trials.recipes.parallel import WEIGHTS_DIVIDED, Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell

COPIES = "{name}: copies to and from the host take 0.8 of PCIe's rate, which is assumed"


def layout_approximations(cell: Cell) -> list[str]:
    """Differences between the simulated ranks of a cell and those its GPUs would be."""
    layout = cell.parallel
    if layout is None or not layout.is_sharded:
        return []
    name, notes = layout.strategy, list[str]()
    if layout.zero_stage is not None:
        return _engine_approximations(layout, cell.recipe)
    if cell.recipe.quantisation in {"nf4", "fp4"}:
        notes.append(
            "4-bit weights are stored in the compute dtype (bnb_4bit_quant_storage), without which "
            f"{name} does not shard them"
        )
    if layout.degree is not None:
        notes.append(
            "embedding, norms and head are whole on each GPU of a group of tp, and each sum over "
            "the group is waited for"
        )
    if layout.shards_on_host:
        notes += _offload_approximations(name)
    if not layout.is_gathered:
        return notes
    return [
        *notes,
        (
            f"{name} reduces gradients after every micro-batch (accelerate's sync_each_batch); "
            "without it, accumulated gradients stay whole on every GPU"
        ),
    ]


def _offload_approximations(name: str) -> list[str]:
    """Differences between shards on a host as they are simulated and as they would be."""
    update = (
        f"{name}: the host's update of the weights takes 40 GB/s of a node's memory, as published "
        "for DeepSpeed's on one machine; it holds frozen weights, and about 16 bytes of each "
        "trained one in fp32 (8 in bf16), pinned ones at the next power of two"
    )
    return [update, COPIES.format(name=name)]


def _engine_approximations(layout: Parallel, recipe: Recipe) -> list[str]:
    """Differences between DeepSpeed's engine as it is simulated and as it would run."""
    name, divides_weights = layout.strategy, layout.zero_stage == WEIGHTS_DIVIDED
    has_reentrant = divides_weights and recipe.method != "full" and recipe.gradient_checkpointing
    notes = {
        f"{name} has DeepSpeed's own settings: give your trainer's file by --deepspeed": (
            layout.has_default_zero and not divides_weights
        ),
        f'{name} has the sizes that transformers puts in place of "auto": give your trainer\'s '
        "file by --deepspeed": layout.has_default_zero and divides_weights,
        f"{name}: the host's update of the weights takes 40 GB/s of a node's memory, as published "
        "for one machine": layout.updates_on_host,
        COPIES.format(name=name): layout.offload is not None,
        f"{name}: time that DeepSpeed's own Python code takes on the host is left out": True,
        f"{name}: the loss is that of all logits; in TRL's chunks it takes less": divides_weights,
        f"{name}: TRL makes the checkpoints of adapters reentrant, which is not simulated": (
            has_reentrant
        ),
    }
    return [note for note, applies in notes.items() if applies]
