"""Preference data: pairs of answers, and labelled answers, in columns of TRL or of Alpaca."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from orchestrator.datasets.rendering import JOINED_BY, Chat, absent_field, texts_of, wrong_field
from orchestrator.datasets.source import Example, Mistake
from trials.child_process.token_counter import RenderedExample

Kind = Literal["texts", "pairs", "labelled"]
PROMPT = "prompt"
INSTRUCTION, INPUT = "instruction", "input"
LABEL = "label"
ANSWERS = {"pairs": ("chosen", "rejected"), "labelled": ("completion",)}
LABELS = ("true", "false", "1", "0")  # CSV has no booleans
MESSAGES = ("messages", "conversations", "conversation")
"""Columns of conversations: OpenAI's, then ShareGPT's."""
COLUMNS = (PROMPT, *ANSWERS["pairs"], *ANSWERS["labelled"], LABEL)


class Pair(NamedTuple):
    """Rendered sequences of a pair, each with the prompt."""

    chosen: RenderedExample
    rejected: RenderedExample


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference data, rendered as TRL's trainers do: the prompt directly before each answer.

    Attributes:
        kind: pairs of a chosen and a rejected answer (DPO, ORPO, reward models), or single answers
            with a label (KTO).
        prompts: columns of the prompt, whose texts line ends join; without any, both answers of a
            pair begin with it.
        is_chat: whether the columns hold messages for the chat template, instead of texts.
    """

    kind: Literal["pairs", "labelled"]
    prompts: tuple[str, ...]
    is_chat: bool
    part = "dataset"

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns that it reads."""
        label = (LABEL,) if self.kind == "labelled" else ()
        return (*self._texts, *label)

    def render(self, example: Example) -> RenderedExample | Pair | Mistake:
        """Rendered sequences; an empty text if all columns of text are empty."""
        parts = self._parts(example)
        if isinstance(parts, Mistake):
            return parts
        if not any(map(_has_text, parts.values())):
            return ""
        mistake = self._mistake(example, parts)
        if mistake is not None:
            return mistake
        sequences = [self._sequence(parts, answer) for answer in ANSWERS[self.kind]]
        return Pair(*sequences) if self.kind == "pairs" else sequences[0]

    def __str__(self) -> str:
        template = " in the chat template" if self.is_chat else ""
        return f"{self.kind}: {', '.join(self.fields)}{template}"

    @property
    def _texts(self) -> tuple[str, ...]:
        return (*self.prompts, *ANSWERS[self.kind])

    def _parts(self, example: Example) -> dict[str, RenderedExample] | Mistake:
        """Columns of text or messages, by name."""
        parts: dict[str, RenderedExample] = {}
        for field in self._texts:
            if self.is_chat:
                part = Chat(field).render(example)
                if isinstance(part, Mistake):
                    return part
                parts[field] = part
            else:
                texts = texts_of(example, (field,), self.part)
                if isinstance(texts, Mistake):
                    return texts
                parts |= texts
        return parts

    def _sequence(self, parts: Mapping[str, RenderedExample], answer: str) -> RenderedExample:
        """An answer directly after the prompt."""
        prompts = [parts[name] for name in self.prompts if parts[name]]
        if not self.is_chat:
            return f"{JOINED_BY.join(map(str, prompts))}{parts[answer]}"
        messages: list[Mapping[str, Any]] = []
        for part in (*prompts, parts[answer]):
            messages += [] if isinstance(part, str) else part
        return messages

    def _mistake(self, example: Example, parts: dict[str, RenderedExample]) -> Mistake | None:
        for answer in ANSWERS[self.kind]:
            if not _has_text(parts[answer]):
                return wrong_field(example, answer, "is empty: fill it in, or remove the example")
        if self.kind == "pairs":
            return None
        if LABEL not in example.fields:
            return absent_field(example, LABEL)
        label = example.fields[LABEL]
        if str(label).casefold() not in LABELS:
            return wrong_field(example, LABEL, f"must be true or false, not {label!r}")
        return None


def preference_in(first: Mapping[str, object]) -> Preference | None:
    """Preference data by the columns of the first example; None for other data.

    Answers beside a conversation lack what comes before them, and are no pairs by themselves.
    """
    is_chat = any(isinstance(first.get(name), list) for name in COLUMNS)
    if is_pair(first):
        prompts = (PROMPT,) if PROMPT in first else (INSTRUCTION, INPUT)
        stated = tuple(name for name in prompts if name in first)
        if not stated and any(name in first for name in MESSAGES):
            return None
        return Preference("pairs", stated, is_chat)
    if first.keys() >= {PROMPT, *ANSWERS["labelled"], LABEL}:
        return Preference("labelled", (PROMPT,), is_chat)
    return None


def is_pair(first: Mapping[str, object]) -> bool:
    """Whether an example has two answers."""
    return first.keys() >= {*ANSWERS["pairs"]}


def _has_text(part: RenderedExample) -> bool:
    return bool(part.strip() if isinstance(part, str) else part)
