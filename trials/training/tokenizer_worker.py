"""Child process that counts tokens: a line of JSON per request, a line per reply.

The first line names the tokenizer, the others hold texts or conversations. It is a process of its
own because transformers imports torch, which no other code for data sets needs.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trials.child_process.parent_death import die_with_parent
from trials.child_process.token_counter import TokenCounts, TokenizerError
from trials.records.learning import Conversation

MOST_CHARACTERS = 200  # length of an error
TEMPLATE_SECONDS = 10.0  # of CPU time, for one conversation: real templates take milliseconds
MOST_REFUSALS = 20  # per chunk, so that a reply fits into a pipe that nobody reads yet


class TemplateTimeoutError(RuntimeError):
    """A chat template does not end within the limit."""


class ExampleTokenizer:
    """A model's tokenizer, applied to whole examples.

    Args:
        name: a folder, a tokenizer.json, or a hub name.

    Raises:
        TokenizerError: the tokenizer cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self._tokenizer = _loaded(name)
        self._endless: TemplateTimeoutError | None = None
        if self._tokenizer.is_fast:
            # A saved tokenizer may truncate and pad, which would change the counts.
            self._tokenizer.backend_tokenizer.no_truncation()
            self._tokenizer.backend_tokenizer.no_padding()

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer.chat_template is not None

    @property
    def fingerprint(self) -> str:
        """Fingerprint shared by all tokenizers with equal counts."""
        if self._tokenizer.is_fast:
            state = self._tokenizer.backend_tokenizer.to_str()
        else:
            state = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        parts = (state, self._tokenizer.chat_template, self._tokenizer.eos_token)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def counted(self, texts: Sequence[str]) -> TokenCounts:
        """Count tokens per text, with special tokens and one for the end, as trainers add them."""
        return TokenCounts(tokens=self._lengths(texts, whole=True), refused={})

    def chats_counted(self, conversations: Sequence[Conversation]) -> TokenCounts:
        """Count tokens per conversation as the chat template renders it."""
        written = [self._tried(conversation) for conversation in conversations]
        texts = [text for text in written if isinstance(text, str)]
        lengths = iter(self._lengths(texts, whole=False))
        refused = {at: _first_line(e) for at, e in enumerate(written) if isinstance(e, Exception)}
        return TokenCounts(
            tokens=[next(lengths) if isinstance(text, str) else 0 for text in written],
            refused=dict(list(refused.items())[:MOST_REFUSALS]),
        )

    def written(self, conversation: Conversation, *, is_to_answer: bool = False) -> str:
        """Render a conversation by the chat template.

        Args:
            conversation: messages in order; the first may hold the tools, and nothing else.
            is_to_answer: whether to end with the start of the assistant's answer.
        """
        tools, messages = None, conversation
        if conversation and conversation[0].keys() == {"tools"}:
            tools, messages = conversation[0]["tools"], conversation[1:]
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=is_to_answer
            )
        )

    def _tried(self, conversation: Conversation) -> str | Exception:
        """The rendered conversation, or why it cannot be had; a template that hung is not run."""
        if self._endless is not None:
            return self._endless
        try:
            with _template_limit():
                return self.written(conversation)
        except TemplateTimeoutError as error:
            self._endless = error
            return error
        except Exception as error:  # noqa: BLE001 - a template is a program of its own
            return error

    def encoded(self, texts: Sequence[str], *, whole: bool) -> list[list[int]]:
        """Token ids of each text, the ids that are counted.

        Args:
            texts: texts to encode.
            whole: whether to add the tokens that begin and end an example, where they are missing.
        """
        # JSON can hold a lone surrogate, which no tokenizer accepts.
        valid = [text.encode(errors="replace").decode() for text in texts]
        if not valid:
            return []
        if self._tokenizer.is_fast:
            encode = self._tokenizer.backend_tokenizer.encode_batch_fast
            ids_of_texts = [encoding.ids for encoding in encode(valid, add_special_tokens=whole)]
        else:
            ids_of_texts = self._tokenizer(valid, add_special_tokens=whole)["input_ids"]
        end = self._tokenizer.eos_token_id if whole else None
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in ids_of_texts]

    def _lengths(self, texts: Sequence[str], *, whole: bool) -> list[int]:
        """Tokens of each text, (texts,)."""
        return [len(ids) for ids in self.encoded(texts, whole=whole)]


def _loaded(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        # Without an explicit value transformers would ask on stdin, which carries the requests.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - a tokenizer's files can raise anything
        raise TokenizerError(_first_line(error)) from None


@contextlib.contextmanager
def _template_limit() -> Iterator[None]:
    """Interrupt a chat template that computes for too long, in the main thread."""

    def interrupt(*_: object) -> None:
        raise TemplateTimeoutError(
            f"the chat template takes more than {TEMPLATE_SECONDS:g} s for one conversation"
        )

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MOST_CHARACTERS]


def main() -> None:
    """Answer requests until stdin ends."""
    die_with_parent(os.getppid())  # a chat template may never end
    replies = sys.stdout
    sys.stdout = sys.stderr  # libraries print to stdout

    def send(reply: object) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    name = json.loads(sys.stdin.readline())
    try:
        tokenizer = ExampleTokenizer(name)
    except TokenizerError as error:
        send({"error": str(error)})
        return
    send({"fingerprint": tokenizer.fingerprint, "has_chat_template": tokenizer.has_chat_template})
    for line in sys.stdin:
        chunk = json.loads(line)
        are_texts = all(isinstance(example, str) for example in chunk)
        counts = tokenizer.counted(chunk) if are_texts else tokenizer.chats_counted(chunk)
        send({"tokens": counts.tokens, "refused": counts.refused})


if __name__ == "__main__":
    main()
