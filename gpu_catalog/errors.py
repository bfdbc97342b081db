"""Base class of errors that a user can correct."""


class UserError(Exception):
    """A mistake in the user's input, or a state that the user can change; one line for each.

    The command line prints the message and exits with 1; callers of the Python API catch it.
    """
