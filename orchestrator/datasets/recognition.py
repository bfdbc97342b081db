"""Renderings that are recognised by the columns of a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.datasets.dataset_reader import MOST_MISTAKES
from orchestrator.datasets.examples import examples
from orchestrator.datasets.file_formats import wrong
from orchestrator.datasets.preference import (
    COLUMNS,
    INPUT,
    INSTRUCTION,
    MESSAGES,
    Preference,
    is_pair,
    preference_in,
)
from orchestrator.datasets.rendering import TOOLS, Chat, Rendering, Template, TextFields, texts_of
from orchestrator.datasets.source import DataError, DatasetSource, Example, Mistake
from trials.child_process.token_counter import RenderedExample

OUTPUT = "output"
PROMPT, COMPLETION, TEXT = "prompt", "completion", "text"
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n{output}"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}"
)
READ = (*MESSAGES, *COLUMNS, INSTRUCTION, INPUT, OUTPUT, TEXT, TOOLS)


@dataclass(frozen=True, slots=True)
class Alpaca:
    """An instruction with its output, in the prompt that Alpaca was trained with."""

    has_input: bool
    part = "dataset"

    @property
    def fields(self) -> Sequence[str]:
        """Columns that it reads."""
        return (INSTRUCTION, INPUT, OUTPUT) if self.has_input else (INSTRUCTION, OUTPUT)

    def render(self, example: Example) -> RenderedExample | Mistake:
        """Rendered text; empty if all columns are empty."""
        texts = texts_of(example, self.fields, self.part)
        if isinstance(texts, Mistake) or not any(texts.values()):
            return texts if isinstance(texts, Mistake) else ""
        return (WITH_INPUT if texts.get(INPUT) else WITHOUT_INPUT).format(**texts)

    def __str__(self) -> str:
        return "Alpaca's prompt"


@dataclass(frozen=True, slots=True)
class MessagePair:
    """Messages of a prompt and of its completion, in the chat template one after the other."""

    fields = (PROMPT, COMPLETION)
    part = "dataset"

    def render(self, example: Example) -> RenderedExample | Mistake:
        """All messages."""
        messages = []
        for field in self.fields:
            part = Chat(field).render(example)
            if isinstance(part, Mistake):
                return part
            messages += part
        return messages

    def __str__(self) -> str:
        return "chat template on prompt, completion"


@dataclass(frozen=True, slots=True)
class Recognised:
    """A rendering that was recognised by columns.

    Attributes:
        name: name of the format.
    """

    name: str
    rendering: Rendering | Alpaca | MessagePair
    part = "dataset"

    @property
    def fields(self) -> Sequence[str]:
        """Columns that it reads."""
        return self.rendering.fields

    @property
    def is_chat(self) -> bool:
        """Whether the chat template renders it."""
        return isinstance(self.rendering, Chat | MessagePair)

    def render(self, example: Example) -> RenderedExample | Mistake:
        """Rendered text or messages."""
        return self.rendering.render(example)

    def __str__(self) -> str:
        return f"read as {self.name}: {self.rendering}"


def first_fields(source: DatasetSource) -> Mapping[str, object]:
    """Fields of the first example that can be read.

    Raises:
        DataError: there is nothing to read, or no example can be read.
    """
    mistakes = []
    for entry in examples(source, READ):
        if isinstance(entry, Example):
            return entry.fields
        mistakes.append(entry)
        if len(mistakes) == MOST_MISTAKES:
            break
    raise DataError(mistakes) if mistakes else wrong(f"{source.name}: holds no examples")


def recognised(source: DatasetSource) -> Recognised | Preference | None:
    """Format by the columns of the first example; None where it is none of those known.

    Raises:
        DataError: there is nothing to read, or no example can be read.
    """
    first = first_fields(source)
    preference = preference_in(first)
    if preference is not None or is_pair(first):
        return preference
    for name in MESSAGES:
        messages = first.get(name)
        if isinstance(messages, list):
            is_sharegpt = bool(messages) and isinstance(messages[0], dict) and "from" in messages[0]
            return Recognised(
                "ShareGPT" if is_sharegpt else "OpenAI messages", Chat(name, TOOLS in first)
            )
    if {INSTRUCTION, OUTPUT} <= first.keys():
        return Recognised("Alpaca", Alpaca(INPUT in first))
    if {PROMPT, COMPLETION} <= first.keys():
        pair = Template((("", PROMPT), ("", COMPLETION)))
        is_chat = isinstance(first[PROMPT], list)
        return Recognised("prompt and completion", MessagePair() if is_chat else pair)
    if TEXT in first:
        return Recognised("plain text", TextFields((TEXT,)))
    return None
