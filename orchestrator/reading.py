"""A pass over a data set: a query for each example, and every mistake in it."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from gpu_catalog.near import did_you_mean
from orchestrator.examples import DataError, Example, Mistake, Source, columns_text, examples

QUERIES_AT_ONCE = 1000
MOST_MISTAKES = 20  # then reading stops

Made_co = TypeVar("Made_co", covariant=True)
Q = TypeVar("Q")


class Maker(Protocol[Made_co]):
    """Makes queries of examples."""

    @property
    def part(self) -> str:
        """The option that says how."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields that it looks at."""

    def query(self, example: Example) -> Made_co | Mistake | None:
        """The query of an example; nothing, or an empty one, where it has no text."""


class Reading(Generic[Q]):
    """A pass over the examples, and what was seen in it.

    Attributes:
        mistakes: what is wrong with them; no more is read once they are ``MOST_MISTAKES``.
        complete: whether nothing was left to read.
        empty: examples without any text.

    Args:
        source: where they are.
        maker: makes queries of them.
        most: examples to read, the first ones; all of them unless told.
        parts: the option of each field that is not of the maker's own.
    """

    def __init__(
        self,
        source: Source,
        maker: Maker[Q],
        most: int | None,
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self._maker = maker
        self._most = most
        self._parts = parts or {}
        self.mistakes: list[Mistake] = []
        self.complete = True
        self.empty = 0

    def queries(self) -> Iterator[tuple[str, Q]]:
        """The queries that are not empty, each with where its example stands."""
        for example in self._examples():
            query = self._maker.query(example)
            if isinstance(query, Mistake):
                self.note(query)
            elif not query or (isinstance(query, str) and not query.strip()):
                self.empty += 1
            elif not self.mistakes:
                yield example.place, query

    def check(self, *, any_left: bool) -> None:
        """Tells what is wrong.

        Args:
            any_left: whether there is any query.

        Raises:
            DataError: anything is, or there is none.
        """
        if not any_left and not self.mistakes:
            what = f"all {self.empty} examples are empty" if self.empty else "holds no examples"
            self.mistakes.append(Mistake("dataset", f"{self._source.name}: {what}"))
        if self.mistakes:
            raise DataError(self.mistakes)

    def note(self, mistake: Mistake) -> None:
        """Adds a mistake, unless there are enough of them."""
        if len(self.mistakes) < MOST_MISTAKES:
            self.mistakes.append(mistake)
            if len(self.mistakes) == MOST_MISTAKES:
                text = f"{mistake.text} (there may be more: reading stopped here)"
                self.mistakes[-1] = Mistake(mistake.part, text)

    def _examples(self) -> Iterator[Example]:
        """The examples, until there are enough of them, or of mistakes."""
        try:
            entries = examples(self._source, self._maker.fields)
            first = list(itertools.islice(entries, QUERIES_AT_ONCE))
            self._check_fields([entry for entry in first if isinstance(entry, Example)])
            seen = 0
            for entry in itertools.chain(first, entries):
                if len(self.mistakes) >= MOST_MISTAKES:
                    return
                if isinstance(entry, Mistake):
                    self.note(entry)
                    continue
                if seen == self._most:
                    self.complete = False
                    return
                seen += 1
                yield entry
        except DataError as error:
            self.mistakes += error.mistakes

    def _check_fields(self, first: Collection[Example]) -> None:
        """Whether a field is in none of the first examples.

        Raises:
            DataError: it is.
        """
        there = dict.fromkeys(name for example in first for name in example.fields)
        unknown = [field for field in self._maker.fields if field not in there]
        if there and unknown:
            raise DataError(
                Mistake(
                    self._parts.get(field, self._maker.part),
                    f"{field!r}: no such field in {self._source.name}"
                    f"{did_you_mean(field, there) or f': it has {columns_text(there)}'}",
                )
                for field in unknown
            )
