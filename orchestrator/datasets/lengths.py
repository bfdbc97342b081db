"""Lengths of the examples of a data set: counted, from a histogram, or published.

The length of a pair is that of its longer sequence: TRL pads both to the longest of the batch.
"""

import csv
import hashlib
import io
import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, model_validator

from fitting.tables.table_error import TableError
from gpu_catalog.record import Record, former_names
from gpu_catalog.safe_text import spreadsheet_cell
from orchestrator.datasets.approximate_tokens import ApproximateCounter, Vocabulary
from orchestrator.datasets.dataset_reader import EXAMPLES_AT_ONCE, DatasetReader, ExamplePosition
from orchestrator.datasets.file_formats import columns_text
from orchestrator.datasets.preference import Kind, Pair, Preference
from orchestrator.datasets.recognition import Recognised
from orchestrator.datasets.rendering import Chat, Rendering
from orchestrator.datasets.source import DataError, DatasetSource, Mistake
from trials.child_process.token_counter import (
    RenderedExample,
    TokenCounter,
    TokenCounts,
    TokenizerError,
)
from trials.recipes.fields import PositiveInt

if TYPE_CHECKING:
    from fitting.points.batch_lengths import Lengths

CHARACTERS_AT_ONCE = 4_000_000
PAPER = "arXiv 2408.04693"
HISTOGRAM_COLUMNS: dict[str, tuple[str, ...]] = {"tokens": (), "examples": (), "dataset": ()}


AnyRendering = Rendering | Preference | Recognised
Histogram = Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], Field(min_length=1)]


class DataLengths(Record):
    """Histogram of the tokens per rendered example, before any is cut off.

    Attributes:
        source: the file, folder, hub name or data set.
        rendering: description of the rendering; None if unknown.
        tokenizer: the tokenizer; None if unknown.
        kind: form of an example: a text, a pair of answers, or an answer with a label; None if
            unknown.
        histogram: (tokens, number of examples), ascending. The tokens of a pair are those of its
            longer sequence.
        sequences: (tokens, number of sequences), ascending, of both sequences of every pair; None
            where an example is one sequence, or where long pairs were left out.
        complete: whether all examples were read.
        empty: number of examples without text, which are skipped.
        empty_at: places of the first of them.
        error: relative error of all lengths where tokens are counted approximately; None where a
            tokenizer counted them.
        assumed: assumption, if not every length is known.
        fingerprint: equal for equal examples and tokenizer; None if no examples were read.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"made_by": "rendering"}
    _former = model_validator(mode="before")(former_names(**FORMER))

    source: str
    rendering: str | None = None
    tokenizer: str | None = None
    kind: Kind | None = None
    histogram: Histogram
    sequences: Histogram | None = None
    complete: Annotated[bool, Field(strict=True)] = True
    empty: Annotated[int, Field(strict=True, ge=0)] = 0
    empty_at: tuple[str, ...] = ()
    error: Annotated[float, Field(gt=0, lt=1)] | None = None
    assumed: str | None = None
    fingerprint: str | None = None

    @model_validator(mode="after")
    def _is_ascending(self) -> Self:
        for histogram in (self.histogram, self.sequences or ()):
            tokens = [length for length, _ in histogram]
            if any(after <= before for before, after in itertools.pairwise(tokens)):
                raise ValueError("lengths must be ascending and different")
        return self

    @property
    def examples(self) -> int:
        """Number of examples."""
        return sum(count for _, count in self.histogram)

    @property
    def tokens(self) -> int:
        """Total tokens, of both sequences of a pair."""
        return sum(length * count for length, count in self.sequences or self.histogram)

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return self.histogram[-1][0]

    @property
    def is_preference(self) -> bool:
        """Whether the data hold answers that are compared or labelled."""
        return self.kind in ("pairs", "labelled")

    @cached_property
    def lengths(self) -> "Lengths":
        """Lengths for the laws of padding."""
        return _lengths(self.histogram)

    def mean_sequence(self, cutoff: int | None) -> float:
        """Mean tokens of a sequence that is truncated to a cutoff."""
        lengths = _lengths(self.sequences or self.histogram)
        return (lengths if cutoff is None else lengths.cut(cutoff)).mean

    def unpaired(self) -> "DataLengths":
        """Lengths of the answers of pairs, each an example of its own, as KTOTrainer takes them."""
        made = f"{self.rendering}; each answer is an example"
        update = {"kind": "labelled", "rendering": made, "sequences": None}
        return self.model_copy(update=update | {"histogram": self.sequences or self.histogram})

    def without_longer(self, cutoff: int) -> "DataLengths":
        """Lengths of the examples up to a cutoff, where a trainer drops others.

        They are unchanged without any. The shorter sequences of longer pairs are unknown, so
        ``sequences`` is None.
        """
        longer = self.cut_off(cutoff)
        if longer in (0, self.examples):
            return self
        what = "pairs" if self.kind == "pairs" else "examples"
        made = self._noted(f"{longer:,} {what} longer than {cutoff:,} tokens are left out")
        kept = tuple((length, count) for length, count in self.histogram if length <= cutoff)
        return self.model_copy(update={"rendering": made, "histogram": kept, "sequences": None})

    def split(self, most: int) -> "DataLengths":
        """Lengths of the parts of at most so many tokens that examples are split into."""
        if self.longest <= most:
            return self
        parts: Counter[int] = Counter()
        for length, count in self.histogram:
            parts[most] += length // most * count
            parts[length % most] += count
        histogram = tuple(
            sorted((length, count) for length, count in parts.items() if length * count)
        )
        made = self._noted(f"{self.cut_off(most):,} longer than {most:,} tokens are split")
        return self.model_copy(update={"rendering": made, "histogram": histogram})

    def _noted(self, text: str) -> str:
        return text if self.rendering is None else f"{self.rendering}; {text}"

    def cut_off(self, cutoff: int | None) -> int:
        """Number of examples that are longer than the cutoff."""
        return sum(count for length, count in self.histogram if cutoff and length > cutoff)


def _lengths(histogram: Histogram) -> "Lengths":
    from fitting.points.batch_lengths import Lengths  # noqa: PLC0415 - numpy, for laws only

    return Lengths.of(histogram)


@dataclass(frozen=True, slots=True)
class PublishedData:
    """Number of examples, median tokens and use of a data set in the paper."""

    examples: int
    median: int | None
    note: str


# Table II, and the text for OpenOrca: $3460 on the H100 is 2.9 million queries.
PUBLISHED = {
    "commonsense_15k": PublishedData(15_000, 79, "fine-tuned on"),
    "math_14k": PublishedData(14_000, 174, "fine-tuned on"),
    "hellaswag": PublishedData(10_000, 272, "tested on"),
    "gsm8k": PublishedData(1_300, 148, "tested on: its test split"),
    "openorca": PublishedData(2_900_000, None, "priced, not run"),
}


def published_lengths(name: str) -> DataLengths | None:
    """Lengths of a data set of the paper; None if none are published.

    For two data sets the histogram is published, for others only the median: then every example is
    assumed to have that length.

    Raises:
        KeyError: the data set is not in ``PUBLISHED``.
    """
    from fitting.paper.published import dataset_lengths  # noqa: PLC0415 - nothing else needs it

    facts, counted = PUBLISHED[name], dataset_lengths().get(name)
    source = f"{name} of {PAPER}"
    if counted is not None:
        pairs = zip(counted.tokens, counted.examples, strict=True)
        histogram = tuple((int(length), int(count)) for length, count in pairs)
        return DataLengths(source=source, histogram=histogram)
    if facts.median is None:
        return None
    return DataLengths(
        source=source,
        histogram=((facts.median, facts.examples),),
        assumed=f"every example has the median length, {facts.median} tokens: only it is published",
    )


def counted_lengths(
    source: DatasetSource,
    rendering: AnyRendering,
    tokenizer: str | Vocabulary,
    most: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> DataLengths:
    """Read a data set and count the tokens of its rendered examples.

    A text gets the tokenizer's special tokens, and an end token if the tokenizer has one and does
    not add it, as trainers do. A conversation is tokenized as the chat template writes it.

    Without a tokenizer, the rates of a vocabulary give approximate counts.

    Only the first ``most`` examples are read. ``progress`` is called with the number of examples
    counted so far.

    Raises:
        DataError: the data, an example or the tokenizer cannot be read; one line for each of the
            first ``MOST_MISTAKES`` mistakes.
    """
    reading = _Counting(source, rendering, most)
    chunks = reading.chunks()
    histogram: Counter[int] = Counter()
    sequences: Counter[int] = Counter()
    fingerprint = ""
    try:
        with _counter(tokenizer) as counter:
            if _is_chat(rendering):
                counter.need_chat_template()
            for counted in counter.counted(chunks):
                histogram.update(reading.note_counted(counted))
                sequences.update(counted.tokens)
                if progress is not None:
                    progress(histogram.total())
            fingerprint = f"{counter.fingerprint}-{reading.digest.hexdigest()[:16]}"
    except TokenizerError as error:
        next(chunks, None)  # mistakes of the data are reported as well
        reading.note_option(Mistake("tokenizer", str(error)))
    histogram.pop(0, None)
    sequences.pop(0, None)
    reading.check(any_left=bool(histogram))
    kind = rendering.kind if isinstance(rendering, Preference) else "texts"
    return DataLengths(
        source=source_text(source),
        rendering=str(rendering),
        tokenizer=str(tokenizer),
        kind=kind,
        histogram=tuple(sorted(histogram.items())),
        sequences=tuple(sorted(sequences.items())) if kind == "pairs" else None,
        complete=reading.complete,
        empty=reading.empty,
        empty_at=tuple(reading.empty_at),
        error=tokenizer.error if isinstance(tokenizer, Vocabulary) else None,
        fingerprint=fingerprint,
    )


def _counter(tokenizer: str | Vocabulary) -> TokenCounter | ApproximateCounter:
    return TokenCounter(tokenizer) if isinstance(tokenizer, str) else ApproximateCounter(tokenizer)


def first_mistakes(source: DatasetSource, rendering: AnyRendering) -> list[Mistake]:
    """Mistakes in the first examples, for when other mistakes prevent counting."""
    reading = _Counting(source, rendering, EXAMPLES_AT_ONCE)
    next(reading.chunks(), None)
    return reading.mistakes


def _is_chat(rendering: AnyRendering) -> bool:
    if isinstance(rendering, Preference | Recognised):
        return rendering.is_chat
    return isinstance(rendering, Chat)


class _Counting(DatasetReader[RenderedExample | Pair]):
    """A pass over the examples that renders them in chunks."""

    def __init__(self, source: DatasetSource, rendering: AnyRendering, most: int | None) -> None:
        super().__init__(source, rendering, most)
        self.digest = hashlib.sha256()  # of the rendered sequences so far, in their order
        self._may_be_refused = _is_chat(rendering)
        self._places: deque[list[ExamplePosition]] = deque()  # of the sequences of each chunk

    def chunks(self) -> Iterator[list[RenderedExample]]:
        """Rendered sequences in chunks that are counted together; a pair is two of them.

        After a mistake no more follow, except for conversations: the chat template may refuse more
        of them.
        """
        places: list[ExamplePosition] = []
        sequences: list[RenderedExample] = []
        characters = 0
        for place, rendered in self.rendered():
            if self.has_mistakes and not self._may_be_refused:
                continue
            for sequence in rendered if isinstance(rendered, Pair) else (rendered,):
                text = sequence if isinstance(sequence, str) else json.dumps(sequence, default=str)
                self.digest.update(f"{len(text)} {text}".encode(errors="replace"))
                places.append(place)
                sequences.append(sequence)
                characters += len(text)
            if len(sequences) >= EXAMPLES_AT_ONCE or characters > CHARACTERS_AT_ONCE:
                self._places.append(places)
                yield sequences
                places, sequences, characters = [], [], 0
        if sequences and (self._may_be_refused or not self.has_mistakes):
            self._places.append(places)
            yield sequences

    def note_counted(self, counted: TokenCounts) -> list[int]:
        """Tokens of each example of the earliest chunk without a reply yet, 0 if it is left out.

        Its empty and refused examples are noted.
        """
        places = self._places.popleft()
        longest: dict[ExamplePosition, int] = {}
        for place, tokens in zip(places, counted.tokens, strict=True):
            longest[place] = max(longest.get(place, 0), tokens)
        # A text without any token of the tokenizer counts as empty.
        if not counted.refused:
            for place, tokens in longest.items():
                if tokens == 0:
                    self.note_empty(place.text)
        for place, why in {places[at]: why for at, why in counted.refused.items()}.items():
            text = f"{place.text}: the chat template refuses it: {why}"
            self.note(Mistake("dataset", text), place.number)
        return list(longest.values())


def source_text(source: DatasetSource) -> str:
    """Name of a data set in messages."""
    subset = "" if source.subset is None else f" ({source.subset})"
    split = "" if source.split is None else f", {source.split}"
    return f"{source.name}{subset}{split}"


def read_histogram(path: Path) -> DataLengths:
    """Histogram from a CSV of tokens and examples, with an optional column dataset.

    Raises:
        DataError: the file cannot be read; one line for each mistake.
    """
    from fitting.tables import csv_table  # noqa: PLC0415 - pandas, for tables only

    try:
        frame, file = csv_table.read_csv(path)
        sheet = csv_table.CsvTable(frame, HISTOGRAM_COLUMNS, file)
        for name in ("tokens", "examples"):
            if name not in sheet:
                sheet.head_is_wrong(f"no column {name}: the columns are tokens and examples")
            sheet.check_filled(name)
        names = {name for name in sheet.texts("dataset") if name is not None}
        if len(names) > 1:
            sheet.head_is_wrong(f"has {len(names)} data sets ({columns_text(sorted(names))})")
        columns = [sheet.numbers(n, csv_table.whole).tolist() for n in ("tokens", "examples")]
        sheet.check()
    except TableError as error:
        lines = str(error).split("\n")
        raise DataError(Mistake("length_histogram", line) for line in lines) from None
    histogram: Counter[int] = Counter()
    for length, count in zip(*columns, strict=True):
        histogram[int(length)] += int(count)
    name = f" ({names.pop()})" if names else ""
    return DataLengths(source=f"{path}{name}", histogram=tuple(sorted(histogram.items())))


def histogram_csv(name: str, lengths: DataLengths) -> str:
    """CSV of a histogram, as ``read_histogram`` and ``fit --lengths`` read it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["dataset", "tokens", "examples"])
    cell = spreadsheet_cell(name)
    writer.writerows((cell, length, count) for length, count in lengths.histogram)
    return buffer.getvalue()
