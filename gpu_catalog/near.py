"""Near matches for a word that was not found."""

import difflib
import re
from collections.abc import Iterable

MOST = 4  # as many as the forms one GPU comes in: A100 has four
SHORTEST_PART = 3  # a shorter part is in too many words to mean anything
LOOK_ALIKE = str.maketrans("oil", "011")
PARTS = re.compile(r"[a-z]+|\d+")


def near_matches(word: str, candidates: Iterable[str]) -> list[str]:
    """The candidates a person may have meant, best first, at most ``MOST``.

    Neither case nor the dashes of an option count. A beginning is meant as one: ``a100-80`` is near
    the 80 GB A100s and no other GPU. Else spelling counts, then a candidate that begins the word or
    has it inside.
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
    """``: did you mean 'x' or 'y'?``, to end a message with; empty when nothing is near."""
    near = [repr(match) for match in near_matches(word, candidates)]
    if not near:
        return ""
    *others, last = near
    return f": did you mean {', '.join(others)} or {last}?" if others else f": did you mean {last}?"


def is_mistyped(word: str, meant: str) -> bool:
    """Whether a name that may be right is most likely another one, mistyped.

    Letters that look like digits are (``A4O``), and one slip of the fingers in a word of letters
    (``mixtrl-8x7b``). Numbers and short words tell one product from the next: ``7b`` is no
    ``8b``, nor ``gh200`` a ``h200``.
    """
    one, other = word.casefold(), meant.casefold()
    if _signs(one) == _signs(other):
        return word != meant
    parts, others = PARTS.findall(one), PARTS.findall(other)
    differing = [(a, b) for a, b in zip(parts, others, strict=False) if a != b]
    if len(parts) != len(others) or len(differing) != 1:
        return False
    a, b = differing[0]
    return a.isalpha() and b.isalpha() and min(len(a), len(b)) >= SHORTEST_PART and _one_slip(a, b)


def _signs(name: str) -> str:
    return "".join(PARTS.findall(name)).translate(LOOK_ALIKE)


def _one_slip(one: str, other: str) -> bool:
    """Whether a letter is missing or another one, or two neighbours have changed places."""
    short, long = sorted((one, other), key=len)
    if len(short) == len(long):
        wrong = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        first, last = wrong[0], wrong[-1]
        has_swapped = one[first : last + 1] == other[first : last + 1][::-1]
        return first == last or (last == first + 1 and has_swapped)
    return any(long[:place] + long[place + 1 :] == short for place in range(len(long)))


def _is_part(word: str, candidate: str) -> bool:
    if min(len(word), len(candidate)) < SHORTEST_PART:
        return False
    return word in candidate or word.startswith(candidate)
