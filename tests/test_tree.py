"""Limits of the tree: small folders, files and functions; one meaning for a name; plain words."""

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gpu_catalog", "trials", "fitting", "orchestrator")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py"))
MOST_MODULES, MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_CLASS_LINES = 12, 400, 60, 200
MOST_PARAMETERS = 6
SELF = {"self", "cls"}
# Variables that say nothing of what they hold, and words of no trade.
VAGUE = {"told", "found", "known", "seen", "of", "each", "mine", "asked"}
WORDS = re.compile(r"\b(told(?! apart)|tells|dearer|foretold|learnt)\b", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Nodes = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def modules() -> Iterator[Nodes]:
    """Every node of every module."""
    parsed = {path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in MODULES}
    yield parsed
    parsed.clear()


def place(path: Path, node: ast.AST) -> str:
    """File and line."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def body_lines(function: Function) -> int:
    """Lines of a function's body, its docstring not counted."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body and function.end_lineno else 0


def parameters(function: Function) -> list[str]:
    """Names of a function's parameters, without self."""
    given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return [one.arg for one in given if one.arg not in SELF]


def test_no_folder_holds_more_than_twelve_modules() -> None:
    """Dunder files are not counted."""
    folders = Counter(path.parent for path in MODULES if not path.name.startswith("__"))
    crowded = {str(k.relative_to(ROOT)): n for k, n in folders.items() if n > MOST_MODULES}
    assert crowded == {}


def test_no_file_is_longer_than_400_lines() -> None:
    """Neither of the product nor of the tests."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (*MODULES, *TESTS)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FILE_LINES} == {}


def test_functions_and_classes_stay_short(modules: Nodes) -> None:
    """A function has at most 60 lines of body, a class 200 lines."""
    long = []
    for path, nodes in modules.items():
        for node in nodes:
            if isinstance(node, Function) and body_lines(node) > MOST_FUNCTION_LINES:
                long.append(f"{place(path, node)}: {node.name}")
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                long += [f"{place(path, node)}: {node.name}"] * (lines > MOST_CLASS_LINES)
    assert long == []


def test_public_functions_take_at_most_six_parameters(modules: Nodes) -> None:
    """A function that needs more takes a record."""
    many = [
        f"{place(path, node)}: {node.name}"
        for path, nodes in modules.items()
        for node in nodes
        if isinstance(node, Function)
        and not node.name.startswith("_")
        and len(parameters(node)) > MOST_PARAMETERS
    ]
    assert many == []


def test_a_class_name_has_one_meaning(modules: Nodes) -> None:
    """A class is found by its name alone."""
    places = defaultdict(list)
    for path, (module, *_) in modules.items():
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place(path, node))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_variables_are_nouns(modules: Nodes) -> None:
    """No variable or parameter is called told, found, known, seen, of, each, mine or asked.

    Fields of records keep their names: files on disk have them.
    """
    vague = []
    for path, tree in modules.items():
        fields = {id(node.target) for node in tree if isinstance(node, ast.AnnAssign)}
        for node in tree:
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            is_stored &= id(node) not in fields
            name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else None
            vague += [f"{place(path, node)}: {name}"] * (name in VAGUE)
    assert vague == []


def test_docstrings_stand_alone(modules: Nodes) -> None:
    """None begins with a question word: an imperative or a noun phrase says it in fewer words."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    begin = [
        f"{place(path, node)}: {text.splitlines()[0]}"
        for path, nodes in modules.items()
        for node in nodes
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if re.match(r"(What|That|How|Who|Where|When|Why)\b", text)
    ]
    assert begin == []


@pytest.mark.parametrize("folder", [*PACKAGES, "deploy", "docs", "README.md", "CONTRIBUTING.md"])
def test_users_and_developers_read_the_words_of_the_field(folder: str) -> None:
    """Predicted, not told; more expensive, not dearer; learned, not learnt."""
    files = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name in files
        if not re.search(r"(\.svg|\.png|\.csv)$|/vendor/", name)
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]
    assert wrong == []
