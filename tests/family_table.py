"""Print the page on families of transformers whose recipes a prediction refuses: Markdown.

``PYTHONPATH=tests python tests/family_table.py > docs/reference/families.md`` takes some minutes.
"""

import datetime as dt
import sys
from collections import defaultdict

from builders.families import FAMILIES, METHODS, UNSHRINKABLE, refusal_of, tiny_model
from transformers import __version__ as transformers_version

from orchestrator.markdown_table import records_table
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe

NO_VOCABULARY = "its configuration has no vocab_size: it is that of several models in one"
REMEDY = ": use "  # begins the last part of a refusal


def reason_of(family: str, method: Method) -> str | None:
    """Reason why a tiny model of a family is refused under a method; None where it is traced."""
    model = tiny_model(family)
    if model is None:
        return NO_VOCABULARY
    rank = None if method == "full" else 4
    line = refusal_of(model, Recipe(method=method, lora_rank=rank, precision="bf16"))
    if line is None:
        return None
    start = f"{family} cannot be traced: "
    reason = line.removeprefix(start).rpartition(REMEDY)[0] or line.removeprefix(start)
    return (
        reason.partition("; it has ")[0].partition(" did not take hold: ")[2]
        or (reason.partition("; it has ")[0])
    )


def main() -> None:
    """Print the page."""
    tried = [family for family in FAMILIES if family not in UNSHRINKABLE]
    methods: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for family in tried:
        for method in METHODS:
            reason = reason_of(family, method)
            if reason is not None:
                methods[family, reason].append(method)
    rows = [
        {"family": family, "methods": ", ".join(refused), "reason": reason}
        for (family, reason), refused in methods.items()
    ]
    traced = len(tried) - len({row["family"] for row in rows})
    sys.stdout.write(
        "# Families of models\n\n"
        f"A prediction was tried on {dt.datetime.now(tz=dt.UTC).date()} for the "
        f"{len(tried)} families of causal language models in transformers {transformers_version} "
        "whose default configuration can be made tiny, with the default recipe of each method "
        f"in bf16. {traced} families are traced in every method. This table has the others: "
        "a trial refuses these recipes, too, or their steps depend on values. Another recipe may "
        "do: with `lora_targets: [attention]`, for example, experts need not be linear layers.\n\n"
    )
    sys.stdout.write(records_table(rows) + "\n")


if __name__ == "__main__":
    main()
