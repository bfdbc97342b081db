"""Cases of a test that ``make test-long`` runs, beside those of each run."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_cases(cases: Iterable[object]) -> list[Any]:
    """Parameters of a test that are marked as long; a tuple has a value for each of them."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
