"""The catalog: every known GPU and offer, looked up by exact key."""

import csv
import io
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gpu_catalog.gpu import Gpu
from gpu_catalog.near import did_you_mean
from gpu_catalog.offer import Offer

Row = TypeVar("Row", bound=BaseModel)


class UnknownGpuError(LookupError):
    """No GPU of this key or name; the message has near ones."""


class CatalogError(ValueError):
    """Rows that cannot stand together; one line for each mistake."""


class Catalog:
    """GPUs and offers that fit together. Exact look-ups only: near is what an error suggests.

    Raises:
        CatalogError: keys or device names are not unique, or an offer is for no known GPU.
    """

    def __init__(self, gpus: Iterable[Gpu], offers: Iterable[Offer]) -> None:
        self.gpus = tuple(gpus)
        self._offers = tuple(offers)
        mistakes = [*self._twice(), *self._homeless()]
        if mistakes:
            raise CatalogError("\n".join(mistakes))
        self._by_key = {gpu.key: gpu for gpu in self.gpus}
        self._by_name = {name: gpu for gpu in self.gpus for name in gpu.device_names}

    def gpu(self, key: str) -> Gpu:
        """The GPU of exactly this key.

        Raises:
            UnknownGpuError: there is none.
        """
        if key not in self._by_key:
            near = did_you_mean(key, self._by_key)
            raise UnknownGpuError(
                f"unknown GPU {key!r}{near} ('python -m orchestrator catalog gpus' lists all)"
            )
        return self._by_key[key]

    def gpu_by_device_name(self, name: str) -> Gpu:
        """The GPU that reports exactly this name to CUDA.

        Raises:
            UnknownGpuError: there is none.
        """
        if name not in self._by_name:
            near = did_you_mean(name, self._by_name)
            raise UnknownGpuError(
                f"unknown device {name!r}{near} (add it under catalog.gpus of the specification)"
            )
        return self._by_name[name]

    def offers(self, gpu_key: str) -> list[Offer]:
        """The offers of a GPU, cheapest instance first."""
        mine = (offer for offer in self._offers if offer.gpu == gpu_key)
        return sorted(mine, key=lambda offer: (offer.usd_per_hour, offer.provider, offer.instance))

    def _twice(self) -> Iterator[str]:
        keys: set[str] = set()
        owners: dict[str, str] = {}
        for gpu in self.gpus:
            if gpu.key in keys:
                yield f"GPU {gpu.key!r} is in the catalog already: choose another key"
            keys.add(gpu.key)
            for name in gpu.device_names:
                owner = owners.setdefault(name, gpu.key)
                if owner != gpu.key:
                    yield f"GPU {gpu.key!r}: device name {name!r} is that of {owner!r} already"

    def _homeless(self) -> Iterator[str]:
        keys = [gpu.key for gpu in self.gpus]
        for offer in self._offers:
            if offer.gpu not in keys:
                near = did_you_mean(offer.gpu, keys)
                yield f"offer {offer.provider} {offer.instance}: unknown GPU {offer.gpu!r}{near}"


def load_catalog(extra_gpus: Sequence[Gpu] = (), extra_offers: Sequence[Offer] = ()) -> Catalog:
    """The shipped catalog, with a user's own rows added.

    Raises:
        CatalogError: the rows cannot stand together.
    """
    data = resources.files("gpu_catalog") / "data"
    gpus = tomllib.loads((data / "gpus.toml").read_text(encoding="utf-8"))["gpu"]
    offers = csv.DictReader(io.StringIO((data / "offers.csv").read_text(encoding="utf-8")))
    # An empty field of a CSV is an absent one.
    rows = [{k: v for k, v in row.items() if v != ""} for row in offers]
    return Catalog(
        [*_parsed(Gpu, "gpus.toml", gpus), *extra_gpus],
        [*_parsed(Offer, "offers.csv", rows), *extra_offers],
    )


def _parsed(model: type[Row], file: str, rows: Sequence[dict[str, Any]]) -> list[Row]:
    found, mistakes = [], []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(model.model_validate(row))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                where = ".".join(map(str, detail["loc"]))
                text = f"{where}: {detail['msg']}, not {detail['input']!r}"
                mistakes.append(f"{file}, row {number}: {text}")
    if mistakes:
        raise CatalogError("\n".join(mistakes))
    return found
