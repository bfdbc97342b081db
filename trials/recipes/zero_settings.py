"""Settings of DeepSpeed's ZeRO that change memory or time of a step."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gpu_catalog.record import Record
from trials.recipes.fields import Switch


def _whole(value: Any) -> Any:
    """Whole numbers that JSON writes as ``5e8``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Elements = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Sized = Elements | Literal["auto"] | None


Offload = Literal["optimizer", "parameters", "all"]
"""What the host holds: the optimizer's state, with its update; the weights; or both."""
OffloadOption = Offload | Literal["none"]
"""The same where a file may state it: ``none`` for nothing, whatever the file has."""
BY_LAYOUT = "use strategy deepspeed-zero2 with offload optimizer, on one GPU too"
"""What is simulated in place of ``offload_optimizer``."""
ON_HOST = {"device": "cpu", "pin_memory": True}
OFFLOADS: dict[Offload, tuple[str, ...]] = {
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_param",),
    "all": ("offload_optimizer", "offload_param"),
}
"""Keys of DeepSpeed by what the host holds."""


def offload_of(keys: Iterable[str]) -> Offload | None:
    """Part of a training that the host holds by keys of DeepSpeed that are on; None for nothing."""
    on = set(keys)
    return next((offload for offload, own in OFFLOADS.items() if set(own) == on), None)


class ZeroSettings(Record):
    """Keys of ``zero_optimization`` in a configuration of DeepSpeed, by their names there.

    Absent ones have DeepSpeed's own default. Sizes are in elements; transformers puts sizes by the
    model's width in place of ``auto``.

    Attributes:
        overlap_comm: whether gradients are reduced beside the backward pass, from a second bucket.
        contiguous_gradients: whether gradients are copied to a bucket of their own.
        reduce_scatter: whether each gradient is reduced to the rank that updates its weight.
        allgather_partitions: whether updated weights are gathered at once, not broadcast.
        round_robin_gradients: whether stages 1 and 2 order weights so that the ranks take turns.
        reduce_bucket_size: elements of gradients that are reduced together.
        allgather_bucket_size: elements of updated weights that are gathered together.
        sub_group_size: elements that stage 3 updates together.
        stage3_prefetch_bucket_size: elements that are gathered ahead.
        stage3_param_persistence_threshold: elements of a weight that is kept gathered.
        stage3_max_live_parameters: elements that may be gathered at once.
        stage3_max_reuse_distance: elements between two uses, up to which a weight stays gathered.
        offload: what the host holds, in pinned memory (``offload_optimizer``, ``offload_param``).
    """

    overlap_comm: Switch | None = None
    contiguous_gradients: Switch | None = None
    reduce_scatter: Switch | None = None
    allgather_partitions: Switch | None = None
    round_robin_gradients: Switch | None = None
    reduce_bucket_size: Sized = None
    allgather_bucket_size: Elements | None = None
    sub_group_size: Elements | None = None
    stage3_prefetch_bucket_size: Sized = None
    stage3_param_persistence_threshold: Sized = None
    stage3_max_live_parameters: Elements | None = None
    stage3_max_reuse_distance: Elements | None = None
    offload: Annotated[Offload | None, Field(exclude_if=lambda n: n is None)] = None

    @property
    def updates_on_host(self) -> bool:
        """Whether the host updates the weights, and holds the optimizer's state."""
        return self.offload in {"optimizer", "all"}

    def given(self) -> dict[str, Any]:
        """Keys of DeepSpeed that are not absent."""
        places = () if self.offload is None else OFFLOADS[self.offload]
        own = self.model_dump(exclude_none=True, exclude={"offload"})
        return {**own, **dict.fromkeys(places, ON_HOST)}


BY_WIDTH = ZeroSettings(
    reduce_bucket_size="auto",
    stage3_prefetch_bucket_size="auto",
    stage3_param_persistence_threshold="auto",
)
"""Settings of stage 3 in the files that trainers ship."""
