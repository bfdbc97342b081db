"""What is wrong with a table; apart from what reads it, which needs pandas."""

from gpu_catalog.errors import UserError


class TableError(UserError):
    """A table that cannot be read; the message has one line for each mistake."""
