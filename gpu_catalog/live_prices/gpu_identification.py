"""Which GPU of the catalog a price is of. What cannot be told apart is said so, never guessed."""

import csv
import io
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache

from gpu_catalog.catalog import Catalog, shipped_text
from gpu_catalog.gpu import Gpu
from gpu_catalog.live_prices.sources.aws_instances import AWS, aws_instances
from gpu_catalog.live_prices.sources.raw_offer import RawOffer

# A size is written in GB or GiB, with or without what ECC and the driver take: of one GPU these are
# less than a tenth apart, and no two sizes of one GPU are that close.
MEMORY_TOLERANCE = 0.10
OTHERS = "…"


class IdentificationFailure(StrEnum):
    """Why no GPU of the catalog was told."""

    UNKNOWN = "not in the catalog"
    SEVERAL = "may be more than one GPU of the catalog"
    SLICE = "a slice of a GPU"
    MISSTATED = "stated with a memory or a number that it does not have"


@dataclass(frozen=True, slots=True)
class Miss:
    """A price whose GPU was not told: why, and of what."""

    why: IdentificationFailure
    what: str


@dataclass(frozen=True, slots=True)
class InstanceForm:
    """Instances of a provider whose GPU has one form: a glob of their names, and what it is."""

    provider: str
    instance: str
    gpu_name: str
    gpu: str


@cache
def forms() -> tuple[InstanceForm, ...]:
    """The instances by which forms of one name are told apart."""
    rows = csv.DictReader(io.StringIO(shipped_text("gpu_forms.csv", __package__)))
    return tuple(
        InstanceForm(row["provider"], row["instance"], row["gpu_name"], row["gpu"]) for row in rows
    )


@cache
def names() -> dict[str, tuple[str, ...]]:
    """The keys each name may stand for, by the name in small letters."""
    known = tomllib.loads(shipped_text("gpu_names.toml", __package__))["names"]
    return {name.casefold(): tuple(keys) for name, keys in known.items()}


def identify(raw: RawOffer, catalog: Catalog) -> Gpu | Miss:
    """The GPU a price is of: by its instance, the name it reports to CUDA, or name and memory."""
    instance = aws_instances().get(raw.instance) if raw.provider == AWS else None
    if instance is not None and raw.gpus != instance.gpus:
        have = f"{raw.gpus} GPUs, where {raw.instance} has {instance.gpus}"
        return Miss(IdentificationFailure.MISSTATED, have)
    known = [] if instance is None else [catalog.gpu(instance.gpu)]
    known = known or _by_device_name(raw, catalog) or _by_form(raw, catalog)
    if known:
        return _of_its_memory(raw, known)
    keys = names().get((raw.gpu_name or "").casefold(), ())
    if not keys:
        return Miss(IdentificationFailure.UNKNOWN, raw.gpu_name or raw.instance)
    found = _of_its_memory(raw, [catalog.gpu(key) for key in keys if key != OTHERS])
    if isinstance(found, Gpu) and OTHERS in keys:
        return Miss(IdentificationFailure.SEVERAL, f"{raw.gpu_name} of {raw.provider}")
    return found


def _by_device_name(raw: RawOffer, catalog: Catalog) -> list[Gpu]:
    stated = {raw.instance, raw.gpu_name}
    return [gpu for gpu in catalog.gpus if stated & set(gpu.device_names)][:1]


def _by_form(raw: RawOffer, catalog: Catalog) -> list[Gpu]:
    name = (raw.gpu_name or "").casefold()
    return [
        catalog.gpu(form.gpu)
        for form in forms()
        if (form.provider, form.gpu_name.casefold()) == (raw.provider, name)
        and fnmatchcase(raw.instance, form.instance)
    ]


def _of_its_memory(raw: RawOffer, candidates: Sequence[Gpu]) -> Gpu | Miss:
    stated = raw.gpu_memory_gib or 0.0  # 0 is how catalogs write that they do not know
    fitting = [gpu for gpu in candidates if stated <= 0 or _fits(stated, gpu)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        return Miss(IdentificationFailure.SEVERAL, f"{raw.gpu_name} of {raw.provider}")
    sizes = sorted({gpu.marketed_memory_gb or 0.0 for gpu in candidates})
    unit = _likely_unit(stated, raw.gpus, sizes)
    if unit is None and stated < sizes[0]:
        return Miss(
            IdentificationFailure.SLICE, f"{raw.gpu_name or raw.instance} of {raw.provider}"
        )
    have = " or ".join(f"{size:g}" for size in sizes)
    text = f"memory {stated:g} GB, where {raw.gpu_name or candidates[0].key} has {have}"
    return Miss(IdentificationFailure.MISSTATED, text + (f": {unit}" if unit else ""))


def _fits(stated: float, gpu: Gpu) -> bool:
    size = gpu.marketed_memory_gb
    return size is None or abs(stated / size - 1) < MEMORY_TOLERANCE


def _likely_unit(stated: float, gpus: int, sizes: Sequence[float]) -> str | None:
    """What a size was most likely written in, where it is none of these in GB."""
    units = [(1024.0, "it is in MiB"), (2.0**30, "it is in bytes"), (1 / 1024, "it is in TiB")]
    if gpus > 1:
        units.append((float(gpus), f"it is that of all {gpus} GPUs"))
    for factor, text in units:
        if any(abs(stated / (size * factor) - 1) < MEMORY_TOLERANCE for size in sizes if size):
            return text
    return None
