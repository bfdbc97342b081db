"""Tables of the keys of each trainer, for the reference."""

from collections.abc import Iterator, Mapping

from orchestrator.configurations.key_classes import EARLIER, Key, assumed
from orchestrator.configurations.read_file import TRAINERS
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.trl import KEYS_OF_PYTHON, TRL
from orchestrator.markdown_table import table


def keys_reference() -> str:
    """A heading and a table for each trainer, in Markdown: class, meaning and keys."""
    in_python = f"## {TRL.name} {TRL.version} in Python files only"
    return "\n".join(
        (
            *(_section(f"## {t.name} {t.version}", _with_earlier(t), t.unknown) for t in TRAINERS),
            _section(in_python, KEYS_OF_PYTHON),
        )
    )


def _with_earlier(trainer: Trainer) -> dict[str, Key]:
    return {**dict.fromkeys(trainer.earlier, assumed(EARLIER)), **trainer.keys}


def _section(heading: str, keys: Mapping[str, Key], *unknown: Key) -> str:
    rows = [*_rows(keys), *((key.key_class, key.meaning, "any other key") for key in unknown)]
    return f"{heading}\n\n{table(('class', 'meaning', 'keys'), rows)}\n"


def _rows(keys: Mapping[str, Key]) -> Iterator[tuple[str, str, str]]:
    """Keys of the same class and meaning in a row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, key in keys.items():
        groups.setdefault((key.key_class, key.meaning), []).append(name)
    order = ("used", "assumed", "refused", "irrelevant")
    for key_class, meaning in sorted(groups, key=lambda group: order.index(group[0])):
        names = sorted(groups[key_class, meaning])
        yield key_class, meaning, ", ".join(f"`{name}`" for name in names)
