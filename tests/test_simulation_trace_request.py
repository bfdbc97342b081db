"""The fingerprint of traces: every source file that a trace depends on is part of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import trials
from trials.simulation.trace_request import replay_sources, trace_sources

PACKAGE = Path(trials.__file__).parent
WORKER = PACKAGE / "simulation/tracing/tracing_worker.py"
REPLAYING = PACKAGE / "simulation/varying_lengths.py"
# Their effect on a trace is in its key (cell, recipe, model), or they have none: types of records,
# the start of processes, the host on which real ranks are built, the comparison of a built model
# with its recipe.
NOT_IN_TRACES = {
    *("__init__.py", "child_process/bootstrap.py", "child_process/environment.py"),
    *("child_process/parent_death.py", "thread_pool.py"),
    *("records/built.py", "records/cell.py", "records/compatibility.py", "records/observation.py"),
    *("records/collectives.py", "recipes/unsimulated_strategies.py"),
    *("recipes/fields.py", "recipes/mistakes.py", "recipes/named_recipes.py", "recipes/recipe.py"),
    *("recipes/parallel.py", "simulation/ranks/rank_links.py"),
    "simulation/ranks/layout_approximations.py",  # notes of an answer
    *("recipes/optional_packages.py", "recipes/host_bytes.py"),
    *("simulation/tracing_child.py", "training/recipe_check.py"),
}


def imported(path: Path) -> Iterator[Path]:
    """Files of the package that a file imports, inside its functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            file = PACKAGE.parent / f"{name.replace('.', '/')}.py"
            if name.startswith("trials.") and file.exists():
                yield file


def reached(start: Path) -> set[Path]:
    """Files of the package that a file imports, directly or through others."""
    files, waiting = set[Path](), [start]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += imported(file)
    return files


def test_every_file_that_the_tracing_process_imports_is_in_the_fingerprint() -> None:
    """A new file must be listed in ``trace_sources``, or here with a reason."""
    needed = {str(file.relative_to(PACKAGE)) for file in reached(WORKER)}
    covered = {str(file.relative_to(PACKAGE)) for file in trace_sources(PACKAGE)}
    assert needed - covered - NOT_IN_TRACES == set()
    assert not covered & NOT_IN_TRACES - {"__init__.py"}


def test_every_file_that_a_replay_imports_is_in_the_fingerprint_of_its_peaks() -> None:
    """Runs of drawn lengths import all that turns traces into peaks; the lengths are in the key."""
    sources = (*trace_sources(PACKAGE), *replay_sources(PACKAGE))
    needed = {str(file.relative_to(PACKAGE)) for file in reached(REPLAYING)}
    covered = {str(file.relative_to(PACKAGE)) for file in sources}
    assert needed - covered - NOT_IN_TRACES == {"drawn_lengths.py"}


def test_every_source_of_the_fingerprint_exists() -> None:
    """A moved file would otherwise stop the fingerprint at its first use."""
    sources = list(trace_sources(PACKAGE))
    assert all(source.is_file() for source in sources)
    assert WORKER in sources
