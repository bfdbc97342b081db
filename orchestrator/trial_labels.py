"""Labels of trials in a table: the parts of their keys in which they differ, as short as needed."""

import re
from collections.abc import Mapping, Sequence

from trials.records.cell import Cell

RECIPE = 2  # among the parts of a key: the longest
WORD = re.compile(r"^[^-+/@(]+|[-+/@(]+[^-+/@(]*")


def labels(cells: Sequence[Cell]) -> tuple[str, list[str]]:
    """Parts of the keys that all cells share, and what is left of each; one GPU has ``1x``."""
    parts = [cell.key_parts for cell in cells]
    if len(parts) < 2:
        return "", [cell.key for cell in cells]
    differs = _differs(parts)
    shared = (part for part, differ in zip(parts[0], differs, strict=True) if not differ)
    own = [
        "/".join(part or "1x" for part, differ in zip(row, differs, strict=True) if differ)
        for row in parts
    ]
    return "/".join(filter(None, shared)), own


def label_forms(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Labels of each cell, from whole ones to the shortest; in each form as distinct as whole ones.

    Shorter forms have the words of each part that tell its values apart, first with the first word
    of each, then without that; and of both, where the labels stay distinct, one without the recipe.
    """
    whole = labels(cells)[1]
    if len(cells) < 2:
        return [(label,) for label in whole]
    parts = [cell.key_parts for cell in cells]
    forms = [whole]
    for keeps_first in (True, False):
        columns = [
            _shortened(column, keeps_first=keeps_first) if differ else [""] * len(cells)
            for column, differ in zip(zip(*parts, strict=True), _differs(parts), strict=True)
        ]
        without = [[""] * len(cells) if i == RECIPE else c for i, c in enumerate(columns)]
        for form in (columns, without):
            texts = ["/".join(filter(None, row)) or "1x" for row in zip(*form, strict=True)]
            if len(set(texts)) == len(set(whole)):
                forms.append(texts)
    return list(zip(*forms, strict=True))


def fitted_labels(forms: Sequence[Sequence[str]], room: int) -> list[str]:
    """The first form whose labels all have room; else the last, cut in the middle.

    Labels that would read alike then begin with their number.
    """
    texts: Sequence[str] = ()
    for texts in zip(*forms, strict=True):
        if max(map(len, texts)) <= room:
            return list(texts)
    cut = [_cut(text, room) for text in texts]
    if len(set(cut)) == len(set(texts)):
        return cut
    return [_cut(f"{number} {text}", room) for number, text in enumerate(texts, start=1)]


def _differs(parts: Sequence[tuple[str, ...]]) -> list[bool]:
    return [len(set(column)) > 1 for column in zip(*parts, strict=True)]


def _cut(label: str, room: int) -> str:
    """A label whose middle gives way: its ends tell trials apart."""
    if len(label) <= room:
        return label
    end = (room - 1) // 2
    return f"{label[: room - 1 - end]}…{label[len(label) - end :]}"


def _shortened(values: Sequence[str], *, keeps_first: bool) -> list[str]:
    """Each value by the words that tell it from the others.

    The longest words go first. A word stays where a value without it would read as the general
    case of another: ``A100`` beside ``A100-80GB``.
    """
    words = {value: tuple(WORD.findall(value)) for value in dict.fromkeys(values)}
    kept = {own[0] for own in words.values() if own and keeps_first}
    within = _within(words)
    droppable = {word for own in words.values() for word in own} - kept
    for word in sorted(droppable, key=lambda word: (-len(word), word)):
        fewer = {value: tuple(w for w in own if w != word) for value, own in words.items()}
        is_empty = any(value and not own for value, own in fewer.items())
        if not is_empty and len(set(fewer.values())) == len(fewer) and _within(fewer) <= within:
            words = fewer
    texts = {value: "".join(own).lstrip("-+/@") for value, own in words.items()}
    return [texts[value] for value in values]


def _within(words: Mapping[str, tuple[str, ...]]) -> set[tuple[str, str]]:
    """Pairs of values of which the first has no word that the second lacks."""
    sets = {value: frozenset(own) for value, own in words.items()}
    return {(a, b) for a in sets for b in sets if a != b and sets[a] <= sets[b]}
