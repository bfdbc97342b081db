"""Training data of ``learn``: answers, choices and held-out examples."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import data as made_data
from builders import questions as made_questions
from builders.messages import assert_lines

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
    """A valid template."""
    parsed = parsed_template(text)
    assert isinstance(parsed, Template)
    return parsed


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
    """Prompt, answer and end together are the rendered example that is counted elsewhere."""
    split = prompt_and_answer(rendering, EXAMPLE)
    assert split == PromptAndAnswer(prompt, answer, end)
    assert rendering.render(EXAMPLE) == prompt + answer + end


def test_the_last_message_is_the_answer() -> None:
    """It must be the assistant's."""
    question = {"from": "human", "value": "Why?"}
    reply = {"from": "gpt", "value": "So."}
    split = prompt_and_answer(Chat("chat"), Example("data:1", {"chat": [question, reply]}))
    assert split == PromptAndAnswer(({"role": "user", "content": "Why?"},), "So.")
    wrong = prompt_and_answer(Chat("chat"), Example("data:7", {"chat": [question]}))
    assert isinstance(wrong, Mistake)
    assert wrong.text.startswith("data:7: chat: ")
    assert "assistant" in wrong.text


def request_for(path: Path, rows: list[dict[str, Any]], **fields: Any) -> TrainingDataRequest:
    """Request for a data set that is written first."""
    source = DatasetSource(str(made_data.write_jsonl(path / "data.jsonl", rows)))
    return TrainingDataRequest(source, fields.pop("rendering", FIELDS), tokenizer="tok", **fields)


def sides(examples: tuple[LearnExample, ...]) -> tuple[list[LearnExample], list[LearnExample]]:
    """Training examples and held-out examples."""
    return [q for q in examples if not q.held_out], [q for q in examples if q.held_out]


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    """Repeated prompts stay on one side; the same seed holds out the same ones."""
    rows = made_questions.questions(60) * 3
    data = read_data(request_for(tmp_path, rows))
    train, held_out = sides(data.examples)
    assert (len(train), len(held_out)) == (162, 18)
    assert not {q.prompt for q in train} & {q.prompt for q in held_out}
    assert (data.facts.train_examples, data.facts.held_out_examples) == (162, 18)
    assert read_data(request_for(tmp_path, rows)) == data
    other = read_data(request_for(tmp_path, rows, seed=1))
    assert {q.prompt for q in sides(other.examples)[1]} != {q.prompt for q in held_out}
    assert other.facts.fingerprint != data.facts.fingerprint


@pytest.mark.parametrize(("held_out", "count"), [(0.5, 30), (0.001, 2), (7, 7), (None, 6)])
def test_a_share_or_a_number_is_held_out(
    tmp_path: Path, held_out: float | None, count: int
) -> None:
    """The default is a tenth; at least two are held out, as one gives no error."""
    data = read_data(request_for(tmp_path, made_questions.questions(60), held_out=held_out))
    assert len(sides(data.examples)[1]) == count


def test_prompts_of_a_held_out_data_set_are_excluded_from_training(tmp_path: Path) -> None:
    """The remark counts them."""
    rows = made_questions.questions(60)
    made_data.write_jsonl(tmp_path / "test.jsonl", rows[:20])
    data = read_data(
        request_for(tmp_path, rows, held_out_source=DatasetSource(str(tmp_path / "test.jsonl")))
    )
    train, held_out = sides(data.examples)
    assert (len(train), len(held_out)) == (40, 20)
    (remark,) = data.remarks
    assert remark.startswith("20 examples are excluded")
    few = read_data(
        request_for(
            tmp_path, rows, held_out=5, held_out_source=DatasetSource(str(tmp_path / "test.jsonl"))
        )
    )
    assert [len(side) for side in sides(few.examples)] == [55, 5]
    assert few.remarks[0].startswith("5 of 20 held-out")


@pytest.mark.parametrize(
    ("answer", "choices"),
    [
        ("moo", ["woof", "moo"]),
        (1, ["woof", "moo"]),
        ("1", ["woof", "moo"]),
        ("B", {"text": ["woof", "moo"], "label": ["A", "B"]}),
    ],
)
def test_a_choice_is_given_by_its_text_its_label_or_its_index(
    tmp_path: Path, answer: object, choices: object
) -> None:
    """The choice's text is learned, followed by the end of the template."""
    rows = [{"q": f"{place}?", "a": answer, "c": choices} for place in range(4)]
    rendering = template("{q} {a}.")
    data = read_data(request_for(tmp_path, rows, rendering=rendering, choices=("c",)))
    assert {(q.answer, q.choices) for q in data.examples} == {("moo.", ("woof.", "moo."))}
    assert data.facts.accuracy == "choices"


def test_every_mistake_is_reported_with_its_place(tmp_path: Path) -> None:
    """All mistakes are reported at once."""
    row = {"question": "?", "answer": "moo", "c": ["moo", "woof"]}
    rows = [row, row | {"answer": "meow"}, row | {"c": ["moo"]}, row | {"answer": ["moo"]}]
    with pytest.raises(DataError) as error:
        read_data(request_for(tmp_path, rows, choices=("c",)))
    path = tmp_path / "data.jsonl"
    assert_lines(
        str(error.value),
        (f"{path}:2: ", "'meow'", "moo, woof"),
        (f"{path}:3: c: ", "two different"),
        (f"{path}:4: answer: ", "--chat"),
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"choices": ("sound",)}, "--choices 'sound': no such field in {data}: did you mean"),
        ({"held_out": 60}, "--held-out 60: nothing is left to train on: {data} has 60 examples"),
    ],
)
def test_an_unusable_option_is_an_error_of_one_line(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    """The error names the option."""
    with pytest.raises(DataError) as error:
        read_data(request_for(tmp_path, made_questions.questions(60), **fields))
    assert str(error.value).startswith(said.format(data=tmp_path / "data.jsonl"))
    assert "\n" not in str(error.value)


def test_examples_without_an_answer_are_skipped_and_counted(tmp_path: Path) -> None:
    """A remark gives their number and place."""
    rows = [*made_questions.questions(20), {"question": "?", "answer": " "}]
    data = read_data(request_for(tmp_path, rows))
    assert len(data.examples) == 20
    (remark,) = data.remarks
    assert remark.endswith(f"1 example ({tmp_path}/data.jsonl:21)")


def test_a_lone_surrogate_is_learned_as_a_question_mark(tmp_path: Path) -> None:
    """JSON can contain it; no tokenizer accepts it."""
    rows = [{"question": f"{place} \ud83d?", "answer": "\ud83d!"} for place in range(4)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    data = read_data(TrainingDataRequest(DatasetSource(str(path)), FIELDS, tokenizer="tok"))
    assert {example.answer for example in data.examples} == {"?!"}
