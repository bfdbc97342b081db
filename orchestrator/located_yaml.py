"""YAML that remembers on which line everything stood, so that a mistake can be pointed at."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

Location = tuple[str | int, ...]

# Far beyond any specification, and what everything else can hold and quote.
MOST_LEVELS = 20
MOST_PARTS = 100_000  # a few aliases of aliases stand for more than memory holds
MOST_BITS = 63
INT_TAG = "tag:yaml.org,2002:int"
MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it is and what to do about it."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class LocatedYaml:
    """Plain data, and the line of each of its parts."""

    data: Any
    lines: dict[Location, int]
    problems: tuple[Problem, ...]

    def line(self, location: Location) -> int:
        """The line of a part, or of the nearest part that holds it."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


class _UnreadableError(Exception):
    """Where reading had to stop."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(line, text)


def read_yaml(text: str) -> LocatedYaml:
    """Parses one YAML document.

    A key given twice is a problem here: YAML readers keep the last one silently. One that overrides
    a merged key (``<<``) is not.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            reader = _Reader(loader)
            data = None if node is None else reader.read(node, ())
        finally:
            loader.dispose()
    except _UnreadableError as error:
        return LocatedYaml(None, {}, (error.problem,))
    except RecursionError:
        return LocatedYaml(None, {}, (Problem(1, f"is nested more than {MOST_LEVELS} deep"),))
    except yaml.YAMLError as error:
        return LocatedYaml(None, {}, (_not_yaml(error, text),))
    return LocatedYaml(data, reader.lines, tuple(reader.problems))


def _not_yaml(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Problem(line, f"not YAML: the character U+{error.character:04X} may not stand in it")
    assert isinstance(error, yaml.MarkedYAMLError)  # all others that a text can cause
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    said = str(error.problem)
    if error.context is not None:
        begun = error.context_mark.line + 1 if error.context_mark is not None else line
        said = f"{error.context}{f' (line {begun})' if begun != line else ''}: {said}"
    return Problem(line, f"not YAML: {said}")


class _Reader:
    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._keys_checked: set[int] = set()  # of mappings, by identity: aliases share them
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, location: Location) -> Any:
        line = node.start_mark.line + 1
        self.lines[location] = line
        if len(location) > MOST_LEVELS:
            # An alias to a part that holds it has no end.
            raise _UnreadableError(line, f"is nested more than {MOST_LEVELS} deep")
        if len(self.lines) > MOST_PARTS:
            raise _UnreadableError(line, f"holds more than {MOST_PARTS} values: list fewer")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*location, i)) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (ValueError, ArithmeticError, LookupError, AttributeError):
            # PyYAML trips over what looks like a date or a number and is none: then it is text.
            value = node.value
            if node.tag == INT_TAG and value.strip("+-").isdecimal():
                value = 2**MOST_BITS  # more digits than Python converts
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            text = (
                f"the number {_shortened(node.value)} is too large: write one of at most 18 digits"
            )
            raise _UnreadableError(node.start_mark.line + 1, text)
        return value

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        self._check_keys(node)
        self._loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            found[key] = self.read(value_node, (*location, key))
            self.lines[(*location, key)] = line
        return found

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Before keys are merged in, which come first and may be overridden."""
        if id(node) in self._keys_checked:
            return
        self._keys_checked.add(id(node))
        seen: set[str] = set()
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise _UnreadableError(line, "a key must be text, not a list or a mapping")
            if key_node.value in seen:
                self.problems.append(
                    Problem(line, f"{_shortened(key_node.value)} is given twice: keep one")
                )
            seen.add(key_node.value)
            if key_node.tag == MERGE_TAG:
                for merged in _merged(value_node):
                    self._check_keys(merged)


def _merged(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """The mappings after ``<<``; what else stands there, PyYAML refuses."""
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return (part for part in parts if isinstance(part, yaml.MappingNode))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
