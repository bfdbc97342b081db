"""Numbers that people read have no exponent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_catalog.number_text import dollars, gib_of, short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.845, "0.845"),
        (1.0, "1"),
        (999.6, "1,000"),
        (12345.6, "12,300"),
        (-1234.0, "-1,230"),
        (4e-5, "0.00004"),
        (0.0, "0"),
    ],
)
def test_three_digits_in_plain_notation(value: float, text: str) -> None:
    """Zeros at the end are dropped, and thousands are separated."""
    assert short(value) == text


@given(st.floats(-1e12, 1e12), st.integers(1, 6))
def test_it_is_the_number_rounded(value: float, digits: int) -> None:
    """Only the notation differs from Python's own."""
    text = short(value, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == float(f"{value:.{digits}g}")


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "0.00"),
        (0.00854, "0.00854"),
        (0.5, "0.50"),
        (0.9996, "1.00"),
        (1.2, "1.20"),
        (99.994, "99.99"),
        (99.996, "100"),
        (1234.56, "1,230"),
        (-3.0, "-3.00"),
    ],
)
def test_dollars_have_cents_below_a_hundred(usd: float, text: str) -> None:
    """No more digits than a prediction has; below one dollar, as many as `short`."""
    assert dollars(usd) == text


@pytest.mark.parametrize(
    ("held", "limit", "text"),
    [
        (17.149, 23.08, "17.1 of 23.1"),
        (17.12, 17.14, "17.12 of 17.14"),
        (17.0001, 17.0, "17.000 of 17.000"),
        (17.0006, 17.0, "17.001 of 17.000"),
    ],
)
def test_memory_near_its_limit_has_the_decimals_that_tell_them_apart(
    held: float, limit: float, text: str
) -> None:
    """Three at most."""
    assert gib_of(held, limit) == text
