"""A pass over a data set: its rendered examples, and all mistakes in it."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpu_catalog.suggestions import did_you_mean
from orchestrator.datasets.examples import examples
from orchestrator.datasets.file_formats import columns_text
from orchestrator.datasets.source import DataError, DatasetSource, Example, Mistake

EXAMPLES_AT_ONCE = 1000
MOST_MISTAKES = 20  # then reading stops
MOST_EMPTY = 5  # examples listed one by one

Rendered_co = TypeVar("Rendered_co", covariant=True)
R = TypeVar("R")


class ExamplePosition(NamedTuple):
    """Number of an example in the order of reading, and its place in messages."""

    number: int
    text: str


def empty_text(empty: int, empty_at: Sequence[str]) -> str:
    """Number of empty examples, and the places of the first ones."""
    counted = "1 example" if empty == 1 else f"{empty:,} examples"
    if not empty_at:
        return counted
    more = ", ..." if empty > len(empty_at) else ""
    return f"{counted} ({', '.join(empty_at)}{more})"


class Renderer(Protocol[Rendered_co]):
    """Renders examples."""

    @property
    def part(self) -> str:
        """Option that gives the rendering."""

    @property
    def fields(self) -> Sequence[str]:
        """Fields that it uses."""

    def render(self, example: Example) -> Rendered_co | Mistake | None:
        """Rendered example; None, or an empty one, if the example has no text."""


class DatasetReader(Generic[R]):
    """A pass over the first ``most`` examples, by default all, and its mistakes.

    Mistakes in a field name its option in ``parts``, by default the renderer's.

    Attributes:
        complete: whether all examples were read.
        empty: number of examples without text.
        empty_at: places of the first ``MOST_EMPTY`` of them.
    """

    def __init__(
        self,
        source: DatasetSource,
        renderer: Renderer[R],
        most: int | None,
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self._renderer = renderer
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
        """Mistakes of the options, then of examples in their order.

        Reading stops after ``MOST_MISTAKES`` of the latter.
        """
        mistakes = [mistake for _, mistake in sorted(self._of_examples, key=itemgetter(0))]
        if len(mistakes) == MOST_MISTAKES:
            text = f"{mistakes[-1].text} (there may be more: reading stopped here)"
            mistakes[-1] = Mistake(mistakes[-1].part, text)
        if self.empty and self.has_mistakes:
            text = f"{self._source.name}: empty, and skipped: {self.empty_text}"
            mistakes.append(Mistake("dataset", text))
        return [*self._of_options, *mistakes]

    @property
    def empty_text(self) -> str:
        """Number of empty examples, and the places of the first ones."""
        return empty_text(self.empty, self.empty_at)

    @property
    def has_mistakes(self) -> bool:
        """Whether there is a mistake so far."""
        return bool(self._of_options or self._of_examples)

    def rendered(self) -> Iterator[tuple[ExamplePosition, R]]:
        """Rendered examples that are not empty, each with the position of its example."""
        for example in self._examples():
            rendered = self._renderer.render(example)
            if isinstance(rendered, Mistake):
                self.note(rendered)
            elif not rendered or (isinstance(rendered, str) and not rendered.strip()):
                self.note_empty(example.place)
            else:
                yield ExamplePosition(self._number, example.place), rendered

    def check(self, *, any_left: bool) -> None:
        """Raise the mistakes.

        Raises:
            DataError: there is a mistake, or no example is left that is not empty.
        """
        if self.has_mistakes:
            raise DataError(self.mistakes)
        if not any_left:
            what = f"all {self.empty} examples are empty" if self.empty else "holds no examples"
            raise DataError([Mistake("dataset", f"{self._source.name}: {what}")])

    def note(self, mistake: Mistake, number: int | None = None) -> None:
        """Add a mistake of an example, the one that is being read by default, if there is room."""
        if not self._is_full:
            self._of_examples.append((self._number if number is None else number, mistake))

    def note_empty(self, place: str) -> None:
        """Count an example without text."""
        self.empty += 1
        if self.empty <= MOST_EMPTY:
            self.empty_at.append(place)

    def note_option(self, mistake: Mistake) -> None:
        """Add a mistake of an option."""
        self._of_options.append(mistake)

    @property
    def _is_full(self) -> bool:
        return len(self._of_examples) >= MOST_MISTAKES

    def _examples(self) -> Iterator[Example]:
        """Examples, until there are enough of them or of mistakes."""
        try:
            entries = examples(self._source, self._renderer.fields)
            first = list(itertools.islice(entries, EXAMPLES_AT_ONCE))
            self._check_fields([entry for entry in first if isinstance(entry, Example)])
            if self._of_options:
                # Every example would fail; lines that are no examples are still reported.
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
        """Add a mistake for each field that none of the first examples has."""
        names = dict.fromkeys(name for example in first for name in example.fields)
        unknown = [field for field in self._renderer.fields if field not in names]
        for field in unknown if names else ():
            near = did_you_mean(field, names) or f": it has {columns_text(names)}"
            text = f"{field!r}: no such field in {self._source.name}{near}"
            self.note_option(Mistake(self._parts.get(field, self._renderer.part), text))
