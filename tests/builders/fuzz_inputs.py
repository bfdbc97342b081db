"""Inputs of a search for what breaks a command: valid ones with parts replaced, cut or doubled."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

LEAVES = st.one_of(
    st.sampled_from(
        (
            *(None, True, "", "\0", "\x1b[31m", "\u2028key: x", "../../x", "--", "=1+1", "{{ x }}"),
            *(0, -1, 1.5, 1e-300, 1e300, float("inf"), float("nan"), 10**30, -(10**30), "1e9"),
            *([], {}, [None], [[[[]]]], {"a": {"a": {}}}, "x" * 300, [0] * 3000, "a,b", "0", "nan"),
        )
    ),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
)
JUNK = st.one_of(
    st.sampled_from((b"\0", b"\xff\xfe", b"\r", b"{", b"[" * 4000, b"- &a [*a]\n", b'"', b",,,,")),
    st.binary(max_size=30),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A command with the files that it reads, and whether it traces a model."""

    kind: str
    arguments: tuple[str, ...]
    files: Mapping[str, bytes]
    traces: bool = False


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values below a tree of lists and dictionaries."""
    of_list = enumerate(tree) if isinstance(tree, list) else ()
    items = tree.items() if isinstance(tree, dict) else of_list
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def altered(draw: Draw, tree: Any) -> Any:
    """A copy of a tree with one to three values replaced, taken away, moved or put in."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            return tree
        *path, last = draw(st.sampled_from(places))
        parent = tree
        for key in path:
            parent = parent[key]
        action = draw(st.sampled_from(("replace", "replace", "remove", "double", "put")))
        if action == "remove":
            del parent[last]
        elif action == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        elif action == "put" and isinstance(parent, dict):
            key = draw(st.one_of(st.text(max_size=8), st.integers(), st.none()))
            parent[key] = copy.deepcopy(draw(LEAVES))
        else:
            parent[last] = copy.deepcopy(draw(LEAVES))
    return tree


def damaged(draw: Draw, content: bytes) -> bytes:
    """Bytes as they are, or with a part cut, doubled or replaced by junk."""
    if not content or draw(st.booleans()):
        return content
    start = draw(st.integers(0, len(content) - 1))
    end = draw(st.integers(start, min(start + 200, len(content))))
    part = content[start:end]
    between = draw(st.one_of(st.just(b""), st.just(part * 2), JUNK))
    return bytes(content[:start] + between + content[end:])


def text_of(tree: Any) -> bytes:
    """A tree as YAML, with the characters as they are."""
    return yaml.safe_dump(tree, allow_unicode=True).encode(errors="replace")


def json_of(tree: Any) -> bytes:
    """A tree as a line of JSON."""
    return json.dumps(tree, default=str).encode(errors="replace") + b"\n"
