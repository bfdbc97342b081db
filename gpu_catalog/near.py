"""Near matches for a word that was not found."""

import difflib
from collections.abc import Iterable

MOST = 3


def near_matches(word: str, candidates: Iterable[str]) -> list[str]:
    """The candidates a person may have meant, best first: by beginning or spelling.

    Case does not count: ``a100`` is near every A100.
    """
    by_folded = {candidate.casefold(): candidate for candidate in candidates}
    folded = word.casefold()
    begins = [name for name in by_folded if folded and name.startswith(folded)]
    alike = difflib.get_close_matches(folded, by_folded, n=MOST, cutoff=0.6)
    holds = [name for name in by_folded if len(name) > 2 and folded.startswith(name)]
    ordered = dict.fromkeys([*begins, *holds, *alike] if begins else [*alike, *holds])
    return [by_folded[name] for name in ordered][:MOST]


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``: did you mean 'x' or 'y'?``, to end a message with; empty when nothing is near."""
    near = [repr(match) for match in near_matches(word, candidates)]
    if not near:
        return ""
    *others, last = near
    return f": did you mean {', '.join(others)} or {last}?" if others else f": did you mean {last}?"
