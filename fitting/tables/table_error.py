"""Error of a table, in a module without pandas so that callers can import it quickly."""

from gpu_catalog.errors import UserError


class TableError(UserError):
    """A table that cannot be read; the message has one line for each mistake."""
