"""A trainer: the meaning of its configuration's keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.configurations.key_classes import Config, Key, Reading

Shape = tuple[type, ...]
"""Types of a value; a list holds texts."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer whose configurations can be read.

    Attributes:
        name: name in messages.
        version: version whose sources the tables follow.
        keys: class of each key.
        unknown: class of a key that the trainer does not have.
        earlier: class of each key that only earlier versions have, and that is read as by these.
        shapes: types of the values that ``derive`` looks into; others are refused.
        derive: adds the options that keys set together, the trainer's defaults, and refusals.
        renamed: today's names of keys that only earlier versions have.
    """

    name: str
    version: str
    keys: Mapping[str, Key]
    unknown: Key
    shapes: Mapping[str, Shape]
    derive: Callable[[Config, Reading], None]
    earlier: Mapping[str, Key] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
