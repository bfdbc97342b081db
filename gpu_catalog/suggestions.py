"""Near matches of an unknown word."""

import difflib
from collections.abc import Iterable

MOST = 4  # the A100 has four variants
SHORTEST_PART = 3  # shorter parts occur in too many words


def near_matches(word: str, candidates: Iterable[str]) -> list[str]:
    """Candidates that the user may have meant, best first, at most ``MOST``.

    Case and leading dashes are ignored. Candidates that begin with the word come alone: ``a100-80``
    is near the 80 GB A100s and no other GPU. Otherwise similarly spelled candidates come first,
    then those that contain the word or that the word begins with.
    """
    by_folded = {_folded(candidate): candidate for candidate in candidates}
    folded = _folded(word)
    near = [name for name in by_folded if folded and name.startswith(folded)]
    if not near:
        alike = difflib.get_close_matches(folded, by_folded, n=MOST, cutoff=0.6)
        near = [*alike, *(name for name in by_folded if _is_part(folded, name))]
    return [by_folded[name] for name in dict.fromkeys(near)][:MOST]


def _folded(name: str) -> str:
    return name.casefold().lstrip("-")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """End of a message, ``: did you mean 'x' or 'y'?``; empty if no candidate is near."""
    return suggestion_text(near_matches(word, candidates))


def near_or_all(word: str, candidates: Iterable[str]) -> str:
    """End of a message with the near candidates, or with all where none is near."""
    every = list(candidates)
    return did_you_mean(word, every) or f": the known ones are {', '.join(every)}"


def suggestion_text(matches: Iterable[str]) -> str:
    """End of a message that suggests these words; empty if there are none."""
    near = [repr(match) for match in matches]
    if not near:
        return ""
    *others, last = near
    return f": did you mean {', '.join(others)} or {last}?" if others else f": did you mean {last}?"


def _is_part(word: str, candidate: str) -> bool:
    if min(len(word), len(candidate)) < SHORTEST_PART:
        return False
    return word in candidate or word.startswith(candidate)
