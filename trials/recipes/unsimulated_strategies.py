"""Strategies of several GPUs that are known by name and not simulated. No pydantic.

The command line names them without the import of records.
"""

import re

KINDS = {
    "pipeline parallelism": ("pp", "pipe", "pipeline"),
    "expert parallelism": ("ep", "expert", "experts"),
    "context parallelism": ("cp", "sp", "context", "sequence", "ring-attention", "ulysses"),
    "FSDP1": ("fsdp", "fsdp1"),
    "DeepSpeed without its stage": ("deepspeed", "zero"),
}
"""Kinds of strategies, and the names that each goes by."""
WORD = re.compile(r"[-_ ]*(model[-_ ]*)?parallel(ism)?$")


def unsimulated_strategy(name: str) -> str | None:
    """Reason why the strategy of a name is refused; None for a name of no such strategy.

    Case, and the word parallel or parallelism at the end, make no difference.
    """
    short = WORD.sub("", name.strip().lower()).replace("_", "-").replace(" ", "-")
    kinds = (kind for kind, names in KINDS.items() if short in names)
    kind = next(kinds, None)
    return None if kind is None else f"{name!r} is {kind}, which is not simulated yet"
