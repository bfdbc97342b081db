"""How long the examples of a data set are: read and counted, from a histogram, or known."""

import csv
import hashlib
import io
import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from fitting.points.batch_lengths import Lengths
from fitting.tables.table_error import TableError
from gpu_catalog.record import Record
from orchestrator.datasets.dataset_reader import EXAMPLES_AT_ONCE, DatasetReader, ExamplePosition
from orchestrator.datasets.file_formats import columns_text
from orchestrator.datasets.rendering import Chat, Rendering
from orchestrator.datasets.source import DataError, DatasetSource, Mistake
from trials.child_process.token_counter import (
    RenderedExample,
    TokenCounter,
    TokenCounts,
    TokenizerError,
)
from trials.records.recipe import PositiveInt

CHARACTERS_AT_ONCE = 4_000_000
PAPER = "arXiv 2408.04693"
HISTOGRAM_COLUMNS: dict[str, tuple[str, ...]] = {"tokens": (), "examples": (), "dataset": ()}


class DataLengths(Record):
    """How many examples of a data set have how many tokens, before any is cut off.

    Attributes:
        source: the file, folder, hub name or set they are of.
        made_by: how an example is rendered; absent where it is not known.
        tokenizer: whose tokens they are; absent where it is not known.
        histogram: (tokens, examples with so many), ascending.
        complete: false where there are more examples than were read.
        empty: examples without any text, which are left out.
        empty_at: where the first of them stand.
        assumed: what is taken for granted, where not every length is known.
        fingerprint: the same for the same examples and tokenizer; absent where none were read.
    """

    source: str
    made_by: str | None = None
    tokenizer: str | None = None
    histogram: Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], Field(min_length=1)]
    complete: Annotated[bool, Field(strict=True)] = True
    empty: Annotated[int, Field(strict=True, ge=0)] = 0
    empty_at: tuple[str, ...] = ()
    assumed: str | None = None
    fingerprint: str | None = None

    @model_validator(mode="after")
    def _is_ascending(self) -> Self:
        tokens = [length for length, _ in self.histogram]
        if any(after <= before for before, after in itertools.pairwise(tokens)):
            raise ValueError("lengths must be ascending, each but once")
        return self

    @property
    def examples(self) -> int:
        """How many there are."""
        return sum(count for _, count in self.histogram)

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum(length * count for length, count in self.histogram)

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return self.histogram[-1][0]

    @cached_property
    def lengths(self) -> Lengths:
        """As the laws of padding take them."""
        return Lengths.of(self.histogram)

    def cut_off(self, cutoff: int | None) -> int:
        """How many are longer than that."""
        return sum(count for length, count in self.histogram if cutoff and length > cutoff)


@dataclass(frozen=True, slots=True)
class KnownData:
    """A data set of the paper, by what is published of it.

    Attributes:
        examples: how many, as the paper has it.
        median: tokens of the example in the middle; None where it is not published.
        note: what to know of it.
    """

    examples: int
    median: int | None
    note: str


# Table II, and the text for OpenOrca: $3460 on the H100 is 2.9 million queries.
PUBLISHED = {
    "commonsense_15k": KnownData(15_000, 79, "fine-tuned on"),
    "math_14k": KnownData(14_000, 174, "fine-tuned on"),
    "hellaswag": KnownData(10_000, 272, "tested on"),
    "gsm8k": KnownData(1_300, 148, "tested on: its test split"),
    "openorca": KnownData(2_900_000, None, "priced, not run"),
}


def known_lengths(name: str) -> DataLengths | None:
    """How long the examples of one of the paper's data sets are; None where it does not say.

    Of two of them the histogram is published. Of others the median alone: every example is taken to
    have that length, which is said.

    Raises:
        KeyError: it is none of ``PUBLISHED``.
    """
    from fitting.paper.published import dataset_lengths  # noqa: PLC0415 - nothing else needs it

    known, counted = PUBLISHED[name], dataset_lengths().get(name)
    source = f"{name} of {PAPER}"
    if counted is not None:
        pairs = zip(counted.tokens, counted.examples, strict=True)
        histogram = tuple((int(length), int(count)) for length, count in pairs)
        return DataLengths(source=source, histogram=histogram)
    if known.median is None:
        return None
    return DataLengths(
        source=source,
        histogram=((known.median, known.examples),),
        assumed=f"every example has the median length, {known.median} tokens: only it is published",
    )


def counted_lengths(
    source: DatasetSource,
    rendering: Rendering,
    tokenizer: str,
    most: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> DataLengths:
    """Reads a data set and counts the tokens of its examples.

    A text has the tokenizer's special tokens around it, and one for the end where the tokenizer
    has one and does not add it: as trainers do. A conversation has what the chat template writes.

    Args:
        source: where its examples are.
        rendering: how an example is rendered.
        tokenizer: a folder, a tokenizer.json, or a hub name.
        most: examples to read, the first ones; all of them unless told.
        progress: told how many were counted so far.

    Raises:
        DataError: it cannot be read, an example is not one, or there is no such tokenizer; a line
            for each mistake, reading stopped after the first ``MOST_MISTAKES``.
    """
    reading = _Counting(source, rendering, most)
    chunks = reading.chunks()
    histogram: Counter[int] = Counter()
    fingerprint = ""
    try:
        with TokenCounter(tokenizer) as counter:
            if isinstance(rendering, Chat):
                counter.need_chat_template()
            for counted in counter.counted(chunks):
                reading.note_counted(counted)
                histogram.update(counted.tokens)
                if progress is not None:
                    progress(histogram.total())
            fingerprint = f"{counter.fingerprint}-{reading.digest}"
    except TokenizerError as error:
        next(chunks, None)  # what is wrong with the data is told as well
        reading.note_option(Mistake("tokenizer", str(error)))
    histogram.pop(0, None)
    reading.check(any_left=bool(histogram))
    return DataLengths(
        source=source_text(source),
        made_by=str(rendering),
        tokenizer=tokenizer,
        histogram=tuple(sorted(histogram.items())),
        complete=reading.complete,
        empty=reading.empty,
        empty_at=tuple(reading.empty_at),
        fingerprint=fingerprint,
    )


def first_mistakes(source: DatasetSource, rendering: Rendering) -> list[Mistake]:
    """What is wrong with the first examples; for when there is no point in counting them."""
    reading = _Counting(source, rendering, EXAMPLES_AT_ONCE)
    next(reading.chunks(), None)
    return reading.mistakes


class _Counting(DatasetReader[RenderedExample]):
    """A pass over the examples, rendered and passed on in chunks."""

    def __init__(self, source: DatasetSource, rendering: Rendering, most: int | None) -> None:
        super().__init__(source, rendering, most)
        self._digest = hashlib.sha256()
        self._tells_more = isinstance(rendering, Chat)
        self._places: deque[list[ExamplePosition]] = deque()

    @property
    def digest(self) -> str:
        """Of the examples read so far, in their order."""
        return self._digest.hexdigest()[:16]

    def chunks(self) -> Iterator[list[RenderedExample]]:
        """The examples, so many at once as are counted at once.

        None once there is a mistake, unless they are conversations: the chat template may have more
        to say against them.
        """
        places: list[ExamplePosition] = []
        rendered_examples: list[RenderedExample] = []
        characters = 0
        for place, rendered in self.rendered():
            if self.has_mistakes and not self._tells_more:
                continue
            said = rendered if isinstance(rendered, str) else json.dumps(rendered, default=str)
            self._digest.update(f"{len(said)} {said}".encode(errors="replace"))
            places.append(place)
            rendered_examples.append(rendered)
            characters += len(said)
            if len(rendered_examples) == EXAMPLES_AT_ONCE or characters > CHARACTERS_AT_ONCE:
                yield self._chunk(places, rendered_examples)
                places, rendered_examples, characters = [], [], 0
        if rendered_examples and (self._tells_more or not self.has_mistakes):
            yield self._chunk(places, rendered_examples)

    def note_counted(self, counted: TokenCounts) -> None:
        """What was said to the earliest chunk that was not answered yet."""
        places = self._places.popleft()
        if (
            0 in counted.tokens and not counted.refused
        ):  # texts of which the tokenizer knows nothing
            for place, tokens in zip(places, counted.tokens, strict=True):
                if tokens == 0:
                    self.note_empty(place.text)
        for at, why in counted.refused.items():
            place = places[at]
            text = f"{place.text}: the chat template refuses it: {why}"
            self.note(Mistake("dataset", text), place.number)

    def _chunk(
        self, places: list[ExamplePosition], rendered_examples: list[RenderedExample]
    ) -> list[RenderedExample]:
        self._places.append(places)
        return rendered_examples


def source_text(source: DatasetSource) -> str:
    """A data set as it is named to people."""
    subset = "" if source.subset is None else f" ({source.subset})"
    split = "" if source.split is None else f", {source.split}"
    return f"{source.name}{subset}{split}"


def read_histogram(path: Path) -> DataLengths:
    """A histogram from a CSV of tokens and examples; a column dataset may stand beside them.

    Raises:
        DataError: it cannot be read; a line for each mistake.
    """
    from fitting.tables.csv_table import (  # noqa: PLC0415 - pandas, for tables only
        CsvTable,
        read_csv,
    )

    try:
        frame, file = read_csv(path)
        sheet = CsvTable(frame, HISTOGRAM_COLUMNS, file)
        for name in ("tokens", "examples"):
            if name not in sheet:
                sheet.head_is_wrong(f"no column {name}: the two are tokens and examples")
            sheet.check_filled(name)
        names = {name for name in sheet.texts("dataset") if name is not None}
        if len(names) > 1:
            sheet.head_is_wrong(f"holds {len(names)} data sets ({columns_text(sorted(names))})")
        columns = [sheet.numbers(name, _whole).tolist() for name in ("tokens", "examples")]
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
    """A histogram as ``read_histogram`` and ``fit --lengths`` take it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["dataset", "tokens", "examples"])
    writer.writerows((name, length, count) for length, count in lengths.histogram)
    return buffer.getvalue()


def _whole(value: float) -> str | None:
    return None if value >= 1 and value.is_integer() else "a whole number of at least 1"
