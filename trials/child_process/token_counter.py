"""Token counts of examples by a model's own tokenizer, in a child process. No torch here."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from trials.child_process.environment import child_environment
from trials.records.model import hub_is_reached

CHILD = (sys.executable, "-m", "trials.training.tokenizer_worker")
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "tekken")  # prefixes of their names

RenderedExample = str | Sequence[Mapping[str, Any]]


class TokenizerError(ValueError):
    """The tokenizer does not exist or lacks something; one line says which."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of a chunk of examples.

    Attributes:
        tokens: (examples,) tokens of each example; 0 for refused ones.
        refused: error of the chat template by index of the example; the first few alone.
    """

    tokens: Sequence[int]
    refused: Mapping[int, str]


def tokenizer_load_failure(name: str, why: str) -> str:
    """Message for a tokenizer that cannot be loaded."""
    return (
        f"{name!r} cannot be loaded ({why}): give a local folder with a tokenizer.json, or a hub "
        "name (OWNER/NAME) with a network, and HF_TOKEN if it is gated"
    )


def mention_own_tokenizer(text: str, name: str) -> str:
    """Message on a tokenizer that the user did not name: it says that it is the model's own."""
    return f"{name!r} (the model's own, as none is given){text.removeprefix(repr(name))}"


def tokenizer_path(name: str) -> Path | None:
    """File or folder of a tokenizer; None for a hub name.

    Raises:
        TokenizerError: the folder does not exist or contains no tokenizer.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not any(
        file.name.startswith(TOKENIZER_FILES) or file.suffix in {".model", ".tiktoken"}
        for file in path.iterdir()
    ):
        raise TokenizerError(tokenizer_load_failure(name, "the folder has none"))
    if path.exists():
        return path
    if name.startswith((".", "/", "~")):
        raise TokenizerError(f"{name!r}: no such folder: give one with a tokenizer.json")
    return None


def offline_variables(*names: str) -> dict[str, str]:
    """Environment variables with which a child loads these without waiting for a network.

    Where the hub does not answer, the child uses its local cache alone.

    Args:
        names: local paths or hub names of tokenizers and models.
    """
    uses_hub = any(not Path(name).expanduser().exists() for name in names)
    return {"HF_HUB_OFFLINE": "1"} if uses_hub and not hub_is_reached() else {}


class TokenCounter:
    """Counts the tokens of examples. A context manager.

    The child starts at once and imports its libraries while the caller reads the data.

    Args:
        name: the tokenizer: a folder, a tokenizer.json, or a hub name (the local cache suffices).

    Raises:
        TokenizerError: as in ``tokenizer_path``.
    """

    def __init__(self, name: str) -> None:
        path = tokenizer_path(name)
        parallel = {"TOKENIZERS_PARALLELISM": "true"}
        self._name = name
        self._ready: dict[str, Any] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment() | parallel | offline_variables(name),
            text=True,
        )
        self._send(name if path is None else str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    @property
    def fingerprint(self) -> str:
        """Fingerprint shared by all tokenizers with equal counts.

        Raises:
            TokenizerError: the tokenizer cannot be loaded.
        """
        return str(self._first_reply()["fingerprint"])

    def need_chat_template(self) -> None:
        """Require a chat template of the tokenizer.

        Raises:
            TokenizerError: the tokenizer cannot be loaded or has none.
        """
        if not self._first_reply()["has_chat_template"]:
            raise TokenizerError(
                f"{self._name!r} has no chat template: make examples of text fields, or give the "
                "tokenizer of a model for conversations, such as a base model's instruct sibling"
            )

    def counted(self, chunks: Iterable[Sequence[RenderedExample]]) -> Iterator[TokenCounts]:
        """Count chunk after chunk; the caller makes the next one while the child counts.

        Args:
            chunks: texts or conversations; not both in one chunk.

        Raises:
            TokenizerError: the tokenizer cannot be loaded, or the child ended.
        """
        is_pending = False
        for chunk in chunks:
            # A reply to one chunk fits into the pipe, so that child and parent never both block.
            self._send(chunk)
            if is_pending:
                yield self._counts()
            is_pending = True
        if is_pending:
            yield self._counts()

    def _counts(self) -> TokenCounts:
        self._first_reply()
        reply = self._reply()
        refused = {int(place): str(why) for place, why in reply["refused"].items()}
        return TokenCounts(tokens=reply["tokens"], refused=refused)

    def _first_reply(self) -> dict[str, Any]:
        if self._ready is None:
            self._ready = self._reply()
        return self._ready

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the reply reports the child's end
            # default=str: messages of columnar files may hold dates.
            self._process.stdin.write(json.dumps(message, default=str) + "\n")
            self._process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            printed = self._errors.read().decode(errors="replace").strip()
            why = printed.splitlines()[-1] if printed else "it printed nothing"
            raise TokenizerError(f"{self._name!r}: the process that counts tokens ended: {why}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise TokenizerError(tokenizer_load_failure(self._name, reply["error"]))
        return reply
