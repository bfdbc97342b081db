"""Kinds of training data against the tasks that train on them."""

from orchestrator.datasets.lengths import DataLengths


def wrong_kind(lengths: DataLengths | None) -> str | None:
    """Mistake of data that no recipe trains on, with the remedy; None where one does."""
    if lengths is None or not lengths.is_preference:
        return None
    answer = "chosen" if lengths.kind == "pairs" else "completion"
    return (
        f"{lengths.source} holds preference data ({lengths.rendering}), but recipes train on "
        f"texts: render texts, for example with --text-fields prompt,{answer}"
    )
