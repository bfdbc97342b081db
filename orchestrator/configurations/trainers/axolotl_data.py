"""Data of axolotl: images, and examples longer than a row."""

from orchestrator.configurations.key_classes import ABSENT, TRAINS_TOWER, Config, Reading

FREEZES = "freeze_mm_modules"


def read_tower(config: Config, reading: Reading) -> None:
    """Refuse full training of what reads images, which axolotl freezes by a key alone."""
    is_full = reading.options.get("method") == "full"
    if config.get("processor_type") and is_full and not config.get(FREEZES):
        reading.refuse(FREEZES, config.get(FREEZES, ABSENT), TRAINS_TOWER)


def read_long_examples(config: Config, reading: Reading) -> None:
    """Add what becomes of examples longer than a row, where no key has stated it.

    Documents are split (prompt_strategies/completion.py:57), others dropped
    (utils/data/utils.py:334); the trainer of reward models decides itself.
    """
    data = config.get("datasets")
    entries = data if isinstance(data, list) else []
    kinds = [entry.get("type") for entry in entries if isinstance(entry, dict)]
    if kinds and all(kind == "completion" for kind in kinds):
        reading.options["long_examples"] = "split"
    elif reading.options["task"] != "reward":
        reading.options.setdefault("long_examples", "dropped")
