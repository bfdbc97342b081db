"""The data set of ``learn``: examples with prompt, answer and choices, and the held-out split."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.datasets.dataset_reader import EXAMPLES_AT_ONCE, DatasetReader
from orchestrator.datasets.file_formats import columns_text
from orchestrator.datasets.lengths import source_text
from orchestrator.datasets.rendering import Rendering, prompt_and_answer
from orchestrator.datasets.source import DataError, DatasetSource, Example, Mistake
from trials.records.learning import LearnData, LearnExample

MOST_HELD_OUT = 1000  # by default: more hardly narrow an interval, and each costs time every epoch
HELD_OUT_SHARE = 0.1
FEWEST_HELD_OUT = 2  # a standard error needs two


@dataclass(frozen=True, slots=True)
class TrainingDataRequest:
    """Source, rendering and split of a data set.

    Attributes:
        rendering: rendering of an example; its last field or message is the answer.
        choices: fields of possible answers: one with a list of them, or one each.
        held_out: number of held-out examples, or their share below 1; default: a tenth, or all of
            ``held_out_source``, at most ``MOST_HELD_OUT``.
        held_out_source: source of the held-out set; default: split from ``source``.
        most: number of examples to read, the first ones.
    """

    source: DatasetSource
    rendering: Rendering
    tokenizer: str
    choices: tuple[str, ...] = ()
    held_out: float | None = None
    held_out_source: DatasetSource | None = None
    most: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A data set after the split."""

    facts: LearnData
    examples: tuple[LearnExample, ...]
    remarks: tuple[str, ...]


def data_mistakes(request: TrainingDataRequest) -> list[Mistake]:
    """Mistakes in the first examples, for when other mistakes make reading all pointless."""
    mistakes: list[Mistake] = []
    for source in filter(None, (request.source, request.held_out_source)):
        reading = _reading(request, source, min(request.most or EXAMPLES_AT_ONCE, EXAMPLES_AT_ONCE))
        for _ in reading.rendered():
            pass
        mistakes += reading.mistakes
    return mistakes


def read_data(request: TrainingDataRequest) -> TrainingData:
    """Read a data set and split it.

    Examples with the same prompt stay together, so no held-out prompt is trained on.

    Raises:
        DataError: it cannot be read, or is too small; a line for each mistake.
    """
    examples, reading = _read(request, request.source)
    remarks = [f"skipped without an answer: {reading.empty_text}"] if reading.empty else []
    if request.held_out_source is None:
        held_out, train = _split(request, examples)
    else:
        others, _ = _read(request, request.held_out_source)
        held_out = _sample(request, request.held_out_source, others)
        if len(held_out) < len(others):
            count = f"{len(held_out):,} of {len(others):,} held-out examples"
            remarks.append(f"{count} are used: --held-out takes another number")
        prompts = {_prompt(example) for example in held_out}
        train = [example for example in examples if _prompt(example) not in prompts]
        if len(train) < len(examples):
            count = f"{len(examples) - len(train):,} examples"
            remarks.append(f"{count} are excluded from training: their prompts are held out")
    if not train:
        text = f"{request.source.name}: the prompts of all its examples are held out"
        raise DataError([Mistake("dataset", text)])
    both = [*train, *(example.model_copy(update={"held_out": True}) for example in held_out)]
    digest = hashlib.sha256(request.tokenizer.encode())
    for example in both:
        digest.update(example.model_dump_json().encode(errors="replace"))
    parts = (str(request.rendering), ", ".join(request.choices))
    other = request.held_out_source
    facts = LearnData(
        source=source_text(request.source),
        rendering=", choices ".join(filter(None, parts)),
        held_out_from="the same" if other is None else source_text(other),
        tokenizer=request.tokenizer,
        fingerprint=digest.hexdigest()[:16],
        train_examples=len(train),
        held_out_examples=len(held_out),
        accuracy="choices" if request.choices else "exact",
    )
    return TrainingData(facts, tuple(both), tuple(remarks))


@dataclass(frozen=True, slots=True)
class _Answered:
    """Renders examples with their answers."""

    rendering: Rendering
    choices: tuple[str, ...]
    part: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.rendering.fields, *self.choices)

    def render(self, example: Example) -> LearnExample | Mistake | None:
        rendered = prompt_and_answer(self.rendering, example)
        if isinstance(rendered, Mistake):
            return rendered
        if not rendered.answer.strip():
            return None
        answer = rendered.answer
        choices: tuple[str, ...] = ()
        if self.choices:
            listed = _choices(example, self.choices, answer)
            if isinstance(listed, str):
                return Mistake("dataset", f"{example.place}: {listed}")
            answer, choices = listed
        parts = {
            "held_out": False,
            "prompt": rendered.prompt,
            "answer": answer + rendered.end,
            "choices": [choice + rendered.end for choice in choices],
        }
        # Columnar files have dates and the like in their messages; and half a character, which
        # JSON can spell, is in no tokenizer's alphabet.
        text = json.dumps(parts, default=str, ensure_ascii=False)
        return LearnExample.model_validate_json(text.encode(errors="replace"))


def _choices(
    example: Example, fields: tuple[str, ...], answer: str
) -> tuple[str, tuple[str, ...]] | str:
    """The right choice and all choices of an example, or a mistake.

    An answer names its choice by text, by label where the data set has labels, or by index.
    """
    given: Any = [example.fields.get(field) for field in fields]
    labels: Any = None
    if len(fields) == 1:
        given = given[0]
        if isinstance(given, Mapping):  # as many data sets of the hub have it
            given, labels = given.get("text"), given.get("label")
    is_list = isinstance(given, list) and all(isinstance(text, str | int | float) for text in given)
    if not is_list or len(given) < 2 or len(set(map(str, given))) < len(given):
        return f"{', '.join(fields)}: must be a list of at least two different texts"
    choices = tuple(map(str, given))
    indices = [str(index) for index in range(len(choices))]
    if not isinstance(labels, list) or len(labels) != len(choices):
        labels = indices
    for names in (choices, tuple(map(str, labels)), indices):
        if answer in names:
            return choices[names.index(answer)], choices
    return f"its answer {answer!r} is not one of its choices: {columns_text(choices)}"


def _read(
    request: TrainingDataRequest, source: DatasetSource
) -> tuple[list[LearnExample], DatasetReader[LearnExample]]:
    """Examples of a source, and the pass over it."""
    reading = _reading(request, source, request.most)
    examples = [example for _, example in reading.rendered()]
    reading.check(any_left=bool(examples))
    return examples, reading


def _reading(
    request: TrainingDataRequest, source: DatasetSource, most: int | None
) -> DatasetReader[LearnExample]:
    renderer = _Answered(request.rendering, request.choices, request.rendering.part)
    return DatasetReader(source, renderer, most, dict.fromkeys(request.choices, "choices"))


def _prompt(example: LearnExample) -> str:
    return example.prompt if isinstance(example.prompt, str) else json.dumps(example.prompt)


def _split(
    request: TrainingDataRequest, examples: Sequence[LearnExample]
) -> tuple[list[LearnExample], list[LearnExample]]:
    """Held-out and training examples; those with one prompt are on one side."""
    wanted = _wanted(request.held_out, len(examples))
    # Only its answer distinguishes an example without a prompt.
    groups: dict[str, list[LearnExample]] = {}
    for example in examples:
        groups.setdefault(_prompt(example) or example.answer, []).append(example)
    order = sorted(groups)
    random.Random(f"held out {request.seed}").shuffle(order)
    held_out: list[LearnExample] = []
    train: list[LearnExample] = []
    for prompt in order:
        (held_out if len(held_out) < wanted else train).extend(groups[prompt])
    if not train:
        given = f"{request.held_out:g}: " if request.held_out is not None else ""
        text = f"{request.source.name} has {len(examples)} examples with {len(groups)} different"
        raise DataError(
            [Mistake("held_out", f"{given}nothing is left to train on: {text} prompts")]
        )
    return held_out, train


def _sample(
    request: TrainingDataRequest, source: DatasetSource, examples: Sequence[LearnExample]
) -> list[LearnExample]:
    """Random sample of a source that is held out as a whole, in order."""
    wanted = MOST_HELD_OUT if request.held_out is None else _wanted(request.held_out, len(examples))
    if min(wanted, len(examples)) < FEWEST_HELD_OUT:
        text = f"{source.name}: has one example, but at least two are needed"
        raise DataError([Mistake("held_out_data", text)])
    draw = random.Random(f"held out {request.seed}")
    places = draw.sample(range(len(examples)), min(wanted, len(examples)))
    return [examples[place] for place in sorted(places)]


def _wanted(held_out: float | None, examples: int) -> int:
    if held_out is None:
        held_out = min(HELD_OUT_SHARE, MOST_HELD_OUT / examples)
    return max(round(held_out * examples), FEWEST_HELD_OUT) if held_out < 1 else round(held_out)
