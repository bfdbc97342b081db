"""Training and held-out examples as a model takes them: token ids, labels and padded batches."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from trials.models.fused_head import IGNORED
from trials.records.learning import LearnExample
from trials.training.tokenizer_worker import ExampleTokenizer

PAD = 0  # any id will do: padding comes last and has no label


class ExamplesError(ValueError):
    """Examples that cannot be trained on or evaluated; one line on why."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt with one answer.

    Attributes:
        ids: token ids of both.
        first: index of the first token of the answer.
    """

    ids: list[int]
    first: int

    @property
    def answer_tokens(self) -> int:
        """Number of answer tokens with a token before them to predict them from."""
        return len(self.ids) - max(self.first, 1)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out example.

    Attributes:
        answers: every choice; without choices, the right answer alone.
        right: index of the right answer.
    """

    answers: tuple[Encoded, ...]
    right: int


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples of a data set, encoded.

    Attributes:
        cut_off: number of training examples that were truncated.
        left_out: number of examples that the cutoff leaves without a usable answer.
    """

    train: list[Encoded]
    held_out: list[HeldOut]
    cut_off: int
    left_out: int

    @property
    def sequences(self) -> Iterator[Encoded]:
        """Every sequence the model will be given."""
        return itertools.chain(self.train, *(example.answers for example in self.held_out))


def read_examples(
    path: Path, tokenizer: ExampleTokenizer, cutoff: int, vocab_size: int
) -> Examples:
    """Encode the examples of a file.

    Args:
        path: JSONL file of ``LearnExample``.
        tokenizer: tokenizer of the model.
        cutoff: maximum tokens; longer training examples are truncated, held-out ones skipped.
        vocab_size: vocabulary size of the model.

    Raises:
        ExamplesError: no example is left, or the vocabulary does not match the tokenizer.
    """
    with path.open(encoding="utf-8") as lines:
        given = [LearnExample.model_validate_json(line) for line in lines]
    encoded = Examples([], [], 0, 0)
    cut_off = left_out = 0
    for example, answers in zip(given, _encoded(given, tokenizer), strict=True):
        right = example.choices.index(example.answer) if example.choices else 0
        cut = replace(answers[right], ids=answers[right].ids[:cutoff])
        if example.held_out and all(
            len(answer.ids) <= cutoff and answer.answer_tokens > 0 for answer in answers
        ):
            encoded.held_out.append(HeldOut(answers, right))
        elif not example.held_out and cut.answer_tokens > 0:
            cut_off += len(answers[right].ids) > cutoff
            encoded.train.append(cut)
        else:
            left_out += 1
    for name, kept in (("training", encoded.train), ("held-out", encoded.held_out)):
        if not kept:
            raise ExamplesError(
                f"no {name} example has its answer within {cutoff} tokens: give a larger --cutoff"
            )
    last = max(max(sequence.ids) for sequence in encoded.sequences)
    if last >= vocab_size:
        raise ExamplesError(
            f"the tokenizer has a token {last}, the model knows {vocab_size}: give the model's own "
            "as --tokenizer"
        )
    return replace(encoded, cut_off=cut_off, left_out=left_out)


def _encoded(
    examples: Sequence[LearnExample], tokenizer: ExampleTokenizer
) -> Iterator[tuple[Encoded, ...]]:
    """Encode the answers of each example, each with its prompt before it."""
    answers = [example.choices or (example.answer,) for example in examples]
    whole = not any(example.conversation for example in examples)
    prompts = tokenizer.encoded(
        [_text(example, None, tokenizer) for example in examples], whole=whole
    )
    texts = [
        _text(example, answer, tokenizer)
        for example, choices in zip(examples, answers, strict=True)
        for answer in choices
    ]
    ids = iter(tokenizer.encoded(texts, whole=whole))
    for choices, prompt in zip(answers, prompts, strict=True):
        yield tuple(
            Encoded(text, _common_prefix(prompt, text))
            for text in itertools.islice(ids, len(choices))
        )


def _text(example: LearnExample, answer: str | None, tokenizer: ExampleTokenizer) -> str:
    """Text of the prompt, with an answer after it if one is given."""
    if example.conversation is None:
        return f"{example.prompt}{answer or ''}"
    if answer is None:
        return tokenizer.written(example.conversation, is_to_answer=True)
    message = {"role": "assistant", "content": answer}
    return tokenizer.written([*example.conversation, message])


def _common_prefix(prompt: Sequence[int], text: Sequence[int]) -> int:
    """Length of the common prefix: a token astride prompt and answer belongs to the answer."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
    return sum(1 for _ in same)


def padded(batch: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a batch to its longest sequence, on the right, where no causal model looks.

    Returns:
        (batch, length) ids; (batch, length) labels: ids of answers, ``IGNORED`` elsewhere.
    """
    ids = [torch.tensor(sequence.ids) for sequence in batch]
    labels = [
        torch.tensor([IGNORED] * sequence.first + sequence.ids[sequence.first :])
        for sequence in batch
    ]
    return (
        pad_sequence(ids, batch_first=True, padding_value=PAD),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    )
