"""What is wrong with a table; apart from what reads it, which needs pandas."""


class TableError(ValueError):
    """A table that cannot be read; the message has one line for each mistake."""
