"""How a training example becomes the text that a model is trained on."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.datasets.source import Example, Mistake
from trials.child_process.token_counter import RenderedExample

JOINED_BY = "\n"
# Conversations of ShareGPT say it so; templates know the others.
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}

CALLS = ("tool_calls", "function_call")
NO_MESSAGE = "role and content (nor from and value)"


@dataclass(frozen=True, slots=True)
class TextFields:
    """The texts of some fields, a line end between them.

    Attributes:
        fields: their names, in order.
    """

    fields: tuple[str, ...]
    part = "text_fields"

    def render(self, example: Example) -> RenderedExample | Mistake:
        """The text; empty where all fields are."""
        texts = _texts(example, self.fields, self.part)
        return texts if isinstance(texts, Mistake) else JOINED_BY.join(filter(None, texts.values()))

    def __str__(self) -> str:
        return f"fields {', '.join(self.fields)}"


@dataclass(frozen=True, slots=True)
class Template:
    """A text with fields in it: ``Question: {question}``. ``{{`` and ``}}`` are braces.

    Attributes:
        pieces: what is written, and the field after it, if any.
    """

    pieces: tuple[tuple[str, str | None], ...]
    part = "template"

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        return tuple(dict.fromkeys(field for _, field in self.pieces if field is not None))

    def render(self, example: Example) -> RenderedExample | Mistake:
        """The text; empty where all fields are."""
        texts = _texts(example, self.fields, self.part)
        if isinstance(texts, Mistake):
            return texts
        if not any(texts.values()):
            return ""
        return "".join(
            said + ("" if field is None else texts[field]) for said, field in self.pieces
        )

    def __str__(self) -> str:
        escaped = (
            (said.replace("{", "{{").replace("}", "}}"), field) for said, field in self.pieces
        )
        return "template " + repr(
            "".join(said + ("" if field is None else f"{{{field}}}") for said, field in escaped)
        )


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, as the tokenizer's chat template writes it.

    Attributes:
        field: a list of messages, each with ``role`` and ``content``, or ``from`` and ``value``.
    """

    field: str
    part = "chat"

    @property
    def fields(self) -> tuple[str, ...]:
        """The name of its field."""
        return (self.field,)

    def render(self, example: Example) -> RenderedExample | Mistake:
        """The messages; none of them where the field is empty."""
        if self.field not in example.fields:
            return _absent(example, self.field)
        messages = example.fields[self.field]
        if messages is None:
            return []
        if not isinstance(messages, list):
            return _wrong(example, self.field, f"must be a list of messages, not {_kind(messages)}")
        found = [_message(message) for message in messages]
        for number, message in enumerate(found, start=1):
            if isinstance(message, str):
                return _wrong(example, self.field, f"message {number} has no {message}")
        return [message for message in found if not isinstance(message, str)]

    def __str__(self) -> str:
        return f"chat template on {self.field}"


Rendering = TextFields | Template | Chat


@dataclass(frozen=True, slots=True)
class Parted:
    """A rendered example in its parts.

    Attributes:
        prompt: what stands before the answer: a text, or messages.
        answer: its last field, or the content of the last message.
        end: what a template has after it.
    """

    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str
    end: str = ""


def parted(rendering: Rendering, example: Example) -> Parted | Mistake:
    """A rendered example whose answer is the last field that it names, or the last message.

    Without a field before it the prompt is empty, and all of the example is the answer.
    """
    if isinstance(rendering, Chat):
        return _parted_chat(rendering, example)
    texts = _texts(example, rendering.fields, rendering.part)
    if isinstance(texts, Mistake):
        return texts
    if isinstance(rendering, TextFields):
        *before, last = rendering.fields
        prompts = [texts[field] for field in before if texts[field]]
        return Parted("".join(f"{text}{JOINED_BY}" for text in prompts), texts[last])
    at = max(place for place, (_, field) in enumerate(rendering.pieces) if field is not None)
    prompt = "".join(
        said + ("" if field is None else texts[field]) for said, field in rendering.pieces[:at]
    )
    said, field = rendering.pieces[at]
    assert field is not None  # the last one that is
    return Parted(
        prompt + said, texts[field], "".join(end for end, _ in rendering.pieces[at + 1 :])
    )


def _parted_chat(rendering: Chat, example: Example) -> Parted | Mistake:
    messages = rendering.render(example)
    if isinstance(messages, str | Mistake):
        return Parted("", messages) if isinstance(messages, str) else messages
    if not messages:
        return Parted((), "")
    *before, last = messages
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        return _wrong(
            example,
            rendering.field,
            "the last message must be the answer, and is no assistant's text",
        )
    return Parted(tuple(before), last["content"])


def parsed_template(text: str) -> Template | list[Mistake]:
    r"""A template from its text, in which ``\n`` and ``\t`` are a line end and a tab, too."""
    written = text.replace("\\n", "\n").replace("\\t", "\t")
    label = repr(text)
    try:
        parts = list(string.Formatter().parse(written))
    except ValueError as error:
        return [Mistake("template", f"{label}: {error}: a brace itself is written {{{{ or }}}}")]
    mistakes = [
        Mistake(
            "template",
            f"{label}: {{{field}{'!' + conversion if conversion else ''}"
            f"{':' + spec if spec else ''}}} is not the name of a field in braces",
        )
        for _, field, spec, conversion in parts
        if field is not None and (spec or conversion or not field.strip())
    ]
    template = Template(tuple((said, field) for said, field, _, _ in parts))
    if not mistakes and not template.fields:
        mistakes = [
            Mistake(
                "template", f"{label}: names no field: write them in braces, as in {{question}}"
            )
        ]
    return mistakes or template


def _texts(example: Example, fields: Sequence[str], part: str) -> dict[str, str] | Mistake:
    found = {}
    for field in fields:
        if field not in example.fields:
            return _absent(example, field)
        value = example.fields[field]
        if isinstance(value, list | dict | bytes):
            hint = "--chat is for messages" if part == "text_fields" else "name a field of text"
            return _wrong(example, field, f"must be text, not {_kind(value)}: {hint}")
        found[field] = "" if value is None else str(value)
    return found


def _absent(example: Example, field: str) -> Mistake:
    there = ", ".join(example.fields) or "none"
    text = f"{example.place}: has no field {field!r} (it has {there}): add it, or leave it out"
    return Mistake("dataset", text)


def _wrong(example: Example, field: str, text: str) -> Mistake:
    return Mistake("dataset", f"{example.place}: {field}: {text}")


def _kind(value: object) -> str:
    for kind, name in ((list, "a list"), (dict, "an object"), (bytes, "bytes"), (str, "text")):
        if isinstance(value, kind):
            return name
    return repr(value)[:40]


def _message(message: object) -> Mapping[str, Any] | str:
    """As chat templates take it; what it lacks where it is no message."""
    if not isinstance(message, dict):
        return NO_MESSAGE
    names = ("role", "content") if "role" in message else ("from", "value")
    role, said = (message.get(name) for name in names)
    if not isinstance(role, str):
        return NO_MESSAGE
    # An assistant that calls a tool need not say anything.
    if said is None and not any(message.get(call) for call in CALLS):
        return f"{names[1]}: fill it in, or leave the example out"
    return message if "role" in message else {"role": ROLES.get(role, role), "content": said}
