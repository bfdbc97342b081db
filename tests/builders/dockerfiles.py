"""Steps of the images in deploy/, as a builder reads them."""

import re
import shlex
from collections.abc import Iterator

from builders.clusters import shipped

FILES = ("Dockerfile.cpu", "Dockerfile.cuda")
TAKE_A_VALUE = {"--constraint", "--index-url", "--requirement"}


def instructions(file: str) -> list[tuple[str, str]]:
    """Names of a file's instructions with what follows them."""
    lines = [line for line in shipped(file).splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    steps = [line.partition(" ") for line in whole.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in steps]


def of_kind(file: str, name: str) -> list[str]:
    """What follows each of a file's instructions of one name."""
    return [rest for kind, rest in instructions(file) if kind == name]


def arguments(file: str) -> dict[str, str]:
    """Default values of the build's arguments."""
    pairs = (rest.partition("=") for rest in of_kind(file, "ARG"))
    return {name: value for name, _, value in pairs}


def filled(text: str, values: dict[str, str]) -> str:
    """A text with its ``${NAME}`` replaced; a KeyError where the build has no such argument."""
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


def commands(file: str) -> Iterator[list[str]]:
    """Words of each command that a file runs."""
    for run in of_kind(file, "RUN"):
        reader = shlex.shlex(run, posix=True, punctuation_chars=";&|")
        reader.whitespace_split = True
        words = list[str]()
        for word in [*reader, ";"]:
            if word in {"then", "do"} or set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def installed_by(file: str, program: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """What each ``install`` of a program names, and its options that take a value."""
    for words in commands(file):
        if words[:2] != [program, "install"]:
            continue
        names, options, rest = list[str](), dict[str, str](), iter(words[2:])
        for word in rest:
            if word in TAKE_A_VALUE:
                options[word] = next(rest)
            elif not word.startswith("-"):
                names.append(word)
        yield names, options
