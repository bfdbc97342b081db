"""The catalog: every known GPU and offer, looked up by exact key."""

import csv
import io
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from gpu_catalog.suggestions import did_you_mean

Row = TypeVar("Row", bound=BaseModel)


class UnknownGpuError(UserError):
    """No GPU of this key or name; the message has near ones."""


class CatalogError(UserError):
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
        self._of_gpu: dict[str, list[Offer]] = defaultdict(list)
        for offer in sorted(
            self._offers, key=lambda offer: (offer.usd_per_hour, offer.provider, offer.instance)
        ):
            self._of_gpu[offer.gpu].append(offer)

    @property
    def all_offers(self) -> tuple[Offer, ...]:
        """Every offer, as they were given."""
        return self._offers

    def merged(self, gpus: Sequence[Gpu] = (), offers: Sequence[Offer] = ()) -> "Catalog":
        """This catalog with a user's rows over it.

        A price of what is offered here already takes its place. Facts of a GPU cannot be replaced:
        what was measured on it would be of another one.

        Raises:
            CatalogError: the rows cannot stand together.
        """
        if not gpus and not offers:
            return self
        new = [gpu for gpu in gpus if gpu not in self.gpus]
        replaced = {offer.identity for offer in offers}
        kept = (offer for offer in self._offers if offer.identity not in replaced)
        return Catalog([*self.gpus, *new], [*kept, *offers])

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
                f"unknown device {name!r}{near} (add it under catalog.gpus of the specification, "
                "or under gpus of a file for --catalog)"
            )
        return self._by_name[name]

    def offers(self, gpu_key: str) -> list[Offer]:
        """The offers of a GPU, cheapest instance first."""
        return list(self._of_gpu.get(gpu_key, ()))

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
        keys = dict.fromkeys(gpu.key for gpu in self.gpus)
        for offer in self._offers:
            if offer.gpu not in keys:
                near = did_you_mean(offer.gpu, keys)
                yield f"offer {offer.provider} {offer.instance}: unknown GPU {offer.gpu!r}{near}"


def load_catalog(extra_gpus: Sequence[Gpu] = (), extra_offers: Sequence[Offer] = ()) -> Catalog:
    """The shipped catalog, with a user's own rows over it.

    Raises:
        CatalogError: the rows cannot stand together.
    """
    return _shipped().merged(extra_gpus, extra_offers)


@cache
def _shipped() -> Catalog:
    gpus = tomllib.loads(shipped_text("gpus.toml"))["gpu"]
    return Catalog(_parsed(Gpu, "gpus.toml", gpus), shipped_offers("offers.csv"))


def shipped_text(name: str, package: str = "gpu_catalog") -> str:
    """A file in the folder ``data`` of a package."""
    return (resources.files(package) / "data" / name).read_text(encoding="utf-8")


def shipped_offers(name: str) -> list[Offer]:
    """The prices in a data file of this package."""
    return _parsed(Offer, name, csv_rows(shipped_text(name)))


def csv_rows(text: str) -> list[dict[str, Any]]:
    """The rows of a CSV, keyed by its head. An empty field is an absent one."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [{key: value for key, value in row.items() if value != ""} for row in rows]


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
