"""Near matches for a word that was not found."""
from collections.abc import Iterable


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    return ""
