"""Notes on what a training keeps in the memory of its hosts. Pure."""

from collections.abc import Iterator, Sequence

from gpu_catalog.number_text import short
from orchestrator.estimating.estimate_records import Estimate
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.host_memory import NOT_IN_IT, TooLittleHostMemory


def host_notes(rows: Sequence[Estimate]) -> Iterator[str]:
    """What the hosts hold, instances with too little memory for it, and those of unknown memory."""
    holding = [row for row in rows if row.host_gib is not None]
    if holding:
        by_size: dict[str, list[str]] = {}
        for row in holding:
            by_size.setdefault(f"{short(row.host_gib or 0, 4)} GiB", []).append(row.gpu)
        several = len(by_size) > 1
        sizes = [
            f"{size} ({', '.join(gpus)})" if several else size for size, gpus in by_size.items()
        ]
        each = " of each node" if any(row.nodes > 1 for row in holding) else ""
        yield f"The host{each} holds {', '.join(sizes)}: {NOT_IN_IT}."
    yield from too_little_text(small for row in rows for small in row.too_little_host_memory)
    unknown = [
        f"{row.price.provider} {row.price.instance}"
        for row in holding
        if row.price is not None and row.price.host_memory_gib is None and row.price.provider != OWN
    ]
    if unknown:
        names = ", ".join(dict.fromkeys(unknown))
        yield f"The memory of the host is unknown, and was not compared: {names}."


def too_little_text(instances: Iterator[TooLittleHostMemory]) -> Iterator[str]:
    """Instances that are excluded by the memory of their hosts; none for none."""
    texts = list(dict.fromkeys(small.text for small in instances))
    if texts:
        yield f"Excluded by the memory of the host: {'; '.join(texts)}."
