"""Cases of a test that ``make test-long`` runs, beside those of each run."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def long_cases(cases: Iterable[object]) -> list[ParameterSet]:
    """Mark cases as long; a tuple has a value for each parameter."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
