"""Queries as a model is given them: ids, where the answer begins, and batches of them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trials.learning import LearnQuery
from trials.models.tokenizer import QueryTokenizer

IGNORED = -100  # the label of what is not learnt: transformers' own
PAD = 0  # any id would do: what comes after a query changes nothing in it, and has no label
CHUNK = 1000  # queries encoded at once


class QueriesError(ValueError):
    """Queries that nothing can be learnt from, or tested on; one line on why."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt and one answer.

    Attributes:
        ids: of both.
        first: place of the first id of the answer.
    """

    ids: list[int]
    first: int

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer that a model can be asked for: the first of all has none before."""
        return len(self.ids) - max(self.first, 1)

    def cut(self, cutoff: int) -> "Encoded":
        """The first tokens of it."""
        return Encoded(self.ids[:cutoff], self.first)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A query to test with.

    Attributes:
        answers: the right one and its rivals; the right one alone where any may be given.
        right: place of the right one.
    """

    answers: tuple[Encoded, ...]
    right: int


@dataclass(frozen=True, slots=True)
class Queries:
    """What to learn from and test with.

    Attributes:
        train, held_out: the queries.
        cut_off: of those to learn from, how many were cut.
        left_out: how many have no answer left, or are held out and too long.
    """

    train: tuple[Encoded, ...]
    held_out: tuple[HeldOut, ...]
    cut_off: int
    left_out: int

    @property
    def all(self) -> Iterator[Encoded]:
        """Every sequence a model will be given."""
        tested = (answer for query in self.held_out for answer in query.answers)
        return itertools.chain(self.train, tested)

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(len(each.ids) for each in self.all)


def read_queries(path: Path, tokenizer: QueryTokenizer, cutoff: int, vocab_size: int) -> Queries:
    """Encodes the queries of a file, a ``LearnQuery`` a line.

    Args:
        path: the file.
        tokenizer: the model's.
        cutoff: longer ones are cut off there; held-out ones are left out.
        vocab_size: tokens the model knows.

    Raises:
        QueriesError: nothing is left, or the tokenizer is another model's.
    """
    train: list[Encoded] = []
    held_out: list[HeldOut] = []
    cut_off = left_out = 0
    for query, answers in _of_file(path, tokenizer):
        right = _right(query)
        if query.held_out and all(
            len(each.ids) <= cutoff and each.answer_tokens > 0 for each in answers
        ):
            held_out.append(HeldOut(answers, right))
        elif not query.held_out and (cut := answers[right].cut(cutoff)).answer_tokens > 0:
            cut_off += len(answers[right].ids) > cutoff
            train.append(cut)
        else:
            left_out += 1
    for name, found in (("to learn from", len(train)), ("held out", len(held_out))):
        if not found:
            raise QueriesError(
                f"no query {name} has its answer within {cutoff} tokens: give a larger --cutoff"
            )
    queries = Queries(tuple(train), tuple(held_out), cut_off, left_out)
    last = max(max(each.ids) for each in queries.all)
    if last >= vocab_size:
        raise QueriesError(
            f"the tokenizer has a token {last}, the model knows {vocab_size}: give the model's own "
            "as --tokenizer"
        )
    return queries


def _of_file(
    path: Path, tokenizer: QueryTokenizer
) -> Iterator[tuple[LearnQuery, tuple[Encoded, ...]]]:
    """Each query with its answers."""
    with path.open(encoding="utf-8") as lines:
        while chunk := list(itertools.islice(lines, CHUNK)):
            queries = [LearnQuery.model_validate_json(line) for line in chunk]
            yield from zip(queries, _encoded(queries, tokenizer), strict=True)


def _right(query: LearnQuery) -> int:
    return query.choices.index(query.answer) if query.choices else 0


def _encoded(
    queries: Sequence[LearnQuery], tokenizer: QueryTokenizer
) -> Iterator[tuple[Encoded, ...]]:
    """The answers of each query, with its prompt before them."""
    answers = [query.choices or (query.answer,) for query in queries]
    whole = not any(query.conversation for query in queries)
    prompts = [_prompt(query, tokenizer) for query in queries]
    texts = [
        _text(query, answer, tokenizer)
        for query, own in zip(queries, answers, strict=True)
        for answer in own
    ]
    ids = iter(tokenizer.encoded(texts, whole=whole))
    for own, before in zip(answers, tokenizer.encoded(prompts, whole=whole), strict=True):
        yield tuple(
            Encoded(each, _shared(before, each)) for each in itertools.islice(ids, len(own))
        )


def _prompt(query: LearnQuery, tokenizer: QueryTokenizer) -> str:
    if query.conversation is None:
        return str(query.prompt)
    return tokenizer.written(query.conversation, is_to_answer=True)


def _text(query: LearnQuery, answer: str, tokenizer: QueryTokenizer) -> str:
    if query.conversation is None:
        return f"{query.prompt}{answer}"
    said = {"role": "assistant", "content": answer}
    return tokenizer.written([*query.conversation, said])


def _shared(before: Sequence[int], after: Sequence[int]) -> int:
    """Ids with which both begin: a token on both sides of where the answer begins is its own."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(before), len(after)))


def padded(batch: Sequence[Encoded], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as long as its longest query.

    Padding comes last, where no causal model sees it from within a query, and has no label.

    Returns:
        (batch, length) ids, and labels: the ids of answers, ``IGNORED`` elsewhere.
    """
    length = max(len(each.ids) for each in batch)
    ids = torch.full((len(batch), length), PAD)
    labels = torch.full((len(batch), length), IGNORED)
    for row, each in enumerate(batch):
        ids[row, : len(each.ids)] = torch.tensor(each.ids)
        labels[row, each.first : len(each.ids)] = ids[row, each.first : len(each.ids)]
    return ids.to(device), labels.to(device)
