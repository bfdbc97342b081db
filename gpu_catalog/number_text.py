"""Numbers as text for people: a few significant digits, never an exponent."""

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

CENT = Decimal("0.01")


def short(value: float, digits: int = 3) -> str:
    """Write a finite number with significant digits, plainly: 0.0000123, 12.3, 12,300."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def dollars(usd: float) -> str:
    """Write dollars without their sign: 0.0042, 0.50, 12.30, 1,230.

    Half a cent is rounded up, as on a bill and as a report's page does: 1.625 is 1.63.
    """
    if abs(usd) >= 99.995:
        return short(usd)
    if abs(usd) >= 1:
        return str(Decimal(str(usd)).quantize(CENT, ROUND_HALF_UP))
    whole, _, cents = short(usd).partition(".")
    return f"{whole}.{cents:0<2}"


def ends(low: float, high: float, text: Callable[[float], str] = short) -> str:
    """Write the ends of an interval."""
    return f"{text(low)} to {text(high)}"


def gib_of(held: float, limit: float) -> str:
    """Write memory beside its limit: 17.1 of 23.1, and 17.12 of 17.14 where they are near.

    Args:
        held: GiB that are held.
        limit: GiB that may be held.
    """
    decimals = next((n for n in (1, 2) if f"{held:.{n}f}" != f"{limit:.{n}f}"), 3)
    return f"{held:.{decimals}f} of {limit:.{decimals}f}"


def given(value: float | None) -> str:
    """Write a number that a user gave, with all its digits: 1,000,000 or 0.5; none as nothing."""
    return "" if value is None else short(value, 12)
