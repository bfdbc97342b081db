"""Scores of the last `mutmut run` by module; fails below the percentage in pyproject.toml.

With `--sample`, mutants may be left unchecked. With `--draw N`, it prints the names of N mutants of
each module instead, drawn with the module's path as the seed.
"""

import argparse
import ast
import json
import random
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

KILLED = frozenset({1, 3, 24, 36, 152, 255, -24})  # exit codes of a failed test or of a time-out
SURVIVED = frozenset({0, 5, 33})  # all tests passed, or none calls the function
MUTANTS = Path("mutants")


def changed_lines(path: Path) -> dict[str, str]:
    """The changed lines of each mutant of a module, by the name of its function."""
    text = (MUTANTS / path).read_text(encoding="utf-8")
    bodies: dict[str, list[str]] = {}
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            body = lines[node.lineno : node.end_lineno]
            bodies[node.name] = [line.strip() for line in body]
    return {
        name: " ".join(
            line
            for line in body
            if line not in bodies[re.sub(r"__mutmut_\d+$", "__mutmut_orig", name)]
        )
        for name, body in bodies.items()
    }


def exit_codes(module: str) -> dict[str, int | None]:
    """Exit code of the tests of each mutant of a module; None where they did not run."""
    record = MUTANTS / f"{module}.meta"
    codes: dict[str, int | None] = json.loads(record.read_text(encoding="utf-8"))[
        "exit_code_by_key"
    ]
    return codes


def draw(count: int, modules: list[str]) -> int:
    """Print the names of the mutants to check: so many of each module."""
    for module in modules:
        names = sorted(exit_codes(module))
        names = random.Random(module).sample(names, min(count, len(names)))
        sys.stdout.writelines(f"{name}\n" for name in names)
    return 0


def score(modules: list[str], rules: dict[str, Any], *, is_sample: bool) -> int:
    """Print a line per module and the survivors that no reason explains."""
    least_percent = rules["least_percent"]
    equivalent = [re.compile(pattern) for pattern in rules["equivalent"]]
    below = 0
    for module in modules:
        codes = exit_codes(module)
        lines = changed_lines(Path(module))
        alive = {name: lines.get(name.rpartition(".")[2], "") for name in codes}
        alive = {name: line for name, line in alive.items() if codes[name] in SURVIVED}
        left = {
            name: line
            for name, line in alive.items()
            if not any(pattern.search(line) for pattern in equivalent)
        }
        killed = sum(code in KILLED for code in codes.values())
        unchecked = len(codes) - killed - len(alive)
        percent = 100 * killed / max(killed + len(left), 1)
        below += (unchecked and not is_sample) or percent < least_percent
        sys.stdout.write(
            f"{module}: {percent:.1f} % of {killed + len(left)}, {len(left)} left, "
            f"{len(alive) - len(left)} equivalent, {unchecked} not checked\n"
        )
        for name, line in left.items():
            sys.stdout.write(f"    {name.rpartition('.')[2]}: {line}\n")
    return 1 if below else 0


def main() -> int:
    """Draw mutants, or print the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--sample", action="store_true")
    options = parser.parse_args()
    tool = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]
    modules = tool["mutmut"]["only_mutate"]
    if options.draw is not None:
        return draw(options.draw, modules)
    return score(modules, tool["mutation_score"], is_sample=options.sample)


if __name__ == "__main__":
    sys.exit(main())
