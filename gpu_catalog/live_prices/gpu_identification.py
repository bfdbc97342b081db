"""Identification of the GPU that a price is for. Ambiguous prices are reported, not guessed."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache

from gpu_catalog.catalog import Catalog, csv_rows, shipped_text
from gpu_catalog.gpu import Gpu
from gpu_catalog.live_prices.sources.aws_instances import AWS, aws_instances
from gpu_catalog.live_prices.sources.raw_offer import RawOffer

# Catalogs state sizes in GB or GiB, with or without what ECC and the driver take. For one GPU these
# differ by less than a tenth, and no two sizes of one GPU are that close.
MEMORY_TOLERANCE = 0.10
OTHERS = "…"


class IdentificationFailure(StrEnum):
    """Reason why a price was not matched to a GPU."""

    UNKNOWN = "not in the catalog"
    AMBIGUOUS = "may be more than one GPU of the catalog"
    SLICE = "a slice of a GPU"
    INCONSISTENT = "stated with a memory or a number that it does not have"


@dataclass(frozen=True, slots=True)
class UnidentifiedPrice:
    """A price that was not matched to a GPU: the failure, and the name or value at fault."""

    failure: IdentificationFailure
    detail: str


@dataclass(frozen=True, slots=True)
class InstanceForm:
    """A glob of a provider's instance names, and the GPU that all of them have."""

    provider: str
    instance: str
    gpu_name: str
    gpu: str


@cache
def forms() -> tuple[InstanceForm, ...]:
    """Instances that identify a GPU whose name alone is ambiguous."""
    rows = csv_rows(shipped_text("gpu_forms.csv", __package__))
    return tuple(
        InstanceForm(row["provider"], row["instance"], row["gpu_name"], row["gpu"]) for row in rows
    )


@cache
def left_out() -> dict[str, str]:
    """Names of GPUs with 16 GB and more that the catalog leaves out, and the reason for each."""
    reasons: dict[str, str] = tomllib.loads(shipped_text("gpu_names.toml", __package__))["left_out"]
    return reasons


@cache
def names() -> dict[str, tuple[str, ...]]:
    """Catalog keys that each name may stand for, by ``folded`` name."""
    keys_by_name = tomllib.loads(shipped_text("gpu_names.toml", __package__))["names"]
    return {folded(name): tuple(keys) for name, keys in keys_by_name.items()}


def folded(name: str | None) -> str:
    """Name of a GPU without spaces, hyphens and case, which catalogs set in different ways."""
    return re.sub("[ -]", "", name or "").casefold()


def identify(raw: RawOffer, catalog: Catalog) -> Gpu | UnidentifiedPrice:
    """GPU of a price, identified by instance, by CUDA device name, or by name and memory."""
    instance = aws_instances().get(raw.instance) if raw.provider == AWS else None
    if instance is not None and raw.gpus != instance.gpus:
        text = f"{raw.gpus} GPUs, where {raw.instance} has {instance.gpus}"
        return UnidentifiedPrice(IdentificationFailure.INCONSISTENT, text)
    candidates = [] if instance is None else [catalog.gpu(instance.gpu)]
    candidates = candidates or _by_device_name(raw, catalog) or _by_form(raw, catalog)
    if candidates:
        return _by_memory(raw, candidates)
    keys = names().get(folded(raw.gpu_name), ())
    if not keys:
        return UnidentifiedPrice(IdentificationFailure.UNKNOWN, raw.gpu_name or raw.instance)
    match = _by_memory(raw, [catalog.gpu(key) for key in keys if key != OTHERS])
    if isinstance(match, Gpu) and OTHERS in keys:
        return _ambiguous(raw)
    return match


def _by_device_name(raw: RawOffer, catalog: Catalog) -> list[Gpu]:
    stated = {raw.instance, raw.gpu_name}
    return [gpu for gpu in catalog.gpus if stated & set(gpu.device_names)][:1]


def _by_form(raw: RawOffer, catalog: Catalog) -> list[Gpu]:
    name = folded(raw.gpu_name)
    return [
        catalog.gpu(form.gpu)
        for form in forms()
        if (form.provider, folded(form.gpu_name)) == (raw.provider, name)
        and fnmatchcase(raw.instance, form.instance)
    ]


def _by_memory(raw: RawOffer, candidates: Sequence[Gpu]) -> Gpu | UnidentifiedPrice:
    stated = raw.gpu_memory_gib or 0.0  # catalogs write 0 for an unknown size
    matches = [gpu for gpu in candidates if stated <= 0 or _has_memory(gpu, stated)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        return _ambiguous(raw)
    sizes = sorted({gpu.marketed_memory_gb or 0.0 for gpu in candidates})
    unit = _likely_unit(stated, raw.gpus, sizes)
    if unit is None and stated < sizes[0]:
        text = f"{raw.gpu_name or raw.instance} of {raw.provider}"
        return UnidentifiedPrice(IdentificationFailure.SLICE, text)
    sizes_text = " or ".join(f"{size:g}" for size in sizes)
    text = f"memory {stated:g} GB, where {raw.gpu_name or candidates[0].key} has {sizes_text}"
    return UnidentifiedPrice(
        IdentificationFailure.INCONSISTENT, text + (f": {unit}" if unit else "")
    )


def _ambiguous(raw: RawOffer) -> UnidentifiedPrice:
    return UnidentifiedPrice(IdentificationFailure.AMBIGUOUS, f"{raw.gpu_name} of {raw.provider}")


def _has_memory(gpu: Gpu, stated: float) -> bool:
    size = gpu.marketed_memory_gb
    return size is None or abs(stated / size - 1) < MEMORY_TOLERANCE


def _likely_unit(stated: float, gpus: int, sizes: Sequence[float]) -> str | None:
    """Likely unit of a memory size that matches no size in GB, as text; None if no unit fits."""
    units = [(1024.0, "it is in MiB"), (2.0**30, "it is in bytes"), (1 / 1024, "it is in TiB")]
    if gpus > 1:
        units.append((float(gpus), f"it is that of all {gpus} GPUs"))
    for factor, text in units:
        if any(abs(stated / (size * factor) - 1) < MEMORY_TOLERANCE for size in sizes if size):
            return text
    return None
