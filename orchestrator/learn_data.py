"""The data that ``learn`` learns from and tests with: read, parted, and split. No torch."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data_lengths import source_text
from orchestrator.examples import DataError, Example, Mistake, Source, columns_text
from orchestrator.queries import Rendering, parted
from orchestrator.reading import QUERIES_AT_ONCE, Reading
from trials.learning import LearnData, LearnQuery

MOST_HELD_OUT = 1000  # unless told: more tell no more, and each is tested after every epoch
HELD_OUT_SHARE = 0.1
FEWEST_HELD_OUT = 2  # one tells nothing of noise


@dataclass(frozen=True, slots=True)
class AskedData:
    """What to learn.

    Attributes:
        source: where the examples are.
        rendering: how an example becomes a query; its last field or message is the answer.
        tokenizer: the model's.
        choices: fields of the answers that may be given: one that lists them, or one for each.
        held_out: queries to test with, or the share of them; absent for a tenth, or all of
            ``held_out_source``, at most ``MOST_HELD_OUT``.
        held_out_source: where these are; absent for part of the same examples.
        most: examples to read, the first ones.
        seed: the split is drawn from it.
    """

    source: Source
    rendering: Rendering
    tokenizer: str
    choices: tuple[str, ...] = ()
    held_out: float | None = None
    held_out_source: Source | None = None
    most: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReadData:
    """What was read.

    Attributes:
        facts: of the data.
        queries: those to learn from, and those held out.
        remarks: what to tell of it.
    """

    facts: LearnData
    queries: tuple[LearnQuery, ...]
    remarks: tuple[str, ...]


def data_mistakes(asked: AskedData) -> list[Mistake]:
    """What is wrong with the first examples; for when there is no point in reading them all."""
    sources = (asked.source, asked.held_out_source)
    return [
        mistake
        for source in sources
        if source is not None
        for mistake in _first_mistakes(asked, source)
    ]


def _first_mistakes(asked: AskedData, source: Source) -> list[Mistake]:
    reading = _reading(asked, source, min(asked.most or QUERIES_AT_ONCE, QUERIES_AT_ONCE))
    for _ in reading.queries():
        pass
    return reading.mistakes


def read_data(asked: AskedData) -> ReadData:
    """Reads a data set and holds some of it out.

    Queries with the same prompt stay together: what is learnt is never what is tested.

    Raises:
        DataError: it cannot be read, or there is too little; a line for each mistake.
    """
    queries, reading = _read(asked, asked.source)
    remarks = [f"left out without an answer: {reading.empty_text}"] if reading.empty else []
    if asked.held_out_source is None:
        tested, learnt = _split(asked, queries)
        held_out_from = "the same"
    else:
        every, _ = _read(asked, asked.held_out_source)
        tested = _sample(asked, every)
        if len(tested) < len(every):
            count = f"{len(tested):,} of {len(every):,} held-out queries are tested with"
            remarks.append(f"{count}: --held-out takes another number")
        prompts = {_prompt(query) for query in tested}
        learnt = [query for query in queries if _prompt(query) not in prompts]
        held_out_from = source_text(asked.held_out_source)
        if len(learnt) < len(queries):
            same = len(queries) - len(learnt)
            remarks.append(f"{same:,} queries were left out: their prompts are held out")
    if not learnt:
        raise DataError(
            [
                Mistake(
                    "dataset", f"{asked.source.name}: the prompts of all its queries are held out"
                )
            ]
        )
    queries = [*learnt, *(query.model_copy(update={"held_out": True}) for query in tested)]
    facts = LearnData(
        source=source_text(asked.source),
        made_by=_made_by(asked),
        held_out_from=held_out_from,
        tokenizer=asked.tokenizer,
        fingerprint=_fingerprint(asked.tokenizer, queries),
        train_queries=len(learnt),
        held_out_queries=len(tested),
        accuracy="choices" if asked.choices else "exact",
    )
    return ReadData(facts, tuple(queries), tuple(remarks))


def _made_by(asked: AskedData) -> str:
    choices = f", choices {', '.join(asked.choices)}" if asked.choices else ""
    return f"{asked.rendering}{choices}"


def _fingerprint(tokenizer: str, queries: Sequence[LearnQuery]) -> str:
    digest = hashlib.sha256(tokenizer.encode())
    for query in queries:
        digest.update(query.model_dump_json().encode(errors="replace"))
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Answered:
    """Makes queries with answers of examples."""

    rendering: Rendering
    choices: tuple[str, ...]
    part: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.rendering.fields, *self.choices)

    def query(self, example: Example) -> LearnQuery | Mistake | None:
        found = parted(self.rendering, example)
        if isinstance(found, Mistake):
            return found
        if not found.answer.strip():
            return None
        choices: tuple[str, ...] = ()
        answer = found.answer
        if self.choices:
            listed = _choices(example, self.choices)
            if isinstance(listed, Mistake):
                return listed
            choices, names = listed
            right = _right(found.answer, choices, names)
            if right is None:
                text = (
                    f"its answer {found.answer!r} is none of its choices: {columns_text(choices)}"
                )
                return Mistake("dataset", f"{example.place}: {text}")
            answer = choices[right]
        parts = {
            "held_out": False,
            "prompt": found.prompt,
            "answer": answer + found.end,
            "choices": [choice + found.end for choice in choices],
        }
        # Columnar files have dates and the like in their messages; and half a character, which
        # JSON can spell, is in no tokenizer's alphabet.
        said = json.dumps(parts, default=str, ensure_ascii=False)
        return LearnQuery.model_validate_json(said.encode(errors="replace"))


def _choices(
    example: Example, fields: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]] | Mistake:
    """The choices of an example, and their names: where data sets name them, else their places."""
    given: Any = [example.fields.get(field) for field in fields]
    names: Any = None
    if len(fields) == 1:
        given = given[0]
        if isinstance(given, Mapping):  # as many data sets of the hub have it
            given, names = given.get("text"), given.get("label")
    is_list = isinstance(given, list) and all(isinstance(each, str | int | float) for each in given)
    if not is_list or len(given) < 2 or len(set(map(str, given))) < len(given):
        text = f"{', '.join(fields)}: must be a list of different texts, two at least"
        return Mistake("dataset", f"{example.place}: {text}")
    if not isinstance(names, list) or len(names) != len(given):
        names = range(len(given))
    return tuple(map(str, given)), tuple(map(str, names))


def _right(answer: str, choices: Sequence[str], names: Sequence[str]) -> int | None:
    """The place of the choice that an answer is: by its text, else by its name, else its place."""
    places = [str(place) for place in range(len(choices))]
    for known in (choices, names, places):
        if answer in known:
            return list(known).index(answer)
    return None


def _read(asked: AskedData, source: Source) -> tuple[list[LearnQuery], Reading[LearnQuery]]:
    """The queries of a source, and what was seen in reading them."""
    reading = _reading(asked, source, asked.most)
    found = [query for _, query in reading.queries()]
    reading.check(any_left=bool(found))
    return found, reading


def _reading(asked: AskedData, source: Source, most: int | None) -> Reading[LearnQuery]:
    maker = _Answered(asked.rendering, asked.choices, asked.rendering.part)
    return Reading(source, maker, most, dict.fromkeys(asked.choices, "choices"))


def _prompt(query: LearnQuery) -> str:
    return query.prompt if isinstance(query.prompt, str) else json.dumps(query.prompt)


def _split(
    asked: AskedData, queries: Sequence[LearnQuery]
) -> tuple[list[LearnQuery], list[LearnQuery]]:
    """Held-out queries, and the others; those with one prompt are on one side."""
    wanted = _wanted(asked.held_out, len(queries))
    # Without a prompt nothing can be asked, and only the whole of a text tells it from another.
    groups: dict[str, list[LearnQuery]] = {}
    for query in queries:
        groups.setdefault(_prompt(query) or query.answer, []).append(query)
    order = sorted(groups)
    random.Random(f"held out {asked.seed}").shuffle(order)
    tested: list[LearnQuery] = []
    learnt: list[LearnQuery] = []
    for prompt in order:
        (tested if len(tested) < wanted else learnt).extend(groups[prompt])
    if not learnt:
        text = f"{asked.held_out:g}: " if asked.held_out is not None else ""
        raise DataError(
            [
                Mistake(
                    "held_out",
                    f"{text}nothing is left to learn from: {asked.source.name} has {len(queries)} "
                    f"queries with {len(groups)} different prompts",
                )
            ]
        )
    return tested, learnt


def _sample(asked: AskedData, queries: Sequence[LearnQuery]) -> list[LearnQuery]:
    """So many of the queries that are all held out, in their order."""
    wanted = min(MOST_HELD_OUT, len(queries))
    if asked.held_out is not None:
        wanted = min(_wanted(asked.held_out, len(queries)), len(queries))
    if wanted < FEWEST_HELD_OUT:
        assert asked.held_out_source is not None
        text = f"{asked.held_out_source.name}: holds one query to test with: two at least"
        raise DataError([Mistake("held_out_data", text)])
    places = random.Random(f"held out {asked.seed}").sample(range(len(queries)), wanted)
    return [queries[place] for place in sorted(places)]


def _wanted(held_out: float | None, queries: int) -> int:
    if held_out is None:
        held_out = min(HELD_OUT_SHARE, MOST_HELD_OUT / queries)
    return max(round(held_out * queries), FEWEST_HELD_OUT) if held_out < 1 else round(held_out)
