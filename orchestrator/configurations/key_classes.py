"""Classes of a configuration's keys, and the tables that name the class of each key.

A key is *used*: it sets an option of the estimate; *irrelevant*: it changes neither memory nor
time; *assumed*: the estimate goes on with a stated assumption in its place; or *refused*: the
estimate would be wrong.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KeyClass = Literal["used", "irrelevant", "assumed", "refused"]
Config = Mapping[str, Any]
Words = Mapping[Any, Any]

ABSENT = "(absent)"
"""Value of a key that the file does not have."""

IMAGES = (
    "only estimate and check read images: give --image-tokens N, the tokens of each example that "
    "come from them"
)
"""Reason why a key of images is refused without their number."""
TRAINS_TOWER = "trains what reads images, which is not estimated: set it to true"
SOUND = "sound and video are not simulated: only text and images are"
EARLIER = "a key of earlier versions"
"""Beginning of what is said of a key that the trainer's version refuses."""

OFF: tuple[object, ...] = (None, False, 0, "", "no", "none", [], {})
"""Values of a key that does nothing."""


class Computed(str):
    """Expression of a Python file whose value is unknown unless the file runs."""

    __slots__ = ()


QUOTED_SWITCHES = {"true": True, "false": False}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)

LONGEST_VALUE = 40  # characters of a value that is shown


@dataclass(frozen=True, slots=True)
class Key:
    """Class of a key.

    Attributes:
        key_class: the class, unless the value is one of ``idle``.
        meaning: option that the key sets, the assumption, or the reason and the remedy.
        option: option that the key alone sets; None where the trainer's ``derive`` does it.
        words: value of the option for each value of the key; all others are refused. None for the
            value itself.
        idle: values with which an assumed or refused key does nothing.
    """

    key_class: KeyClass
    meaning: str
    option: str | None = None
    words: Words | None = None
    idle: tuple[object, ...] = OFF


def used(option: str, words: Words | None = None) -> Key:
    """Key that sets one option."""
    return Key("used", option, option, words)


def shared(options: str) -> Key:
    """Key that sets options together with others."""
    return Key("used", options)


def irrelevant(reason: str) -> Key:
    """Key that changes neither memory nor time."""
    return Key("irrelevant", reason)


def assumed(assumption: str, *, idle: tuple[object, ...] = OFF) -> Key:
    """Key in whose place something is assumed."""
    return Key("assumed", assumption, idle=idle)


def refused(reason: str, *, idle: tuple[object, ...] = OFF) -> Key:
    """Key with which there is no estimate."""
    return Key("refused", reason, idle=idle)


def table_of(*groups: tuple[Key, str]) -> dict[str, Key]:
    """Table of groups of keys: a class, and the names that have it."""
    return {name: key for key, names in groups for name in names.split()}


@dataclass(frozen=True, slots=True)
class Line:
    """One key of a file, or one assumption beside it, as the estimate takes it.

    Attributes:
        is_misspelt: whether the trainer has no such key, and another was probably meant.
        is_earlier: whether earlier versions of the trainer have it, and its own refuses it.
    """

    key: str
    value: object
    key_class: KeyClass
    meaning: str
    is_misspelt: bool = False
    is_earlier: bool = False


@dataclass(slots=True)
class Reading:
    """Options and lines that a configuration comes to, while it is read.

    Attributes:
        options: options of the estimate, by name.
        lines: a line for each key, in the order of the file, then further assumptions.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)

    def mark(self, key: str, value: object, key_class: KeyClass, meaning: str) -> None:
        """Set the line of a key, in place of the one that its table has; a refusal stays."""
        before = self.lines.get(key)
        if before is None or before.key_class != "refused":
            self.lines[key] = Line(key, value, key_class, meaning)

    def assume(self, subject: str, meaning: str) -> None:
        """Add an assumption on what the file leaves open."""
        self.mark(subject, ABSENT, "assumed", meaning)

    def refuse(self, key: str, value: object, reason: str) -> None:
        """Refuse a key."""
        self.mark(key, value, "refused", reason)

    def refusals(self) -> Iterator[Line]:
        """Lines of refused keys."""
        return (line for line in self.lines.values() if line.key_class == "refused")


def unquoted(value: object) -> object:
    """Switch or number that a text spells, as YAML reads ``"true"`` and ``1e-4``; else itself."""
    if not isinstance(value, str) or isinstance(value, Computed) or len(value) > LONGEST_VALUE:
        return value
    if value.lower() in QUOTED_SWITCHES:
        return QUOTED_SWITCHES[value.lower()]
    if not NUMBER.fullmatch(value):
        return value
    return int(value) if value.isdigit() else float(value)


def is_idle(value: object, idle: tuple[object, ...]) -> bool:
    """Whether a value is among the idle ones, a whole number in either type; True is not 1."""
    is_switch = isinstance(value, bool)
    return any(value == other and isinstance(other, bool) is is_switch for other in idle)


def classified(table: Mapping[str, Key], config: Config, unknown: Key) -> Reading:
    """Read every key by its table; the trainer derives the options that keys set together."""
    reading = Reading()
    for name, value in config.items():
        key = entry_of(table, str(name)) or unknown
        _read(reading, str(name), value, key)
    return reading


def _read(reading: Reading, name: str, value: object, key: Key) -> None:
    if isinstance(value, Computed) and key.key_class != "irrelevant":
        reading.refuse(name, value, "is computed, and the file is not run: write its value")
    elif key.key_class in ("assumed", "refused") and is_idle(value, key.idle):
        reading.mark(name, value, "irrelevant", "off")
    elif key.option is None or value is None:
        reading.mark(name, value, key.key_class, key.meaning)
    elif key.words is None:
        reading.options[key.option] = value
        reading.mark(name, value, "used", key.option)
    elif not isinstance(value, (list, dict)) and value in key.words:
        reading.options[key.option] = key.words[value]
        reading.mark(name, value, "used", f"{key.option} {shown(key.words[value])}")
    else:
        names = ", ".join(shown(word) for word in key.words)
        reading.refuse(name, value, f"not simulated: use one of {names}")


def entry_of(table: Mapping[str, Key], name: str) -> Key | None:
    """Entry of a key in a table: its own, or that of its prefix, written ``wandb_*``."""
    parts = name.split("_")
    prefixes = ("_".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    entries = (table.get(entry) for entry in (name, *(f"{prefix}_*" for prefix in prefixes)))
    return next((entry for entry in entries if entry is not None), None)


def shown(value: object) -> str:
    """A value as YAML has it, shortened."""
    words = {True: "true", False: "false", None: "none"}
    if isinstance(value, bool) or value is None:
        return words[value]
    if isinstance(value, (list, tuple)):
        value = ", ".join(shown(item) for item in value)
    elif isinstance(value, float):
        value = f"{value:g}"
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
