"""Templates of YAML and bash, into which text from outside goes as one value each.

Whatever ``{{ … }}`` writes is a scalar of YAML or a word of bash, whatever the text has. What a
template inserts as it is, it marks: ``{{ header | verbatim }}``.
"""

import re
import shlex
from collections.abc import Callable
from functools import cache

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from gpu_catalog.safe_text import UNPRINTABLE

# What every version of YAML takes for text without quotes: names, paths, commands and addresses.
PLAIN = re.compile(
    r"(([1-9][0-9]*x)?[A-Za-z]|/)([\w./@+=>~ -]*[\w./-])?|[0-9]+(\.[0-9]+){3}", re.ASCII
)
KEYWORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
INDENT = 2
"""Spaces of a block of YAML beyond those of its key."""
Writer = Callable[[str], str]


class Verbatim(str):
    """Text that is of the template's language already."""

    __slots__ = ()


def yaml_scalar(text: str) -> Verbatim:
    """A text as a scalar of YAML in one line, in quotes where it needs them."""
    if PLAIN.fullmatch(text) and text.lower() not in KEYWORDS:
        return Verbatim(text)
    return yaml_quoted(text)


def yaml_quoted(text: str) -> Verbatim:
    """A text as a scalar of YAML in one line, in quotes."""
    is_shown = UNPRINTABLE.search(text) is None
    dumped = yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=is_shown)
    return Verbatim(dumped.removesuffix("\n"))


def yaml_block(text: str, indent: int) -> Verbatim:
    """A text of several lines as a scalar of YAML; in quotes where a block cannot hold it.

    Args:
        text: the text.
        indent: spaces before its lines, two more than before its key.
    """
    if not text.strip("\n") or UNPRINTABLE.search(text):
        return yaml_quoted(text)
    # Without this number, the spaces of the first line would count as those of the block.
    begins = str(INDENT) if text[0].isspace() else ""
    body = text.removesuffix("\n")
    ends = "-" if body == text else "+" if body.endswith("\n") else ""
    lines = (" " * indent + line if line else "" for line in body.split("\n"))
    return Verbatim("\n".join((f"|{begins}{ends}", *lines)))


def shell_word(text: str) -> Verbatim:
    """A text as a word of bash in one line, which ends no document of ``<<`` around it."""
    if UNPRINTABLE.search(text) is None and "\n" not in text:
        return Verbatim(shlex.quote(text))
    return Verbatim(f"$'{''.join(map(_escaped, text))}'")


def _escaped(sign: str) -> str:
    if sign in "'\\":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    # Python has bytes of file names that are no text as these surrogates.
    errors = "surrogateescape" if "\udc80" <= sign <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in sign.encode("utf-8", errors))


def yaml_value(value: object) -> object:
    """A text, a truth value or a list of them as YAML in one line; a number as it is."""
    if isinstance(value, bool):
        return Verbatim(str(value).lower())
    if isinstance(value, list | tuple):
        return Verbatim(f"[{', '.join(str(yaml_value(one)) for one in value)}]")
    return _written(value, yaml_scalar)


def shell_value(value: object) -> object:
    """A text as a word of bash; a number as it is."""
    return _written(value, shell_word)


def _written(value: object, writer: Writer) -> object:
    return writer(value) if isinstance(value, str) and not isinstance(value, Verbatim) else value


@cache  # Jinja takes 12 ms to compile a template, and 0.2 ms to fill it
def template_environment(
    package: str, finalize: Callable[[object], object], **filters: Callable[[str], str]
) -> Environment:
    """Templates of a package.

    Args:
        package: package with a folder ``templates``.
        finalize: writes the value of each ``{{ … }}`` in their language.
        filters: filters of these templates alone, by name.
    """
    environment = Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - of HTML; finalize is that of their languages
        finalize=finalize,
    )
    environment.filters |= {
        "block": yaml_block,
        "quoted": yaml_quoted,
        "shell": shell_word,
        "verbatim": Verbatim,
        **filters,
    }
    return environment
