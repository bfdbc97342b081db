"""YAML that remembers on which line everything stood, so that a mistake can be pointed at."""

from dataclasses import dataclass
from typing import Any

import yaml

Location = tuple[str | int, ...]


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


def read_yaml(text: str) -> LocatedYaml:
    """Parses one YAML document.

    A key given twice is a problem here: YAML readers keep the last one silently.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        reader = _Reader(loader)
        data = None if node is None else reader.read(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        return LocatedYaml(None, {}, (Problem(line, f"not YAML: {error.problem}"),))
    except yaml.YAMLError as error:
        return LocatedYaml(None, {}, (Problem(1, f"not YAML: {str(error).splitlines()[0]}"),))
    finally:
        loader.dispose()
    return LocatedYaml(data, reader.lines, tuple(reader.problems))


class _Reader:
    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, location: Location) -> Any:
        self.lines[location] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*location, i)) for i, item in enumerate(node.value)]
        return self._loader.construct_object(node, deep=True)

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        self._loader.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(self._loader.construct_object(key_node, deep=True))
            line = key_node.start_mark.line + 1
            if key in found:
                self.problems.append(Problem(line, f"{key!r} is given twice: keep one"))
            found[key] = self.read(value_node, (*location, key))
            self.lines[(*location, key)] = line
        return found
