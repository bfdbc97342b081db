"""Start-up and checkpoints of a job by the bytes that they move. Pure.

Providers publish no times of either, so the rates are assumptions, between figures that are public.
"""

from collections.abc import Iterable, Mapping

from orchestrator.spec.job import SECONDS_PER_MINUTE, Job
from trials.recipes.fields import DTYPE_BYTES, Optimizer
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.built import ParameterCounts
from trials.records.observation import Observation

BOOT_MINUTES = 8.0
"""From renting a node to the start of the download: the instance, the image, its packages."""
DOWNLOAD_BYTES_PER_SECOND = 400e6
"""Rate of a download from the Hugging Face hub. It is near the geometric mean of the 125 MiB/s that
AWS's gp3 volume takes as it comes (API of CreateVolume) and of 1.3 GB/s, 60 GB in 45 s by
hf_transfer on an instance with 100 Gbit/s (huggingface_hub, pull request 2989)."""
DISK_BYTES_PER_SECOND = 500e6
"""Rate of a node's disk, read or written: the geometric mean of the 125 and 2,000 MiB/s between
which AWS sells the throughput of a gp3 volume (API of CreateVolume). torchtune's issue 1735 has a
checkpoint of 70B weights alone in 1,000 s, 0.14 GB/s; local NVMe disks take a few GB/s."""
CHECKPOINT_SECONDS = 5.0
"""Part of a checkpoint that does not grow: GPUs wait for one another, files open and close."""

PUBLISHED_BYTES = 2
"""Bytes of a published weight: nearly all are in 16 bits, and a trainer quantises them itself."""
STATE_BYTES: Mapping[Optimizer, float] = {
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "paged_adamw_32bit": 8,
    "torchao_adamw_8bit": 2,
    "torchao_adamw_4bit": 1,
    "adafactor": 0,
    "sgd": 0,
}
"""Bytes of optimizer state for each trained weight. Those of others are moments in the dtype of the
weight: one of Muon, two of AdamW."""
DEEPSPEED_STATE_BYTES = 12
"""The same for DeepSpeed: AdamW's moments and the copy that they update, in fp32."""


def checkpoint_bytes(
    recipe: Recipe, parameters: ParameterCounts, layout: Parallel | None = None
) -> float:
    """Bytes of a checkpoint: the adapters or the whole model as stored, and the optimizer's state.

    transformers' Trainer, and with it TRL, axolotl and LLaMA-Factory, saves both by default
    (``save_only_model: false``). DeepSpeed's has a copy of trained weights in fp32, too.
    """
    trained = DTYPE_BYTES[recipe.adapter_dtype or recipe.trained_dtype]
    own_dtype = (1 if recipe.optimizer == "muon" else 2) * trained
    state = STATE_BYTES.get(recipe.optimizer, own_dtype)
    if recipe.offload_optimizer or (layout is not None and layout.zero_stage is not None):
        state = DEEPSPEED_STATE_BYTES
    if recipe.has_adapters:
        weights = parameters.trainable * trained
    else:
        frozen = parameters.total - parameters.trainable
        weights = parameters.trainable * trained + frozen * DTYPE_BYTES[recipe.base_dtype]
    return weights + state * parameters.trainable


def download_bytes(recipe: Recipe, parameters: ParameterCounts) -> int:
    """Bytes of the published weights, without the adapters and copies that training adds."""
    added = parameters.trainable if recipe.has_adapters else 0
    return PUBLISHED_BYTES * (parameters.total - added)


def with_transfer_times(
    job: Job,
    recipe: Recipe,
    parameters: ParameterCounts | None,
    layout: Parallel | None,
    *,
    is_own: bool = False,
) -> Job:
    """The job with the start-up and the checkpoints that were not given, by its model's size.

    Each node downloads and reads the weights. Where the layout divides the state, each node of a
    copy of the model writes its share of a checkpoint. Both are rounded as their rates are.

    Args:
        job: the job.
        recipe: recipe of its cell.
        parameters: parameter counts under the recipe; None where unknown, for no change.
        layout: layout of several GPUs; None for one.
        is_own: whether the machine is the user's, and runs already.
    """
    if parameters is None:
        return job
    download = download_bytes(recipe, parameters)
    load = download / DOWNLOAD_BYTES_PER_SECOND + download / DISK_BYTES_PER_SECOND
    disks = 1
    if layout is not None and layout.is_sharded:
        disks = max(layout.nodes // (layout.replicas or 1), 1)
    write = checkpoint_bytes(recipe, parameters, layout) / disks / DISK_BYTES_PER_SECOND
    given = job.overheads.model_dump(exclude_none=True)
    times = {
        "startup_minutes": round((0 if is_own else BOOT_MINUTES) + load / SECONDS_PER_MINUTE, 1),
        "checkpoint_seconds": float(round(CHECKPOINT_SECONDS + write)),
    }
    overheads = job.overheads.model_copy(update=times | given)
    interval = {"checkpoint_minutes": overheads.on_demand_checkpoint_minutes}
    overheads = overheads.model_copy(update=interval)
    return job.model_copy(update={"overheads": overheads})


def recorded_parameters(observations: Iterable[Observation]) -> ParameterCounts | None:
    """Parameter counts of a cell by its probes; None where none has them, as in a table."""
    for observation in observations:
        if (measurement := observation.measurement) is None:
            continue
        if measurement.built is not None:
            return measurement.built.parameters
        if measurement.parameters is not None:
            return measurement.parameters
    return None
