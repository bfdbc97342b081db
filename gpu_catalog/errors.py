"""Root of the errors that a user can mend."""


class UserError(Exception):
    """A mistake in what the user gave, or a state that the user can change; a line for each.

    The command line prints it and exits with 1; callers of the Python API catch it.
    """
