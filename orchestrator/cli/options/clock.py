"""The current time."""

import datetime as dt


def now() -> dt.datetime:
    """The time, UTC."""
    return dt.datetime.now(dt.UTC)


def today() -> dt.date:
    """The day, UTC."""
    return now().date()
