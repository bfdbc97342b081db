"""Checks of messages of several lines by the values in them."""


def assert_lines(text: str, *expected: tuple[str, ...]) -> None:
    """Check that a text has a line for each tuple, in order, with all of its parts."""
    lines = text.splitlines()
    assert len(lines) == len(expected), text
    for line, parts in zip(lines, expected, strict=True):
        missing = [part for part in parts if part not in line]
        assert not missing, f"{line!r} lacks {missing}"
