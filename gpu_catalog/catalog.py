"""The catalog: all GPUs and offers, looked up by exact key."""

import csv
import io
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """No GPU has this key or device name; the message suggests near ones."""


class CatalogError(UserError):
    """Invalid or contradictory rows; one line for each mistake."""


class Catalog:
    """Consistent GPUs and offers. Look-ups are exact; errors suggest near keys.

    Raises:
        CatalogError: keys or device names are not unique, or an offer names an unknown GPU.
    """

    def __init__(self, gpus: Iterable[Gpu], offers: Iterable[Offer]) -> None:
        self.gpus = tuple(gpus)
        self.all_offers = tuple(offers)
        mistakes = [*self._duplicates(), *self._unknown_gpus()]
        if mistakes:
            raise CatalogError("\n".join(mistakes))
        self._by_key = {gpu.key: gpu for gpu in self.gpus}
        self._by_name = {name: gpu for gpu in self.gpus for name in gpu.device_names}
        self._of_gpu: dict[str, list[Offer]] = defaultdict(list)
        for offer in sorted(
            self.all_offers, key=lambda offer: (offer.usd_per_hour, offer.provider, offer.instance)
        ):
            self._of_gpu[offer.gpu].append(offer)

    def merged(self, gpus: Sequence[Gpu] = (), offers: Sequence[Offer] = ()) -> "Catalog":
        """Add a user's rows to this catalog.

        A new price replaces the offer with the same identity. Facts of a GPU cannot be replaced:
        earlier measurements on it would then describe another GPU.

        Raises:
            CatalogError: the rows contradict each other or this catalog.
        """
        if not gpus and not offers:
            return self
        new = [gpu for gpu in gpus if gpu not in self.gpus]
        replaced = {offer.identity for offer in offers}
        kept = (offer for offer in self.all_offers if offer.identity not in replaced)
        return Catalog([*self.gpus, *new], [*kept, *offers])

    def gpu(self, key: str) -> Gpu:
        """GPU with exactly this key.

        Raises:
            UnknownGpuError: no GPU has this key.
        """
        if key not in self._by_key:
            near = did_you_mean(key, self._by_key)
            raise UnknownGpuError(
                f"unknown GPU {key!r}{near} ('finetune-cost catalog gpus' lists all)"
            )
        return self._by_key[key]

    def gpu_by_device_name(self, name: str) -> Gpu:
        """GPU that reports exactly this name to CUDA.

        Raises:
            UnknownGpuError: no GPU reports this name.
        """
        if name not in self._by_name:
            near = did_you_mean(name, self._by_name)
            raise UnknownGpuError(
                f"unknown device {name!r}{near} (add it under catalog.gpus of the specification, "
                "or under gpus of a file for --catalog)"
            )
        return self._by_name[name]

    def offers(self, gpu_key: str) -> list[Offer]:
        """Offers of a GPU, cheapest instance first."""
        return list(self._of_gpu.get(gpu_key, ()))

    def _duplicates(self) -> Iterator[str]:
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

    def _unknown_gpus(self) -> Iterator[str]:
        keys = dict.fromkeys(gpu.key for gpu in self.gpus)
        for offer in self.all_offers:
            if offer.gpu not in keys:
                near = did_you_mean(offer.gpu, keys)
                yield f"offer {offer.provider} {offer.instance}: unknown GPU {offer.gpu!r}{near}"


def load_catalog(extra_gpus: Sequence[Gpu] = (), extra_offers: Sequence[Offer] = ()) -> Catalog:
    """Shipped catalog with a user's own rows added.

    Raises:
        CatalogError: the rows contradict each other or the catalog.
    """
    return _shipped().merged(extra_gpus, extra_offers)


@cache
def _shipped() -> Catalog:
    gpus = tomllib.loads(shipped_text("gpus.toml"))["gpu"]
    return Catalog(_parsed(Gpu, "gpus.toml", gpus), shipped_offers("offers.csv"))


def shipped_text(name: str, package: str = "gpu_catalog") -> str:
    """Text of a file in the folder ``data`` of a package."""
    return (resources.files(package) / "data" / name).read_text(encoding="utf-8")


def shipped_offers(name: str) -> list[Offer]:
    """Offers in a data file of this package."""
    return shipped_rows(Offer, name)


def shipped_rows(model: type[Row], name: str) -> list[Row]:
    """Rows of a CSV file of this package."""
    return _parsed(model, name, csv_rows(shipped_text(name)))


def csv_rows(text: str) -> list[dict[str, Any]]:
    """Rows of a CSV by column name; empty fields are absent."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [{key: value for key, value in row.items() if value != ""} for row in rows]


def parse_rows(
    model: type[Row], rows: Iterable[dict[str, Any]], place: Callable[[int], str]
) -> tuple[list[Row], list[str]]:
    """Records of the valid rows, and one message for each mistake in the others.

    ``place`` names a row in messages by its number from 1.
    """
    records, mistakes = [], []
    for number, row in enumerate(rows, start=1):
        try:
            records.append(model.model_validate(row))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                column = ".".join(map(str, detail["loc"]))
                value = "" if detail["type"] == "missing" else f", not {detail['input']!r}"
                mistakes.append(f"{place(number)}: {column}: {detail['msg']}{value}")
    return records, mistakes


def _parsed(model: type[Row], file: str, rows: Sequence[dict[str, Any]]) -> list[Row]:
    records, mistakes = parse_rows(model, rows, lambda number: f"{file}, row {number}")
    if mistakes:
        raise CatalogError("\n".join(mistakes))
    return records
