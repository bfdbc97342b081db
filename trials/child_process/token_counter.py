"""How many tokens examples have, by a model's own tokenizer, in a child process. No torch here."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from trials.child_process.environment import CHILD_VARIABLES
from trials.records.learning import Conversation

CHILD = (sys.executable, "-m", "trials.training.tokenizer_worker")
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "tekken")  # what their names begin with
HUB_TIMEOUT_SECONDS = 10.0  # to see whether there is a network

"""Messages, each with its role and content."""

RenderedExample = str | Conversation


class TokenizerError(ValueError):
    """There is no such tokenizer, or it cannot do what is asked; one line on why."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Some examples, counted.

    Attributes:
        tokens: (examples,) of each; 0 of those refused.
        refused: why the chat template refuses an example, by its place; the first few of them.
    """

    tokens: Sequence[int]
    refused: Mapping[int, str]


def cannot_be_loaded(name: str, why: str) -> str:
    """What to say of a tokenizer that there is not."""
    return (
        f"{name!r} cannot be loaded ({why}): give a local folder with a tokenizer.json, or a hub "
        "name (OWNER/NAME) with a network, and HF_TOKEN if it is gated"
    )


def said_of_own(text: str, name: str) -> str:
    """What to say of a tokenizer that nobody named: that it is the model's."""
    return f"{name!r} (the model's own, as none is given){text.removeprefix(repr(name))}"


def tokenizer_path(name: str) -> Path | None:
    """The file or folder of a tokenizer; None for a hub name.

    Raises:
        TokenizerError: it is a folder, and there is none, or no tokenizer in it.
    """
    here = Path(name).expanduser()
    if here.is_dir() and not any(_is_of_a_tokenizer(file) for file in here.iterdir()):
        raise TokenizerError(cannot_be_loaded(name, "the folder has none"))
    if here.exists():
        return here
    if name.startswith((".", "/", "~")):
        raise TokenizerError(f"{name!r}: no such folder: give one with a tokenizer.json")
    return None


def _is_of_a_tokenizer(file: Path) -> bool:
    return file.name.startswith(TOKENIZER_FILES) or file.suffix in {".model", ".tiktoken"}


def hub_is_reached() -> bool:
    """Whether the hub answers: its libraries try for a minute before they say that it does not."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - only this needs them

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # noqa: BLE001 - whatever is wrong with the network, there is none
        return False
    return True


def offline_variables(*names: str) -> dict[str, str]:
    """What a child's environment needs to load these, local paths or hub names, without a wait.

    Where the hub does not answer, what was fetched before will do.
    """
    of_the_hub = any(not Path(name).expanduser().exists() for name in names)
    return {"HF_HUB_OFFLINE": "1"} if of_the_hub and not hub_is_reached() else {}


class TokenCounter:
    """Counts the tokens of examples. A context manager.

    The child starts at once and imports while others read the data.

    Args:
        name: the tokenizer: a folder, a tokenizer.json, or a hub name, of which what was fetched
            before will do when there is no network.

    Raises:
        TokenizerError: on entering, as ``tokenizer_path`` does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ready: dict[str, Any] | None = None
        self._errors: IO[bytes] | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        here = tokenizer_path(self._name)
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment() | offline_variables(self._name),
            text=True,
        )
        self._tell(self._name if here is None else str(here))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None
        assert self._errors is not None
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    @property
    def fingerprint(self) -> str:
        """The same for tokenizers that count alike.

        Raises:
            TokenizerError: there is no such tokenizer.
        """
        return str(self._settled()["fingerprint"])

    def need_chat_template(self) -> None:
        """Sees to it that the tokenizer says how a conversation is written.

        Raises:
            TokenizerError: there is no such tokenizer, or it does not.
        """
        if not self._settled()["has_chat_template"]:
            raise TokenizerError(
                f"{self._name!r} has no chat template: make examples of text fields, or give the "
                "tokenizer of a model for conversations, such as a base model's instruct sibling"
            )

    def counted(self, chunks: Iterable[Sequence[RenderedExample]]) -> Iterator[Counted]:
        """Counts chunk after chunk, the next one made while the child counts.

        Args:
            chunks: texts, or conversations; not both in one.

        Raises:
            TokenizerError: there is no such tokenizer, or the child ended.
        """
        asked = False
        for chunk in chunks:
            # The child's answers fit into the pipe, so neither waits for the other for ever.
            self._tell(chunk)
            if asked:
                yield self._answered()
            asked = True
        if asked:
            yield self._answered()

    def _answered(self) -> Counted:
        self._settled()
        answer = self._answer()
        refused = {int(place): str(why) for place, why in answer["refused"].items()}
        return Counted(tokens=answer["tokens"], refused=refused)

    def _settled(self) -> dict[str, Any]:
        if self._ready is None:
            self._ready = self._answer()
        return self._ready

    def _tell(self, what: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # told where the answer is missed
            # Columnar files have dates and the like in their messages.
            self._process.stdin.write(json.dumps(what, default=str) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TokenizerError(
                f"{self._name!r}: the process that counts tokens ended: {self._last_words()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TokenizerError(cannot_be_loaded(self._name, answer["error"]))
        return answer

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"


def _environment() -> dict[str, str]:
    # The packages may come from a Ray job's working directory, which only sys.path knows of.
    packages = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    return os.environ | CHILD_VARIABLES | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "true"}
