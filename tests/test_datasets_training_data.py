"""What ``learn`` makes of a data set: answers, choices, and examples held out."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import data as made_data
from builders import questions as made_questions

from orchestrator.datasets.rendering import (
    Chat,
    PromptAndAnswer,
    Template,
    TextFields,
    parsed_template,
    prompt_and_answer,
)
from orchestrator.datasets.source import DataError, DatasetSource, Example, Mistake
from orchestrator.datasets.training_data import TrainingDataRequest, read_data
from trials.records.learning import LearnExample

EXAMPLE = Example("data:1", {"question": "Why?", "hint": "", "answer": "So."})
FIELDS = TextFields(("question", "answer"))


def template(text: str) -> Template:
    """One that is right."""
    found = parsed_template(text)
    assert isinstance(found, Template)
    return found


@pytest.mark.parametrize(
    ("rendering", "prompt", "answer", "end"),
    [
        (FIELDS, "Why?\n", "So.", ""),
        (TextFields(("question", "hint", "answer")), "Why?\n", "So.", ""),
        (TextFields(("answer",)), "", "So.", ""),
        (template("Q: {question}\\nA: {answer}"), "Q: Why?\nA: ", "So.", ""),
        (template("{{Q}} {question} [{answer}] end"), "{Q} Why? [", "So.", "] end"),
    ],
)
def test_the_last_field_is_the_answer(
    rendering: TextFields | Template, prompt: str, answer: str, end: str
) -> None:
    """And all of them together are the rendered example whose tokens are counted elsewhere."""
    found = prompt_and_answer(rendering, EXAMPLE)
    assert found == PromptAndAnswer(prompt, answer, end)
    assert rendering.render(EXAMPLE) == prompt + answer + end


def test_the_last_message_is_the_answer() -> None:
    """It must be the assistant's."""
    asked = {"from": "human", "value": "Why?"}
    said = {"from": "gpt", "value": "So."}
    found = prompt_and_answer(Chat("chat"), Example("data:1", {"chat": [asked, said]}))
    assert found == PromptAndAnswer(({"role": "user", "content": "Why?"},), "So.")
    wrong = prompt_and_answer(Chat("chat"), Example("data:7", {"chat": [asked]}))
    assert isinstance(wrong, Mistake)
    assert wrong.text == (
        "data:7: chat: the last message must be the answer: a text of the assistant"
    )


def asked(path: Path, found: list[dict[str, Any]], **fields: Any) -> TrainingDataRequest:
    """Of a file that is written first."""
    source = DatasetSource(str(made_data.write_jsonl(path / "data.jsonl", found)))
    return TrainingDataRequest(source, fields.pop("rendering", FIELDS), tokenizer="tok", **fields)


def sides(examples: tuple[LearnExample, ...]) -> tuple[list[LearnExample], list[LearnExample]]:
    """Those to learn from, and those held out."""
    return [q for q in examples if not q.held_out], [q for q in examples if q.held_out]


def test_what_is_held_out_is_never_learned(tmp_path: Path) -> None:
    """Not even when a prompt is there several times; the same seed holds out the same."""
    rows = made_questions.questions(60) * 3
    found = read_data(asked(tmp_path, rows))
    train, held_out = sides(found.examples)
    assert (len(train), len(held_out)) == (162, 18)
    assert not {q.prompt for q in train} & {q.prompt for q in held_out}
    assert (found.facts.train_examples, found.facts.held_out_examples) == (162, 18)
    assert read_data(asked(tmp_path, rows)) == found
    other = read_data(asked(tmp_path, rows, seed=1))
    assert {q.prompt for q in sides(other.examples)[1]} != {q.prompt for q in held_out}
    assert other.facts.fingerprint != found.facts.fingerprint


@pytest.mark.parametrize(("held_out", "count"), [(0.5, 30), (0.001, 2), (7, 7), (None, 6)])
def test_a_share_or_a_number_is_held_out(
    tmp_path: Path, held_out: float | None, count: int
) -> None:
    """A tenth unless told, and two at least: one tells nothing of noise."""
    found = read_data(asked(tmp_path, made_questions.questions(60), held_out=held_out))
    assert len(sides(found.examples)[1]) == count


def test_other_data_is_held_out_and_left_out_of_what_is_learned(tmp_path: Path) -> None:
    """Prompts that are in both are tested, which is said."""
    rows = made_questions.questions(60)
    made_data.write_jsonl(tmp_path / "test.jsonl", rows[:20])
    found = read_data(
        asked(tmp_path, rows, held_out_source=DatasetSource(str(tmp_path / "test.jsonl")))
    )
    train, held_out = sides(found.examples)
    assert (len(train), len(held_out)) == (40, 20)
    assert found.remarks == ("20 examples are excluded from training: their prompts are held out",)
    few = read_data(
        asked(
            tmp_path, rows, held_out=5, held_out_source=DatasetSource(str(tmp_path / "test.jsonl"))
        )
    )
    assert [len(side) for side in sides(few.examples)] == [55, 5]
    assert few.remarks[0].startswith("5 of 20 held-out examples are used")


@pytest.mark.parametrize(
    ("answer", "choices"),
    [
        ("moo", ["woof", "moo"]),
        (1, ["woof", "moo"]),
        ("1", ["woof", "moo"]),
        ("B", {"text": ["woof", "moo"], "label": ["A", "B"]}),
    ],
)
def test_a_choice_is_told_by_its_text_its_name_or_its_place(
    tmp_path: Path, answer: object, choices: object
) -> None:
    """As data sets have it; the text is what is learned, with what the template has after it."""
    rows = [{"q": f"{place}?", "a": answer, "c": choices} for place in range(4)]
    rendering = template("{q} {a}.")
    found = read_data(asked(tmp_path, rows, rendering=rendering, choices=("c",)))
    assert {(q.answer, q.choices) for q in found.examples} == {("moo.", ("woof.", "moo."))}
    assert found.facts.accuracy == "choices"


def test_every_mistake_is_told_with_its_place(tmp_path: Path) -> None:
    """At once; nothing is learned of the rest."""
    row = {"question": "?", "answer": "moo", "c": ["moo", "woof"]}
    rows = [row, row | {"answer": "meow"}, row | {"c": ["moo"]}, row | {"answer": ["moo"]}]
    with pytest.raises(DataError) as error:
        read_data(asked(tmp_path, rows, choices=("c",)))
    data = tmp_path / "data.jsonl"
    assert str(error.value).split("\n") == [
        f"{data}:2: its answer 'meow' is not one of its choices: moo, woof",
        f"{data}:3: c: must be a list of at least two different texts",
        f"{data}:4: answer: must be text, not a list: use --chat for messages",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"choices": ("sound",)}, "--choices 'sound': no such field in {data}: did you mean"),
        ({"held_out": 60}, "--held-out 60: nothing is left to train on: {data} has 60 examples"),
    ],
)
def test_what_cannot_be_held_out_or_chosen_is_one_line(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    """With the option that asks for it."""
    with pytest.raises(DataError) as error:
        read_data(asked(tmp_path, made_questions.questions(60), **fields))
    assert str(error.value).startswith(said.format(data=tmp_path / "data.jsonl"))
    assert "\n" not in str(error.value)


def test_examples_without_an_answer_are_counted(tmp_path: Path) -> None:
    """And left out."""
    rows = [*made_questions.questions(20), {"question": "?", "answer": " "}]
    found = read_data(asked(tmp_path, rows))
    assert len(found.examples) == 20
    assert found.remarks == (f"skipped without an answer: 1 example ({tmp_path}/data.jsonl:21)",)


def test_half_a_character_is_learned_as_a_question_mark(tmp_path: Path) -> None:
    """JSON can spell it; no tokenizer knows it."""
    rows = [{"question": f"{place} \ud83d?", "answer": "\ud83d!"} for place in range(4)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    found = read_data(TrainingDataRequest(DatasetSource(str(path)), FIELDS, tokenizer="tok"))
    assert {example.answer for example in found.examples} == {"?!"}
