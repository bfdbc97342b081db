"""Settings of DeepSpeed's ZeRO that change memory or time of a step."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gpu_catalog.record import Record


def _whole(value: Any) -> Any:
    """Whole numbers that JSON writes as ``5e8``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Elements = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Switch = Annotated[bool, Field(strict=True)]
Sized = Elements | Literal["auto"] | None


class ZeroSettings(Record):
    """Keys of ``zero_optimization`` in a configuration of DeepSpeed, by their names there.

    Absent ones have DeepSpeed's own default. Sizes are in elements; transformers puts sizes by the
    model's width in place of ``auto``.
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

    def given(self) -> dict[str, Any]:
        """Keys that are not absent."""
        return self.model_dump(exclude_none=True)


BY_WIDTH = ZeroSettings(
    reduce_bucket_size="auto",
    stage3_prefetch_bucket_size="auto",
    stage3_param_persistence_threshold="auto",
)
"""Settings of stage 3 in the files that trainers ship."""
