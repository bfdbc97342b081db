"""Text and JSON of ``dataset``: lengths of a data set's examples, and the cost of padding."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from orchestrator.datasets.dataset_reader import empty_text
from orchestrator.datasets.lengths import DataLengths, histogram_csv
from orchestrator.datasets.source import DataError, Mistake
from orchestrator.markdown_table import table
from orchestrator.reporting.notes.data_notes import approximate_text
from orchestrator.spec.job import Job, Padding
from orchestrator.spec.job_tokens import padded_tokens, rows

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
PADDINGS: tuple[Padding, ...] = ("longest", "grouped", "packed")
MOST_BINS = 12
BAR = 40  # characters of the fullest bin
ROUND_STEPS = (1, 2, 2.5, 5, 10)
TAIL = 0.99  # share of the examples in bins of equal width; one last bin holds the rest


def dataset_text(workload: Job) -> str:
    """Render facts, histogram and padding of a job's data as Markdown."""
    data = workload.lengths
    if data is None:
        return (
            f"{workload.examples:,} examples of unknown lengths: each is assumed to have "
            "the full sequence length"
        )
    facts = "\n".join(_facts(data, workload.cutoff))
    if len(data.histogram) == 1:
        return facts  # nothing to pad
    return "\n\n".join([facts, _histogram(data), _paddings(workload)])


def dataset_json(workload: Job) -> str:
    """Serialise the same as JSON; values that are not known are absent or ``null``."""
    data, cutoff = workload.lengths, workload.cutoff
    fields: dict[str, object] = {"examples": workload.examples}
    if data is not None:
        padded = _padded(workload)
        fields |= {
            **data.model_dump(mode="json", exclude={"histogram", "sequences"}),
            "tokens": data.tokens,
            "median_tokens": data.lengths.median,
            "p95_tokens": data.lengths.quantile(0.95),
            "longest_tokens": data.longest,
            "cutoff": cutoff,
            "cut_off_examples": data.cut_off(cutoff),
            "padded_tokens_per_example": padded,
            "packed_rows": rows(_with(workload, "packed")) if "packed" in padded else None,
            "histogram": data.histogram,
            "sequences": data.sequences,
        }
    return json.dumps(fields)


def save_histogram(path: Path, workload: Job) -> None:
    """Write a histogram of lengths for ``--length-histogram`` and ``fit --lengths``.

    Raises:
        DataError: the lengths are not known, or the file cannot be written.
    """
    data = workload.lengths
    if data is None:
        raise DataError([Mistake("save", f"{path}: it is not known how long examples are")])
    text = histogram_csv(Path(data.source).stem or data.source, data)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError([Mistake("save", f"{path}: cannot be written: {error.strerror}")]) from None


def _facts(data: DataLengths, cutoff: int | None) -> Iterator[str]:
    by = f" by {data.tokenizer}" if data.tokenizer else ""
    made = f" ({data.rendering})" if data.rendering else ""
    yield f"{data.source}{made}: {data.examples:,} examples, {data.tokens:,} tokens{by}"
    if data.sequences is not None:
        yield (
            "An example is a pair. Its length is that of the longer sequence, prompt included: "
            "trainers pad both to the longest of the batch."
        )
    if data.tokenizer is None:
        yield "The tokenizer is not recorded. Another tokenizer gives different lengths."
    lengths = data.lengths
    if len(data.histogram) > 1:
        yield (
            f"Median {lengths.median:.0f} tokens, mean {lengths.mean:.0f}, 95th percentile "
            f"{lengths.quantile(0.95):.0f}, longest {data.longest:,}."
        )
    if cutoff is not None:
        yield f"{data.cut_off(cutoff):,} examples are cut off at {cutoff:,} tokens."
    approximate = approximate_text(data)
    if approximate is not None:
        yield approximate
    if data.assumed is not None:
        yield f"Assumed: {data.assumed}."
    if data.empty:
        yield f"Excluded because they have no text: {empty_text(data.empty, data.empty_at)}."
    if not data.complete:
        yield "The data set has more examples: only the first ones were read, as a sample."


def _histogram(data: DataLengths) -> str:
    """Render bins of one round width, and a last bin for the longest examples."""
    most = data.lengths.quantile(TAIL)
    width = _round_width(most / MOST_BINS)
    ends = [width * (place + 1) for place in range(math.ceil(most / width))]
    counts = [0] * (len(ends) + 1)
    for length, count in data.histogram:
        counts[min((length - 1) // width, len(ends))] += count
    names = [f"{end - width + 1} to {end}" for end in ends] + [f"more than {ends[-1]}"]
    fullest = max(counts)
    bins = [
        (name, f"{count:,}", "#" * math.ceil(BAR * count / fullest))
        for name, count in zip(names, counts, strict=True)
    ]
    first = next(place for place, count in enumerate(counts) if count)
    return table(("tokens", "examples", ""), bins[first:] if counts[-1] else bins[first:-1])


def _round_width(least: float) -> int:
    power = 10.0 ** max(0, math.floor(math.log10(max(least, 1))))
    return math.ceil(power * next(step for step in ROUND_STEPS if power * step >= least))


def _paddings(workload: Job) -> str:
    columns = _padded(workload)
    lines = [
        (size, *(f"{column[size]:.1f}" for column in columns.values())) for size in BATCH_SIZES
    ]
    meanings = {
        "longest": "drawn at random, padded to the longest",
        "grouped": "similar lengths: 50 batches at a time are sorted, as in transformers",
        "packed": f"full rows of {workload.cutoff} tokens",
    }
    legend = [f"{padding}: {meanings[padding]}." for padding in columns]
    if "packed" in columns:
        legend[-1] += f" {rows(_with(workload, 'packed')):,} rows per epoch."
    elif not _is_preference(workload):
        legend.append("packed: add --cutoff, the tokens per row, to see it.")
    is_pair = workload.lengths is not None and workload.lengths.sequences is not None
    unit = "sequence" if is_pair else "example"
    title = (
        f"Expected tokens per {unit} including padding, by batch size (lengths are rounded up to a "
        f"multiple of {workload.pad_to_multiple}):"
    )
    return "\n\n".join([title, table(("batch", *columns), lines), "\n".join(legend)])


def _with(workload: Job, padding: Padding) -> Job:
    return workload.model_copy(update={"padding": padding})


def _is_preference(workload: Job) -> bool:
    return workload.lengths is not None and workload.lengths.is_preference


def _padded(workload: Job) -> dict[Padding, dict[int, float]]:
    """Tokens per example, padding included, by padding and batch size; packed rows are full."""
    columns: dict[Padding, dict[int, float]] = {}
    is_packed = workload.cutoff is not None and not _is_preference(workload)
    for padding in PADDINGS if is_packed else PADDINGS[:-1]:
        job = _with(workload, padding)
        rows_per_example = rows(job) / job.examples
        columns[padding] = {
            size: padded_tokens(job, size, 0) * rows_per_example for size in BATCH_SIZES
        }
    return columns
