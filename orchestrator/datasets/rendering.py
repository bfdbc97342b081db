"""Rendering of a training example into the text that a model is trained on."""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_catalog.user_file import json_of
from orchestrator.datasets.source import Example, Mistake
from trials.child_process.token_counter import RenderedExample

TOOLS = "tools"
JOINED_BY = "\n"
# ShareGPT's names of roles, by those of chat templates.
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}

CALLS = ("tool_calls", "function_call")
NO_MESSAGE = "role and content (nor from and value)"


@dataclass(frozen=True, slots=True)
class TextFields:
    """Texts of fields, joined by line ends."""

    fields: tuple[str, ...]
    part = "text_fields"

    def render(self, example: Example) -> RenderedExample | Mistake:
        """Rendered text; empty if all fields are empty."""
        texts = texts_of(example, self.fields, self.part)
        return texts if isinstance(texts, Mistake) else JOINED_BY.join(filter(None, texts.values()))

    def __str__(self) -> str:
        return f"fields {', '.join(self.fields)}"


@dataclass(frozen=True, slots=True)
class Template:
    """A text with fields in it: ``Question: {question}``. ``{{`` and ``}}`` are braces.

    Attributes:
        pieces: literal texts, each with the field after it, or None.
    """

    pieces: tuple[tuple[str, str | None], ...]
    part = "template"

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of its fields, each once."""
        return tuple(dict.fromkeys(field for _, field in self.pieces if field is not None))

    def render(self, example: Example) -> RenderedExample | Mistake:
        """Rendered text; empty if all fields are empty."""
        texts = texts_of(example, self.fields, self.part)
        if isinstance(texts, Mistake):
            return texts
        return _filled(self.pieces, texts) if any(texts.values()) else ""

    def __str__(self) -> str:
        pieces = [(text.replace("{", "{{").replace("}", "}}"), name) for text, name in self.pieces]
        return f"template {_filled(pieces, {name: f'{{{name}}}' for name in self.fields})!r}"


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversation, rendered by the tokenizer's chat template.

    Attributes:
        field: field with a list of messages, each with ``role`` and ``content``, or ``from`` and
            ``value``.
        has_tools: whether the field ``tools`` has definitions for the template: a list, or its
            JSON.
    """

    field: str
    has_tools: bool = False
    part = "chat"

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of its fields."""
        return (self.field, *((TOOLS,) if self.has_tools else ()))

    def render(self, example: Example) -> list[Mapping[str, Any]] | Mistake:
        """Messages, behind one that holds the tools, if there are any; empty if the field is."""
        if self.field not in example.fields:
            return absent_field(example, self.field)
        messages = example.fields[self.field]
        if messages is None:
            return []
        if not isinstance(messages, list):
            return wrong_field(
                example, self.field, f"must be a list of messages, not {_kind(messages)}"
            )
        parsed = []
        for number, message in enumerate(map(_message, messages), start=1):
            if isinstance(message, str):
                return wrong_field(example, self.field, f"message {number} has no {message}")
            parsed.append(message)
        tools = example.fields.get(TOOLS) if self.has_tools and parsed else None
        try:
            tools = json_of(tools) if isinstance(tools, str) and tools else tools
        except ValueError:
            return wrong_field(example, TOOLS, "must be a list of tools, or its JSON")
        return [{TOOLS: tools}, *parsed] if tools else parsed

    def __str__(self) -> str:
        return f"chat template on {', '.join(self.fields)}"


Rendering = TextFields | Template | Chat


@dataclass(frozen=True, slots=True)
class PromptAndAnswer:
    """A rendered example, split into prompt and answer.

    Attributes:
        answer: last field, or content of the last message.
        end: text of a template after the answer.
    """

    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str
    end: str = ""


def prompt_and_answer(rendering: Rendering, example: Example) -> PromptAndAnswer | Mistake:
    """Render an example; its answer is the last field of the rendering, or the last message.

    Without a field before it the prompt is empty, and all of the example is the answer.
    """
    if isinstance(rendering, Chat):
        return _chat_prompt_and_answer(rendering, example)
    texts = texts_of(example, rendering.fields, rendering.part)
    if isinstance(texts, Mistake):
        return texts
    if isinstance(rendering, TextFields):
        *before, last = rendering.fields
        prompts = [texts[field] for field in before if texts[field]]
        return PromptAndAnswer("".join(f"{text}{JOINED_BY}" for text in prompts), texts[last])
    at = max(place for place, (_, field) in enumerate(rendering.pieces) if field is not None)
    literal, field = rendering.pieces[at]
    assert field is not None  # the last one that is
    prompt = _filled(rendering.pieces[:at], texts) + literal
    return PromptAndAnswer(prompt, texts[field], _filled(rendering.pieces[at + 1 :], texts))


def _chat_prompt_and_answer(rendering: Chat, example: Example) -> PromptAndAnswer | Mistake:
    messages = rendering.render(example)
    if isinstance(messages, Mistake):
        return messages
    if not messages:
        return PromptAndAnswer((), "")
    *before, last = messages
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        text = "the last message must be the answer: a text of the assistant"
        return wrong_field(example, rendering.field, text)
    return PromptAndAnswer(tuple(before), last["content"])


def _filled(pieces: Iterable[tuple[str, str | None]], texts: Mapping[str, str]) -> str:
    return "".join(literal + ("" if field is None else texts[field]) for literal, field in pieces)


def parsed_template(text: str) -> Template | list[Mistake]:
    r"""Parse a template; ``\n`` and ``\t`` in it mean a line end and a tab."""
    written = text.replace("\\n", "\n").replace("\\t", "\t")
    label = repr(text)
    try:
        parts = list(string.Formatter().parse(written))
    except ValueError as error:
        return [Mistake("template", f"{label}: {error}: write a literal brace as {{{{ or }}}}")]
    mistakes = [
        Mistake(
            "template",
            f"{label}: {{{field}{'!' + conversion if conversion else ''}"
            f"{':' + spec if spec else ''}}} is not the name of a field in braces",
        )
        for _, field, spec, conversion in parts
        if field is not None and (spec or conversion or not field.strip())
    ]
    template = Template(tuple((literal, field) for literal, field, _, _ in parts))
    if not mistakes and not template.fields:
        text = f"{label}: has no field: write fields in braces, as in {{question}}"
        return [Mistake("template", text)]
    return mistakes or template


def texts_of(example: Example, fields: Sequence[str], part: str) -> dict[str, str] | Mistake:
    """Texts of fields by name, or the mistake of the option ``part`` in one of them."""
    texts = {}
    for field in fields:
        if field not in example.fields:
            return absent_field(example, field)
        value = example.fields[field]
        if isinstance(value, list | dict | bytes):
            hint = "use --chat for messages" if part == "text_fields" else "choose a field of text"
            return wrong_field(example, field, f"must be text, not {_kind(value)}: {hint}")
        texts[field] = "" if value is None else str(value)
    return texts


def absent_field(example: Example, field: str) -> Mistake:
    """Mistake of an example without a field."""
    text = f"has no field {field!r} (it has {', '.join(example.fields) or 'none'})"
    remedy = "add it to the example, or remove it from the rendering"
    return Mistake("dataset", f"{example.place}: {text}: {remedy}")


def wrong_field(example: Example, field: str, text: str) -> Mistake:
    """Mistake in a field of an example."""
    return Mistake("dataset", f"{example.place}: {field}: {text}")


def _kind(value: object) -> str:
    for kind, name in ((list, "a list"), (dict, "an object"), (bytes, "bytes"), (str, "text")):
        if isinstance(value, kind):
            return name
    return repr(value)[:40]


def _message(message: object) -> Mapping[str, Any] | str:
    """Message for a chat template, or the text of what it lacks."""
    if not isinstance(message, dict):
        return NO_MESSAGE
    names = ("role", "content") if "role" in message else ("from", "value")
    role, content = (message.get(name) for name in names)
    if not isinstance(role, str):
        return NO_MESSAGE
    # An assistant that calls a tool may have no content.
    if content is None and not any(message.get(call) for call in CALLS):
        return f"{names[1]}: fill it in, or remove the example"
    return message if "role" in message else {"role": ROLES.get(role, role), "content": content}
