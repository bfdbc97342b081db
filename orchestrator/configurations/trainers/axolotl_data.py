"""Data of axolotl: images, examples longer than a row, and examples that are evaluated."""

from orchestrator.configurations.key_classes import ABSENT, TRAINS_TOWER, Config, Reading
from orchestrator.configurations.trainers.training_length import set_aside

FREEZES = "freeze_mm_modules"
OF_EVALUATION = ("evals_per_epoch", "eval_steps")


def read_tower(config: Config, reading: Reading) -> None:
    """Refuse full training of what reads images, which axolotl freezes by a key alone."""
    is_full = reading.options.get("method") == "full"
    if config.get("processor_type") and is_full and not config.get(FREEZES):
        reading.refuse(FREEZES, config.get(FREEZES, ABSENT), TRAINS_TOWER)


def read_data(config: Config, reading: Reading) -> None:
    """Add what becomes of examples longer than a row, and what is set aside for evaluation."""
    _read_long_examples(config, reading)
    set_aside(reading, config.get("val_set_size"))
    share, often = reading.options.get("set_aside"), config.get("evals_per_epoch")
    if share is not None and share < 1 and type(often) is int:
        text = (
            f"no evaluation, which passes {often * share:.0%} of the examples through the model "
            "once more in each epoch; its memory beyond training's comes on top"
        )
        reading.mark("evals_per_epoch", often, "assumed", text)
    if share is not None or config.get("test_datasets"):
        return
    for name in OF_EVALUATION:  # core/builders/base.py:524
        if config.get(name):
            text = "without val_set_size or test_datasets nothing is evaluated"
            reading.mark(name, config[name], "irrelevant", text)


def _read_long_examples(config: Config, reading: Reading) -> None:
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
