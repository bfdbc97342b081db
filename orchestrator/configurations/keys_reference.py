"""Tables of the keys of each trainer, for the reference."""

from collections.abc import Iterator

from orchestrator.configurations.read_file import TRAINERS
from orchestrator.configurations.trainer import Trainer
from orchestrator.markdown_table import table


def keys_reference() -> str:
    """A heading and a table for each trainer, in Markdown: class, meaning and keys."""
    return "\n".join(_section(trainer) for trainer in TRAINERS)


def _section(trainer: Trainer) -> str:
    rows = table(("class", "meaning", "keys"), _rows(trainer))
    return f"## {trainer.name} {trainer.version}\n\n{rows}\n"


def _rows(trainer: Trainer) -> Iterator[tuple[str, str, str]]:
    """Keys of the same class and meaning in a row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, key in trainer.keys.items():
        groups.setdefault((key.key_class, key.meaning), []).append(name)
    order = ("used", "assumed", "refused", "irrelevant")
    for key_class, meaning in sorted(groups, key=lambda group: order.index(group[0])):
        names = sorted(groups[key_class, meaning])
        yield key_class, meaning, ", ".join(f"`{name}`" for name in names)
    yield trainer.unknown.key_class, trainer.unknown.meaning, "any other key"
