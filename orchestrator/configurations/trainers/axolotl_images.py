"""Parts of a vision-language model that axolotl trains beside its language part."""

from orchestrator.configurations.key_classes import ABSENT, TRAINS_TOWER, Config, Reading

FREEZES = "freeze_mm_modules"


def read_tower(config: Config, reading: Reading) -> None:
    """Refuse full training of what reads images, which axolotl freezes by a key alone."""
    is_full = reading.options.get("method") == "full"
    if config.get("processor_type") and is_full and not config.get(FREEZES):
        reading.refuse(FREEZES, config.get(FREEZES, ABSENT), TRAINS_TOWER)
