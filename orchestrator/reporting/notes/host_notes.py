"""Notes on what a training keeps in the memory of its hosts. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gpu_catalog.number_text import short
from orchestrator.estimating.estimate_records import Estimate
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.host_memory import NOT_IN_IT, TooLittleHostMemory
from orchestrator.ranking.ranked_offer import RankedOffer


def host_notes(rows: Sequence[Estimate]) -> Iterator[str]:
    """Memory that the hosts hold, instances with less, and instances of unknown memory."""
    yield from _held_text((row.gpu, row.host_gib) for row in rows)
    yield from _too_little_text(small for row in rows for small in row.too_little_host_memory)
    prices = [row.price for row in rows if row.host_gib is not None and row.price is not None]
    yield from _unknown_text(
        f"{price.provider} {price.instance}"
        for price in prices
        if price.host_memory_gib is None and price.provider != OWN
    )


def ranked_host_notes(rows: Sequence[RankedOffer]) -> Iterator[str]:
    """Memory that the hosts of ranked offers hold, and instances of unknown memory."""
    yield from _held_text((row.cell.gpus, row.host_gib) for row in rows)
    yield from _unknown_text(
        f"{row.provider} {row.instance}"
        for row in rows
        if row.host_gib is not None and row.host_memory_gib is None and row.provider != OWN
    )


def _held_text(held: Iterable[tuple[str, float | None]]) -> Iterator[str]:
    """Memory that the host of each node holds, with the GPUs where it differs; none for none."""
    gpus: dict[str, dict[str, None]] = defaultdict(dict)
    for gpu, gib in held:
        if gib is not None:
            gpus[f"{short(gib, 4)} GiB"][gpu] = None
    sizes = [f"{size} ({', '.join(on)})" if len(gpus) > 1 else size for size, on in gpus.items()]
    if sizes:
        yield f"The host of each node holds {', '.join(sizes)}: {NOT_IN_IT}."


def _too_little_text(instances: Iterable[TooLittleHostMemory]) -> Iterator[str]:
    texts = list(dict.fromkeys(small.text for small in instances))
    if texts:
        yield f"Excluded by the memory of the host: {'; '.join(texts)}."


def _unknown_text(instances: Iterable[str]) -> Iterator[str]:
    names = ", ".join(dict.fromkeys(instances))
    if names:
        yield f"The memory of the host is unknown, and was not compared: {names}."
