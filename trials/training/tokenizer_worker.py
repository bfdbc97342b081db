"""The child process that counts tokens: setup, then texts or conversations a line, answers a line.

transformers brings torch along, which nothing else that looks at a data set needs.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trials.child_process.token_counter import Counted, TokenizerError
from trials.records.learning import Conversation

MOST_CHARACTERS = 200  # of an error
MOST_REFUSALS = 20  # of a chunk: an answer must fit into a pipe that nobody reads yet


class ExampleTokenizer:
    """A model's tokenizer, as it is used on whole examples.

    Args:
        name: a folder, a tokenizer.json, or a hub name.

    Raises:
        TokenizerError: it cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self._tokenizer = _loaded(name)
        if self._tokenizer.is_fast:
            # What was saved with it would cut and pad what is counted here.
            self._tokenizer.backend_tokenizer.no_truncation()
            self._tokenizer.backend_tokenizer.no_padding()

    @property
    def has_chat_template(self) -> bool:
        """Whether it says how a conversation is written."""
        return self._tokenizer.chat_template is not None

    @property
    def fingerprint(self) -> str:
        """The same for tokenizers that count alike."""
        if self._tokenizer.is_fast:
            said = self._tokenizer.backend_tokenizer.to_str()
        else:
            said = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        parts = (said, self._tokenizer.chat_template, self._tokenizer.eos_token)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def counted(self, texts: Sequence[str]) -> Counted:
        """Tokens of each: with its special ones, and one for the end, as trainers add."""
        return Counted(tokens=self._lengths(texts, whole=True), refused={})

    def chats_counted(self, conversations: Sequence[Conversation]) -> Counted:
        """Tokens of each as the chat template writes it."""
        written = [_tried(self.written, each) for each in conversations]
        texts = [text for text in written if isinstance(text, str)]
        lengths = iter(self._lengths(texts, whole=False))
        refused = {at: _first_line(e) for at, e in enumerate(written) if isinstance(e, Exception)}
        return Counted(
            tokens=[next(lengths) if isinstance(text, str) else 0 for text in written],
            refused=dict(list(refused.items())[:MOST_REFUSALS]),
        )

    def written(self, conversation: Conversation, *, is_to_answer: bool = False) -> str:
        """A conversation as the chat template writes it.

        Args:
            conversation: its messages.
            is_to_answer: whether the assistant is to speak next.
        """
        return str(
            self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=is_to_answer
            )
        )

    def encoded(self, texts: Sequence[str], *, whole: bool) -> list[list[int]]:
        """Ids of the tokens of each text, as they are counted.

        Args:
            texts: what to encode.
            whole: with what begins and ends a whole example, unless it is in it.
        """
        # Half a character, which JSON can spell, is in no tokenizer's alphabet.
        said = [text.encode(errors="replace").decode() for text in texts]
        if not said:
            return []
        if self._tokenizer.is_fast:
            encode = self._tokenizer.backend_tokenizer.encode_batch_fast
            found = [each.ids for each in encode(said, add_special_tokens=whole)]
        else:
            found = self._tokenizer(said, add_special_tokens=whole)["input_ids"]
        end = self._tokenizer.eos_token_id if whole else None
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in found]

    def _lengths(self, texts: Sequence[str], *, whole: bool) -> list[int]:
        """(texts,) tokens of each."""
        return [len(ids) for ids in self.encoded(texts, whole=whole)]


def _loaded(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        # Asked, it would read the answer from stdin, where the examples come.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer's files make it raise
        raise TokenizerError(_first_line(error)) from None


def _tried(function: Callable[[Conversation], str], value: Conversation) -> str | Exception:
    try:
        return function(value)
    except Exception as error:  # noqa: BLE001 - a template is a program of its own
        return error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MOST_CHARACTERS]


def main() -> None:
    """Counts until stdin ends."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer

    def say(answer: object) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    name = json.loads(sys.stdin.readline())
    try:
        tokenizer = ExampleTokenizer(name)
    except TokenizerError as error:
        say({"error": str(error)})
        return
    say({"fingerprint": tokenizer.fingerprint, "has_chat_template": tokenizer.has_chat_template})
    for line in sys.stdin:
        asked = json.loads(line)
        texts = all(isinstance(each, str) for each in asked)
        found = tokenizer.counted(asked) if texts else tokenizer.chats_counted(asked)
        say({"tokens": found.tokens, "refused": found.refused})


if __name__ == "__main__":
    main()
