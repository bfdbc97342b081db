"""Specifications with mistakes, and the mistakes that reading them reports."""

import pytest

from builders.runs import ONE_CELL
from orchestrator.spec.spec_file import SpecError, parse_spec


def mistakes_in(text: str) -> list[str]:
    """The mistakes of a specification, a line each, without the file's name."""
    with pytest.raises(SpecError) as error:
        parse_spec(text, "x.yaml")
    lines = str(error.value).split("\n")
    assert all(line.startswith("x.yaml:") for line in lines), lines
    return [line.removeprefix("x.yaml:") for line in lines]


def altered(old: str, new: str, text: str = ONE_CELL) -> str:
    """The one-cell specification with one of its parts changed."""
    assert text.count(old) == 1, old
    return text.replace(old, new)
