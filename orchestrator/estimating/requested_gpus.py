"""GPUs that a job is estimated on: of the catalog, or described by their memory."""

import datetime as dt

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.question import EstimateError
from orchestrator.request import Checks, validation_lines

ALL = ("all",)


def requested_gpus(keys: tuple[str, ...], memory_gib: float | None, catalog: Catalog) -> list[Gpu]:
    """GPUs of the catalog by key, or all, with the memory that is given for one.

    Raises:
        EstimateError: the GPUs cannot be simulated, or options contradict one another.
        UnknownGpuError: the catalog lacks one, and its memory was not given.
    """
    if keys == ALL:
        gpus = [gpu for gpu in catalog.gpus if gpu.kind == "cuda"]
    else:
        if "all" in keys:
            raise EstimateError(f"--gpu {','.join(keys)}: all includes every GPU: give it alone")
        checks = Checks()
        gpus_or_none = [checks.of(_gpu, key, catalog, memory_gib) for key in dict.fromkeys(keys)]
        checks.raise_errors()
        gpus = [gpu for gpu in gpus_or_none if gpu is not None]
    if not gpus:
        raise EstimateError("--gpu names no GPU: give keys of 'catalog gpus', or all")
    if memory_gib is None:
        return gpus
    if len(gpus) > 1:
        raise EstimateError("--memory-gib is the memory of one GPU: name it with --gpu")
    (gpu,) = gpus
    # A catalog's GPU with other memory gets another key, so that no offer is its own.
    key = f"{gpu.key}-{memory_gib:g}GiB" if gpu in catalog.gpus else gpu.key
    usable = round(memory_gib * 2**30)
    return [gpu.model_copy(update={"key": key, "usable_memory_bytes": usable})]


def _gpu(key: str, catalog: Catalog, memory_gib: float | None) -> Gpu:
    try:
        gpu = catalog.gpu(key)
    except UnknownGpuError as error:
        if memory_gib is None:
            raise UnknownGpuError(
                f"{error}; or give --memory-gib for a GPU that is not in the catalog"
            ) from None
    else:
        if gpu.kind != "cuda":
            raise EstimateError(f"--gpu {key}: only CUDA GPUs are simulated; measure it")
        return gpu
    try:
        # A GPU that no catalog has gets memory, and no speed: its times stay absent.
        return Gpu(
            key=key,
            kind="cuda",
            device_names=(key,),
            source="asked for",
            recorded=dt.date.today(),  # noqa: DTZ011 - a note, not a time
        )
    except ValidationError as error:
        raise EstimateError(f"--gpu {key!r}: {validation_lines(error)}") from None
