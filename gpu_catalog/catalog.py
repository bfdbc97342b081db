"""Stub until the real one lands."""
import datetime
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer


class UnknownGpuError(LookupError):
    pass


class CatalogError(ValueError):
    pass


class Catalog:
    def __init__(self, gpus, offers):
        self.gpus = gpus
        self._offers = offers

    def gpu(self, key):
        for g in self.gpus:
            if g.key == key:
                return g
        raise UnknownGpuError(f"unknown GPU {key!r}")

    def offers(self, key):
        return [o for o in self._offers if o.gpu == key]


def load_catalog(extra_gpus=(), extra_offers=()):
    d = datetime.date(2026, 11, 20)
    return Catalog(
        [Gpu(key="cpu", kind="cpu", usable_memory_bytes=64 * 2**20, source="x", recorded=d), Gpu(key="A40", kind="cuda", source="x", recorded=d), *extra_gpus],
        [Offer(gpu="cpu", provider="aws", region="us-east-1", instance="m8a.large", usd_per_hour=0.12172, recorded=d, source="x"), *extra_offers],
    )
