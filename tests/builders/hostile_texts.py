"""Texts that would be read as more than text where they are written without quotes."""

from typing import Any

from hypothesis import strategies as st

MADE = "made-by-a-text"
"""Name of the file that a text makes where a shell runs a part of it, and of keys that it adds."""

INJECTIONS = (
    f"us-east-1\n{MADE}: {{image: evil/x}}\nzzz: |1",
    f"x\n      {MADE}: 1",
    f"x\u2028{MADE}: 1\u2029{MADE}: 1\x85{MADE}: 1\r{MADE}: 1",
    f"x, {MADE}: 1",
    f"x: {{{MADE}: 1}}",
    f"x # {MADE}",
    f'"x"\n{MADE}: 1',
    f"'x'}}\n{MADE}: 1",
    f"$(touch {MADE})",
    f"`touch {MADE}`",
    f"x; touch {MADE} #",
    f"x' ; touch {MADE} ; '",
    f'x" ; touch {MADE} ; "',
    f"x\ntouch {MADE}\n",
    f"x\nJOB\n)\"\ntouch {MADE}\n: \"$(cat << 'JOB'\n",
    f"x\nCONFIGURATION\ntouch {MADE}\n",
    f"x\\\ntouch {MADE}",
    f"x | touch {MADE} & > {MADE}",
    *("1e5", "0x1F", "0o7", "1_0", "on", "Null", "~", "2026-01-31", "1:30", "<<", "=", "-", "?"),
    *("", " ", "\t", "\n", "a\n", " a", "\n a", "{{ 1 }}", "${HOME}", "*x", "&x", "!x", "%x", "@x"),
    *("\ufeff", "\uffff", "\U0001f600", "a\u202eb", "é"),
)


def texts(**bounds: Any) -> st.SearchStrategy[str]:
    """Injections and any others."""
    return st.one_of(st.sampled_from(INJECTIONS), st.text(**bounds))


def keys(tree: Any) -> list[Any]:
    """Nested keys of a tree without its values."""
    if isinstance(tree, dict):
        return [(key, keys(value)) for key, value in tree.items()]
    return [keys(one) for one in tree] if isinstance(tree, list) else []
