"""GPUs that an estimate is asked for, by their keys or by other names that people use."""

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.question import EstimateError
from orchestrator.pricing.own_cards import PREFIX, is_own, with_own_cards, without_prefix
from orchestrator.request import Checks, validation_lines

ALL = ("all",)
MAKERS = re.compile(r"^((nvidia|geforce|tesla|quadro)[\s:_-]*)+", re.IGNORECASE)
COUNTED = re.compile(r"(\d+)\s*x\s*(.+)|(.+?)(?:\s+x\s*|:)(\d{1,2})", re.IGNORECASE)
SIZED = re.compile(r"(.+?)[\s:_-]*(\d+)\s*gi?b", re.IGNORECASE)
OPTIONAL = "rtx"  # part of a key that people leave out
OTHER_CHIPS = ("ti", "super", "ada")
"""Parts of a key without which the name is that of another GPU: the RTX 4070 is no RTX 4070 Ti."""
MEMORY_TOLERANCE = 0.1  # catalogs state 268 to 288 GB for the same GPU

ByOwner = Mapping[bool, Sequence[Gpu]]
"""GPUs that the user owns under True, and GPUs to rent under False; either may be absent."""


def with_electricity(
    names: Sequence[str],
    memory_gib: float | None,
    usd_per_kwh: float | None,
    catalog: Catalog,
    today: dt.date,
) -> Catalog:
    """Catalog with the electricity of the cards that the user owns.

    Args:
        names: names of GPUs, as for ``requested_gpus``.
        memory_gib: as there.
        usd_per_kwh: price of electricity; None where it was not given.
        catalog: the catalog.
        today: day of the price.

    Raises:
        EstimateError, UnknownGpuError: as there.
    """
    return with_own_cards(catalog, own_cards(names, memory_gib, catalog), usd_per_kwh, today)


def requested_gpus(names: Sequence[str], memory_gib: float | None, catalog: Catalog) -> list[Gpu]:
    """The GPUs of these names.

    Args:
        names: keys of the catalog, or other names, each of which may stand for several GPUs; or
            such a name of a single card after ``own:``.
        memory_gib: memory of the GPU, which need not be in the catalog then.
        catalog: the catalog.

    Raises:
        EstimateError: the GPUs cannot be simulated, or options contradict one another.
        UnknownGpuError: the catalog lacks one, and its memory was not given.
    """
    rented = rented_names(names)
    if ALL[0] in rented and rented != ALL:
        raise EstimateError(f"--gpu {','.join(names)}: all includes every GPU: give it alone")
    checks = Checks()
    groups = [checks.of(_gpus, name, memory_gib, catalog) for name in names]
    checks.raise_errors()
    gpus = list({gpu.key: gpu for group in groups for gpu in group or ()}.values())
    if not gpus:
        raise EstimateError("--gpu names no GPU: give keys of 'catalog gpus', or all")
    if memory_gib is None:
        return gpus
    if len(gpus) > 1:
        raise EstimateError(
            "--memory-gib is the memory of one GPU: name it with --gpu, "
            f"not {', '.join(gpu.key for gpu in gpus)}"
        )
    (gpu,) = gpus
    # A catalog's GPU with other memory gets another key, so that no offer is its own.
    key = f"{gpu.key}-{memory_gib:g}GiB" if gpu in catalog.gpus else gpu.key
    usable = round(memory_gib * 2**30)
    return [gpu.model_copy(update={"key": key, "usable_memory_bytes": usable})]


def left_out_of_all(names: Sequence[str], catalog: Catalog) -> list[str]:
    """A line on the AMD GPUs of the catalog, where all GPUs are asked for; else none."""
    amd = [gpu.key for gpu in catalog.gpus if gpu.kind == "rocm"]
    if not amd or rented_names(names) != ALL:
        return []
    return [f"Left out: {', '.join(amd)} (times of AMD GPUs are not modelled)."]


def rented_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names that are not of a card that the user owns."""
    return tuple(name for name in names if not is_own(name))


def own_cards(names: Sequence[str], memory_gib: float | None, catalog: Catalog) -> list[Gpu]:
    """Cards among the names that the user owns; none where no name begins with ``own:``.

    Raises:
        EstimateError: a name stands for several cards.
        UnknownGpuError: the catalog lacks one.
    """
    own = [name for name in names if is_own(name)]
    return requested_gpus(own, memory_gib, catalog) if own else []


def by_owner(names: Sequence[str], memory_gib: float | None, catalog: Catalog) -> ByOwner:
    """The GPUs of these names, those that the user owns and those to rent; one may be both.

    Raises:
        EstimateError, UnknownGpuError: as for ``requested_gpus``.
    """
    requested_gpus(names, memory_gib, catalog)  # refuses what only all names contradict
    rented = rented_names(names)
    groups = {
        True: own_cards(names, memory_gib, catalog),
        False: requested_gpus(rented, memory_gib, catalog) if rented else [],
    }
    return {is_own: gpus for is_own, gpus in groups.items() if gpus}


def gpus_named(name: str, catalog: Catalog) -> list[Gpu]:
    """CUDA GPUs that a name stands for: a key, the beginning of keys, or CUDA's name of a device.

    Case, spaces, dashes and NVIDIA's brands are ignored: ``a100`` stands for all A100s, ``4090``
    for the RTX 4090, as in the catalogs of SkyPilot, dstack and gpuhunt. Memory may follow the
    name, as in dstack's ``H100:80GB``.

    Raises:
        UnknownGpuError: no GPU has such a name.
    """
    sized = SIZED.fullmatch(name)
    return _named(name, catalog) or (_sized(sized, catalog) if sized else []) or [catalog.gpu(name)]


def _named(name: str, catalog: Catalog) -> list[Gpu]:
    folded = _folded(MAKERS.sub("", name))
    gpus = [gpu for gpu in catalog.gpus if gpu.kind == "cuda" and folded in _names(gpu)]
    return [gpu for gpu in gpus if folded == _folded(gpu.key)] or gpus


def _sized(match: re.Match[str], catalog: Catalog) -> list[Gpu]:
    name, gigabytes = match.groups()
    return [
        gpu
        for gpu in _named(name, catalog)
        if gpu.marketed_memory_gb is not None
        and abs(float(gigabytes) / gpu.marketed_memory_gb - 1) < MEMORY_TOLERANCE
    ]


def _gpus(name: str, memory_gib: float | None, catalog: Catalog) -> list[Gpu]:
    if name == ALL[0]:
        return [gpu for gpu in catalog.gpus if gpu.kind == "cuda"]
    number, alone = counted(without_prefix(name))
    try:
        gpus = gpus_named(alone, catalog)
    except UnknownGpuError as error:
        if memory_gib is not None:
            return [_without_speed(without_prefix(name))]
        raise UnknownGpuError(
            f"{error}. For a GPU that is not in the catalog, give --memory-gib"
        ) from None
    if number is not None and number > 1:
        raise EstimateError(
            f"--gpu {name}: only estimate simulates {number} GPUs: give {alone} for one"
        )
    if any(gpu.kind == "cpu" for gpu in gpus):
        raise EstimateError(f"--gpu {name}: only CUDA GPUs are simulated; measure it")
    if is_own(name) and len(gpus) > 1:
        keys = ", ".join(f"{PREFIX}{gpu.key}" for gpu in gpus)
        raise EstimateError(f"--gpu {name}: name the card that you own: {keys}")
    return gpus


def counted(name: str) -> tuple[int | None, str]:
    """Number and name of ``8xH100`` or ``H100:8``, also of own ones; None without a number."""
    match = COUNTED.fullmatch(without_prefix(name).strip())
    if match is None:
        return None, name
    before, after, alone, number = match.groups()
    return int(before or number), f"{PREFIX if is_own(name) else ''}{after or alone}"


def check_numbers(names: Sequence[str], counts: Sequence[int]) -> None:
    """Check that each number of ``--gpus`` is that of a name, or that a name states none.

    Raises:
        EstimateError: every name states another number.
    """
    stated = [counted(name)[0] for name in names]
    if None in stated or not stated:
        return
    dropped = [str(count) for count in counts if count not in stated]
    if dropped:
        alone = ",".join(counted(name)[1] for name in names)
        raise EstimateError(
            f"--gpu {','.join(names)} contradicts --gpus {','.join(dropped)}: leave out --gpus, or "
            f"give --gpu {alone}"
        )


def _folded(name: str) -> str:
    return re.sub(r"[\s:_-]", "", name).casefold()


def _names(gpu: Gpu) -> set[str]:
    """Folded names of a GPU: beginnings of its key, with and without brands, and CUDA's names."""
    parts = gpu.key.casefold().split("-")
    devices = {_folded(MAKERS.sub("", device)) for device in gpu.device_names}
    return devices.union(*(_beginnings(parts[skipped:]) for skipped in (0, parts[0] == OPTIONAL)))


def _beginnings(parts: Sequence[str]) -> set[str]:
    ends = zip(accumulate(parts), [*parts[1:], ""], strict=True)
    return {name for name, following in ends if following not in OTHER_CHIPS and name != OPTIONAL}


def _without_speed(key: str) -> Gpu:
    """A GPU that no catalog has: its memory is given, and its times stay absent."""
    try:
        return Gpu(
            key=key,
            kind="cuda",
            device_names=(key,),
            source="asked for",
            recorded=dt.date.today(),  # noqa: DTZ011 - a note, not a time
        )
    except ValidationError as error:
        raise EstimateError(f"--gpu {key!r}: {validation_lines(error)}") from None
