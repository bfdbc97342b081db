"""Numbers as text for people: a few significant digits, never an exponent."""

from decimal import Decimal


def short(value: float, digits: int = 3) -> str:
    """Write a finite number with significant digits, plainly: 0.0000123, 12.3, 12,300."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def ends(low: float, high: float) -> str:
    """Write the ends of an interval."""
    return f"{short(low)} to {short(high)}"


def given(value: float | None) -> str:
    """Write a number that a user gave, with all its digits: 1,000,000 or 0.5; none as nothing."""
    return "" if value is None else short(value, 12)
