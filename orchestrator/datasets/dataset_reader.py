"""A pass over a data set: the text of each example, and every mistake in it."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpu_catalog.suggestions import did_you_mean
from orchestrator.datasets.examples import examples
from orchestrator.datasets.file_formats import columns_text
from orchestrator.datasets.source import DataError, DatasetSource, Example, Mistake

EXAMPLES_AT_ONCE = 1000
MOST_MISTAKES = 20  # then reading stops
MOST_EMPTY = 5  # examples listed one by one

Made_co = TypeVar("Made_co", covariant=True)
Q = TypeVar("Q")


class ExamplePosition(NamedTuple):
    """Where an example stands: its number in the order of reading, and its name in messages."""

    number: int
    text: str


def empty_text(empty: int, empty_at: Sequence[str]) -> str:
    """How many examples are empty, and where the first of them stand."""
    counted = "1 example" if empty == 1 else f"{empty:,} examples"
    if not empty_at:
        return counted
    more = ", ..." if empty > len(empty_at) else ""
    return f"{counted} ({', '.join(empty_at)}{more})"


class Maker(Protocol[Made_co]):
    """Renders examples."""

    @property
    def part(self) -> str:
        """The option that says how."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields that it looks at."""

    def render(self, example: Example) -> Made_co | Mistake | None:
        """The text of an example; nothing, or an empty one, where it has no text."""


class DatasetReader(Generic[Q]):
    """A pass over the examples, and its mistakes.

    Attributes:
        complete: whether nothing was left to read.
        empty: examples without any text.
        empty_at: where the first ``MOST_EMPTY`` of them stand.

    Args:
        source: where they are.
        maker: renders them.
        most: examples to read, the first ones; None for all.
        parts: the option of each field that is not of the maker's own.
    """

    def __init__(
        self,
        source: DatasetSource,
        maker: Maker[Q],
        most: int | None,
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self._maker = maker
        self._most = most
        self._parts = parts or {}
        self._of_options: list[Mistake] = []
        self._of_examples: list[tuple[int, Mistake]] = []
        self._number = 0
        self.complete = True
        self.empty = 0
        self.empty_at: list[str] = []

    @property
    def mistakes(self) -> list[Mistake]:
        """The mistakes: first the options, then examples in their order.

        No more is read once the latter are ``MOST_MISTAKES``.
        """
        mistakes = [mistake for _, mistake in sorted(self._of_examples, key=lambda noted: noted[0])]
        if len(mistakes) == MOST_MISTAKES:
            text = f"{mistakes[-1].text} (there may be more: reading stopped here)"
            mistakes[-1] = Mistake(mistakes[-1].part, text)
        if self.empty and self.has_mistakes:
            text = f"{self._source.name}: empty, and left out: {self.empty_text}"
            mistakes.append(Mistake("dataset", text))
        return [*self._of_options, *mistakes]

    @property
    def empty_text(self) -> str:
        """How many examples are empty, and where the first of them stand."""
        return empty_text(self.empty, self.empty_at)

    @property
    def has_mistakes(self) -> bool:
        """Whether anything is wrong so far."""
        return bool(self._of_options or self._of_examples)

    def rendered(self) -> Iterator[tuple[ExamplePosition, Q]]:
        """The rendered examples that are not empty, each with where its example stands."""
        for example in self._examples():
            rendered = self._maker.render(example)
            if isinstance(rendered, Mistake):
                self.note(rendered)
            elif not rendered or (isinstance(rendered, str) and not rendered.strip()):
                self.note_empty(example.place)
            else:
                yield ExamplePosition(self._number, example.place), rendered

    def check(self, *, any_left: bool) -> None:
        """Raise the mistakes.

        Args:
            any_left: whether there is any example.

        Raises:
            DataError: anything is, or there is none.
        """
        if not any_left and not self.has_mistakes:
            what = f"all {self.empty} examples are empty" if self.empty else "holds no examples"
            raise DataError([Mistake("dataset", f"{self._source.name}: {what}")])
        if self.has_mistakes:
            raise DataError(self.mistakes)

    def note(self, mistake: Mistake, number: int | None = None) -> None:
        """Adds a mistake of an example, unless there are enough of them.

        Args:
            mistake: what is wrong.
            number: of the example; absent for the one that is being read.
        """
        if not self._is_full:
            self._of_examples.append((self._number if number is None else number, mistake))

    def note_empty(self, place: str) -> None:
        """Adds an example without any text."""
        self.empty += 1
        if self.empty <= MOST_EMPTY:
            self.empty_at.append(place)

    def note_option(self, mistake: Mistake) -> None:
        """Adds a mistake that is of no example."""
        self._of_options.append(mistake)

    @property
    def _is_full(self) -> bool:
        return len(self._of_examples) >= MOST_MISTAKES

    def _examples(self) -> Iterator[Example]:
        """The examples, until there are enough of them, or of mistakes."""
        try:
            entries = examples(self._source, self._maker.fields)
            first = list(itertools.islice(entries, EXAMPLES_AT_ONCE))
            self._check_fields([entry for entry in first if isinstance(entry, Example)])
            if self._of_options:
                # Every example would be wrong; what is no example is reported all the same.
                first = [entry for entry in first if isinstance(entry, Mistake)]
                entries = iter(())
            count = 0
            for self._number, entry in enumerate(itertools.chain(first, entries)):
                if self._is_full:
                    return
                if isinstance(entry, Mistake):
                    self.note(entry)
                    continue
                if count == self._most:
                    self.complete = False
                    return
                count += 1
                yield entry
        except DataError as error:
            self._of_options += error.mistakes

    def _check_fields(self, first: Collection[Example]) -> None:
        """Notes the fields that are in none of the first examples."""
        there = dict.fromkeys(name for example in first for name in example.fields)
        unknown = [field for field in self._maker.fields if field not in there]
        for field in unknown if there else ():
            near = did_you_mean(field, there) or f": it has {columns_text(there)}"
            text = f"{field!r}: no such field in {self._source.name}{near}"
            self.note_option(Mistake(self._parts.get(field, self._maker.part), text))
