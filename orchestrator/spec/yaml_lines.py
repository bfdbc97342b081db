"""YAML reader that keeps the line of every value, for messages."""

from dataclasses import dataclass
from typing import Any

import yaml

Location = tuple[str | int, ...]

# Far beyond any specification; more would exhaust memory or the recursion limit.
MOST_LEVELS = 20
MOST_PARTS = 100_000  # a few aliases of aliases stand for more than memory holds
MOST_BITS = 63


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake: its line, and a text with the remedy."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class LocatedYaml:
    """Plain data with the line of each part."""

    data: Any
    lines: dict[Location, int]
    problems: tuple[Problem, ...]

    def line(self, location: Location) -> int:
        """Line of a part, or of the nearest part that contains it."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


class _UnreadableError(Exception):
    """Reading stopped at this node."""

    def __init__(self, node: yaml.Node, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(_line(node), text)


def read_yaml(text: str) -> LocatedYaml:
    """Parse one YAML document.

    A key given twice is a problem here: YAML readers keep the last one silently. One that overrides
    a merged key (``<<``) is not. PyYAML rather than ruamel.yaml, which stops at the first key given
    twice, wraps scalars in types of its own, and takes ``yes`` for text.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else loader.read(node, ())
    except _UnreadableError as error:
        return LocatedYaml(None, {}, (error.problem,))
    except RecursionError:
        return LocatedYaml(None, {}, (Problem(1, f"is nested more than {MOST_LEVELS} deep"),))
    except yaml.YAMLError as error:
        return LocatedYaml(None, {}, (_not_yaml(error, text),))
    return LocatedYaml(data, loader.lines, tuple(loader.problems))


def _not_yaml(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Problem(line, f"not YAML: the character U+{error.character:04X} may not stand in it")
    assert isinstance(error, yaml.MarkedYAMLError)  # all others that a text can cause
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    problem = str(error.problem)
    if error.context is not None:
        begun = error.context_mark.line + 1 if error.context_mark is not None else line
        problem = f"{error.context}{f' (line {begun})' if begun != line else ''}: {problem}"
    return Problem(line, f"not YAML: {problem}")


class _Loader(yaml.SafeLoader):
    _passed = _newlines = 0  # before ``__init__``, which marks the start

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []

    def get_mark(self) -> yaml.Mark:
        """Mark the current place, by the line that editors show.

        YAML ends lines at U+0085, U+2028 and U+2029, too.
        """
        mark = super().get_mark()
        self._newlines += self.buffer.count("\n", self._passed, self.pointer)
        self._passed = self.pointer
        mark.line = self._newlines
        return mark

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping as it is written, before keys are merged in: there, none is twice."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _UnreadableError(key, "a key must be text, not a list or a mapping")
            if key.value in names:
                text = f"{_shortened(key.value)} is given twice: keep one"
                self.problems.append(Problem(_line(key), text))
            names.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge mappings under ``<<``; a few merges of merges stand for more than memory holds."""
        super().flatten_mapping(node)
        self._bound(node, len(node.value))

    def _bound(self, node: yaml.Node, parts: int) -> None:
        if parts > MOST_PARTS:
            raise _UnreadableError(node, f"holds more than {MOST_PARTS} values: list fewer")

    def read(self, node: yaml.Node, location: Location) -> Any:
        """Plain data of a node; keeps the line of each of its parts."""
        self.lines.setdefault(location, _line(node))
        if len(location) > MOST_LEVELS:
            # An alias to a part that holds it has no end.
            raise _UnreadableError(node, f"is nested more than {MOST_LEVELS} deep")
        self._bound(node, len(self.lines))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*location, i)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node)
        self.flatten_mapping(node)
        data = {}
        for key, value in node.value:
            self.lines[(*location, key.value)] = _line(key)
            data[key.value] = self.read(value, (*location, key.value))
        return data

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self.construct_object(node)
        except (ValueError, ArithmeticError, LookupError, AttributeError):
            # PyYAML trips over text that looks like a date, and over more digits than int() takes.
            value = 2**MOST_BITS if node.value.strip("+-").isdecimal() else node.value
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            text = (
                f"the number {_shortened(node.value)} is too large: write one of at most 18 digits"
            )
            raise _UnreadableError(node, text)
        return value


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
